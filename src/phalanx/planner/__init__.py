"""What a layout takes, without running it, and which layouts are worth running."""
