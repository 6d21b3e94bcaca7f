"""Trained decoders loaded, scored, asked for text, and converted."""
