"""Tuning: the best hyperparameters, by training with early stopping on packed devices."""
