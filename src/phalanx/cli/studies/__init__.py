"""Searches of layouts and of hyperparameters."""
