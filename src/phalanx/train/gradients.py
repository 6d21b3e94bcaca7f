"""Clipping by the norm of the gradients, and the decision to skip an update."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_or_skip(loss: Tensor, norm: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Return what to divide gradients by, so that their norm is at most `limit`, and whether to skip the update (1 or 0).

    An update is skipped where loss or norm is not finite. loss, norm: 0-dim; the results are 0-dim float32 tensors.
    """
    # Computed on the device throughout: asking for a value here would make the host wait for the whole step.
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = ~torch.isfinite(norm.double() + loss)
    return torch.where(skip, 1.0, divisor).float(), skip.float()
