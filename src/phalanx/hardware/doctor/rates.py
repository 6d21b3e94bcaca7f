"""What a device does when it is asked: its rates, and whether it gives the same answer twice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.device import synchronize

_SIDE, _COPIED = 8192, 2**30
"""Of an accelerator's matrix product; bytes that it copies, read and written each."""
_CPU_SIDE, _CPU_COPIED = 512, 2**25
_SENT = 2**28
"""Bytes of an all-reduce between accelerators; on the CPU a sixty-fourth of it."""
_REPEATS = 3


@dataclass(frozen=True)
class Rates:
    """What one rank measured."""

    rank: int
    matmul_tflops: float
    copy_gb_s: float
    """Bytes read and bytes written together, GB/s."""
    same: bool
    """Whether one product gave the same bits each time."""
    digest: str
    """Of that product's bits, which equal devices have alike; empty on the CPU, of which there are many kinds."""
    node_gb_s: float | None = None
    """Bus bandwidth of an all-reduce among the ranks of the node, GB/s: 2 (n - 1) / n of its bytes in its time."""
    world_gb_s: float | None = None
    """The same among all ranks."""
    sums_right: bool = True
    """Whether those gave the right sums."""


def device_rates(rank: int, device: torch.device) -> Rates:
    """Of this rank's device alone, in a second or two; nothing here waits for another rank."""
    cpu = device.type == "cpu"
    side, copied = (_CPU_SIDE, _CPU_COPIED) if cpu else (_SIDE, _COPIED)
    dtype = torch.float32 if cpu else torch.bfloat16
    clock = Clock(device, span_s=0.02 if cpu else 0.2, samples=_REPEATS)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = clock.seconds(lambda: torch.mm(a, b, out=out))
    products = [torch.mm(a, b) for _ in range(_REPEATS)]
    same = all(torch.equal(product, products[0]) for product in products)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copying = clock.seconds(lambda: target.copy_(source))
    return Rates(
        rank=rank,
        matmul_tflops=2 * side**3 / seconds / 1e12,
        copy_gb_s=2 * copied / copying / 1e9,
        same=same,
        digest="" if cpu else _digest(products[0]),
    )


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def exchange_rate(device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, bool]:
    """(bus bandwidth of an all-reduce in GB/s, whether its sums are right) among the ranks of `group`, or of all ranks.

    Every rank of the group calls this together.
    """
    members, here = dist.get_world_size(group), dist.get_rank(group)
    size = _SENT // 64 if device.type == "cpu" else _SENT
    numbers = torch.full((size // 4,), float(here + 1), device=device)
    dist.all_reduce(numbers, group=group)
    right = bool((numbers == members * (members + 1) / 2).all())
    clock = Clock(device, span_s=0.1, samples=_REPEATS)
    synchronize(device)
    seconds = clock.seconds(lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group), calls=4)
    return 2 * (members - 1) / members * size / seconds / 1e9, right
