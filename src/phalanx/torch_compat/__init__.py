"""Every private or moving PyTorch API, probed by feature."""
