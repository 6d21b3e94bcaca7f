"""Phalanx trains foundation models on AMD, NVIDIA or plain CPU devices with one program."""

__version__ = "0.1.0"
