"""Using a trained model: loading it from wherever it lies, converting it, scoring held-out text, writing text."""
