"""What a run wrote down, read back and shown: the run log, its headline figures and the HTML page."""
