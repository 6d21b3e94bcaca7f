"""The network in plain PyTorch for one device."""
