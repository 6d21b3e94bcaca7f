"""Time of an optimizer step."""
