"""Trained networks that predict: errors of held-out structures, the ASE calculator."""
