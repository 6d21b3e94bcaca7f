"""What is done with trained models and their runs."""
