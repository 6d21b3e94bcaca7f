"""Every PyTorch API that is private, still moving, or differs between device types. Nothing else asks for versions.

Features are probed, never inferred from a version string.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with the result in the wider `dtype`, accumulated in it where the device can do so without an extra rounding."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def is_rocm() -> bool:
    """Whether this PyTorch was built for AMD devices."""
    return torch.version.hip is not None


def full_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and checkpoint wrappers put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def memory_statistics(device: torch.device) -> dict[str, int]:
    """Bytes now and at most allocated on an accelerator, as {"now", "peak"}; empty on the CPU, which keeps no such count."""
    if device.type == "cpu":
        return {}
    return {
        "now": torch.accelerator.memory_allocated(device),
        "peak": torch.accelerator.max_memory_allocated(device),
    }
