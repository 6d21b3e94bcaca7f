"""Training: the loop, the step, the optimizer, checkpoints, metrics and the run directory."""
