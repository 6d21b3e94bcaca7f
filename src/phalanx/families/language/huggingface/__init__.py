"""Checkpoints of Hugging Face, read and written."""
