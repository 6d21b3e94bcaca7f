"""Which hyperparameters are best."""
