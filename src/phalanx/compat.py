"""Every PyTorch API that is private, still moving, or differs between device types. Nothing else asks for versions.

Features are probed, never inferred from a version string.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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


def record_memory_history(device: torch.device) -> None:
    """Start recording the accelerator allocator's history."""
    torch.get_device_module(device).memory._record_memory_history(max_entries=1_000_000)


def dump_memory_history(device: torch.device, path: Path) -> None:
    """Write the recorded history to `path`, in the format of PyTorch's memory viewer, and stop recording."""
    memory = torch.get_device_module(device).memory
    memory._dump_snapshot(str(path))
    memory._record_memory_history(enabled=None)


def update_scaled(optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
    """One update of a fused optimizer with every gradient divided by `divisor`, or none at all where `skip` is 1.

    divisor, skip: 0-dim float32 tensors on the parameters' device. Both are read by the fused kernel itself, which saves
    a pass over all gradients and a wait for the device; GradScaler talks to fused optimizers through the same attributes.
    """
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def shard_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part of `tensor` begins in the whole, by dim. Each rank must hold one contiguous box of it."""
    chunks = tensor.__create_chunk_list__()
    assert len(chunks) == 1, tensor
    return tuple(chunks[0].offsets)
