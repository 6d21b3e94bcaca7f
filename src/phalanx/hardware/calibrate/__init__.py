"""Measures a device and its links for the planner."""
