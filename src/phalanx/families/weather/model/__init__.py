"""The forecaster in plain PyTorch for one device."""
