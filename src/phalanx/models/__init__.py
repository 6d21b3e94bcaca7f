"""Models, one folder a family: plain PyTorch for one device, and what may be split declared beside it as data."""
