"""Data to try the family with, made by simulation."""
