"""Legal layouts of a run, as arrays."""
