"""Measures a device and its links: rates, whether a product gives the same bits twice, and whether sums are right."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.device import synchronize

_SIDE, _CPU_SIDE = 8192, 512
"""Rows and columns of the timed matrix product."""
_COPIED, _CPU_COPIED = 2**30, 2**25
"""Bytes of the timed copy in memory."""
_SENT, _CPU_SENT = 2**28, 2**22
"""Bytes of the timed all-reduce."""
_REPEATS = 3


@dataclass(frozen=True)
class DeviceRates:
    """Measurements of one rank."""

    rank: int
    matmul_tflops: float
    copy_gb_s: float
    """Bytes read plus bytes written per second, GB/s."""
    same: bool
    """Whether one product gave the same bits every time."""
    digest: str
    """Digest of that product's bits, which equal devices share; empty on the CPU, of which there are many kinds."""
    node_gb_s: float | None = None
    """Bus bandwidth of an all-reduce among the ranks of the node, GB/s: 2 (n - 1) / n of its bytes over its time."""
    world_gb_s: float | None = None
    """Bus bandwidth of an all-reduce among all ranks, GB/s."""
    sums_right: bool = True
    """Whether these all-reduces gave the right sums."""


def measure_device(rank: int, device: torch.device) -> DeviceRates:
    """Measure this rank's device in a second or two, without waiting for any other rank."""
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
    # numpy has no bfloat16, so the digest is taken of the bytes.
    bits = products[0].view(torch.uint8).cpu().numpy().tobytes()
    digest = "" if cpu else hashlib.sha256(bits).hexdigest()[:16]
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copying = clock.seconds(lambda: target.copy_(source))
    return DeviceRates(
        rank=rank,
        matmul_tflops=2 * side**3 / seconds / 1e12,
        copy_gb_s=2 * copied / copying / 1e9,
        same=same,
        digest=digest,
    )


def measure_all_reduce(device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, bool]:
    """Return the bus bandwidth of an all-reduce in GB/s and whether its sums are right, among `group` or all ranks.

    Every rank of the group calls this function together.
    """
    members, here = dist.get_world_size(group), dist.get_rank(group)
    size = _CPU_SENT if device.type == "cpu" else _SENT
    numbers = torch.full((size // 4,), float(here + 1), device=device)
    dist.all_reduce(numbers, group=group)
    right = bool((numbers == members * (members + 1) / 2).all())
    clock = Clock(device, span_s=0.1, samples=_REPEATS)
    synchronize(device)
    # A maximum leaves the numbers as they are, however often it is repeated; sums would grow.
    seconds = clock.seconds(lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group), calls=4)
    return 2 * (members - 1) / members * size / seconds / 1e9, right
