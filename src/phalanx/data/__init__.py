"""Sources of training samples, one folder a family, and the order in which their samples are read."""
