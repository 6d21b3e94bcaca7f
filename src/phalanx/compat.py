"""Every PyTorch API that is private, still moving, or differs between device types. Nothing else asks for versions.

Features are probed, never inferred from a version string.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in the wider `dtype`, in place where `total` is given: float32 sums of bfloat16 products, say.

    Where the device's matmul can add into a wider matrix the sum costs no pass of its own and no extra rounding.
    """
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if not _wide_matmul(a.device, a.dtype, dtype):
        product = (a @ b).to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


@cache
def _wide_matmul(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether `device` adds products of `narrow` matrices into a `wide` one; tried out once, on a small case."""
    a = torch.ones(16, 16, dtype=narrow, device=device)
    total = torch.ones(16, 16, dtype=wide, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=wide, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all())


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
    """Where this rank's part of `tensor`, one contiguous box, begins in the whole, by dim.

    PyTorch's own answer (`__create_chunk_list__`) is wrong for some uneven sizes split twice along one dim.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds no part"
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis, placement in _in_order_of_splitting(tensor):
        each = -(-sizes[placement.dim] // tensor.device_mesh.size(axis))
        start = min(coordinate[axis] * each, sizes[placement.dim])
        offsets[placement.dim] += start
        sizes[placement.dim] = min(each, sizes[placement.dim] - start)
    local = tensor.to_local()
    assert local.numel() == math.prod(sizes) == 0 or list(local.shape) == sizes, (tensor.placements, local.shape, sizes)
    return tuple(offsets)


def _in_order_of_splitting(tensor: DTensor) -> list[tuple[int, Shard | _StridedShard]]:
    """Mesh axes that split `tensor`, with how: a strided shard was split after all plain ones and those to its right."""
    placed = list(enumerate(tensor.placements))
    strided = [(axis, placement) for axis, placement in placed if isinstance(placement, _StridedShard)]
    plain = [(axis, p) for axis, p in placed if type(p) is Shard]
    assert len(plain) + len(strided) == sum(not p.is_replicate() for _, p in placed), tensor.placements
    return [*plain, *reversed(strided)]
