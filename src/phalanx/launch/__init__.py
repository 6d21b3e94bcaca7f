"""Starts ranks on this machine, and writes job scripts for others."""
