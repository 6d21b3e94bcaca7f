"""Vision transformers that forecast weather."""
