"""What a layout costs before it runs: memory, time and the order of work, from the model and the schedule that run."""
