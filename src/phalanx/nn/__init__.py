"""Layers that several model families are made of, and the vocabulary in which families declare their parameters."""
