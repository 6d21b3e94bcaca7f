"""Faults injected into a real run, and what becomes of it."""
