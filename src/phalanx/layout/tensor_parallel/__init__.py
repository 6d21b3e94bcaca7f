"""Tensor and sequence parallelism: layers split over `tp`, and collectives that autograd sees through."""
