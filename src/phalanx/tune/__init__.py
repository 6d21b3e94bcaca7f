"""Tuning hyperparameters: what may be chosen, early stopping, costs, packing of trials on devices, and what came out."""
