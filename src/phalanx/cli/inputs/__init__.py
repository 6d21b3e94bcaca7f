"""Run files and prepared data."""
