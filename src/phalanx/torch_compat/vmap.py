"""What PyTorch keeps private of its function transforms (vmap, grad)."""

from __future__ import annotations

import torch


def transformed() -> bool:
    """Whether this code runs inside vmap or another transform of torch.func, which takes no plain autograd.Function."""
    return bool(_probe())


def _never() -> bool:
    return False


_probe = getattr(torch._C, "_are_functorch_transforms_active", _never)
