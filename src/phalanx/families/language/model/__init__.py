"""The decoder in plain PyTorch for one device."""
