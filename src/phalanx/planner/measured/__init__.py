"""Measured runs: what the models say of them, and constants fitted to them."""
