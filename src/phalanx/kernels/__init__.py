"""Own kernels for accelerators, each beside a plain PyTorch reference that runs everywhere."""
