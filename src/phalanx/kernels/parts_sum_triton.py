"""The Triton kernel behind `kernels.parts_sum`; import only where Triton is installed.

Each part is read once and the sum written once, or read and written where it is added to, by threads that move 16 bytes
at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements that a program adds up."""
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def sum_parts_kernel(
    parts: tl.tensor,
    total: tl.tensor,
    n: tl.tensor,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Add up TILE of the `n` elements of each part. EVEN: whether TILE divides `n`. ADD: whether `total` counts too."""
    # 64 bits: gradients of a whole stage may have over 2^31 elements.
    first = tl.program_id(0).to(tl.int64) * TILE
    place = tl.arange(0, TILE)
    if EVEN:
        inside = None
    else:
        inside = place < n - first
    parts += first
    result = tl.load(parts + place, mask=inside).to(tl.float32)
    # Unrolled, and always in the order of the ranks: sums are the same on every rank and in every run.
    for _ in tl.static_range(1, RANKS):
        parts += n
        result += tl.load(parts + place, mask=inside).to(tl.float32)
    total += first
    if ADD:
        result += tl.load(total + place, mask=inside)
    tl.store(total + place, result, mask=inside)


def run_sum_parts(parts: Tensor, total: Tensor, *, add: bool) -> None:
    """Do as `kernels.parts_sum.sum_parts`, for tensors of a CUDA or ROCm device and a float32 sum."""
    ranks, n = parts.shape
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device(total.device):
        sum_parts_kernel[(triton.cdiv(n, TILE),)](
            parts, total, n, RANKS=ranks, TILE=TILE, EVEN=n % TILE == 0, ADD=add, num_warps=WARPS
        )
