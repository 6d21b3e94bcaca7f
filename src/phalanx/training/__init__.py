"""Training: the loop, the step, callbacks, metrics and the run directory."""
