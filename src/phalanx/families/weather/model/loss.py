"""Squared error weighted by area, as a sum with a count of targets, so that uneven batches average right."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_error_sum(
    predicted_BLVP: Tensor, targets_BLVP: Tensor, weight_LP: Tensor, weight_V: Tensor | None = None
) -> Tensor:
    """Sum over valid targets of weight * (predicted - target)^2, [1], in at least float32.

    Targets that are NaN are left out, and so is their gradient. With weights of mean 1 over the grid and no target
    missing, the sum divided by the number of targets is ClimaX's `lat_weighted_mse`.
    """
    dtype = torch.promote_types(predicted_BLVP.dtype, torch.float32)
    valid = ~targets_BLVP.isnan()
    error = torch.where(valid, predicted_BLVP.to(dtype) - targets_BLVP.to(dtype), 0.0)
    weighted = error.square() * weight_LP[:, None].to(dtype)
    if weight_V is not None:
        weighted = weighted * weight_V[:, None].to(dtype)
    # Not a view: results that others may change in place must own their memory.
    return torch.stack((weighted.sum(),))


def target_counts(targets_BVHW: Tensor) -> Tensor:
    """How many targets are valid, int64 [1]."""
    return (~targets_BVHW.isnan()).sum()[None]
