"""The Triton kernel behind `kernels.swiglu`; import only where Triton is installed.

One pass: grad_hidden and gate_up are read once, grad_gate_up and hidden written once, and nothing else touches memory. A
program takes a few whole groups, so that the gate and the up row of an element are in the same thread and each thread
moves 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 4096
"""Bytes of `hidden` that a program forms: two 16-byte vectors a thread in four warps of 32, one in four of 64."""
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_backward_kernel(
    grad_hidden: tl.tensor,
    gate_up: tl.tensor,
    grad_gate_up: tl.tensor,
    hidden: tl.tensor,
    groups: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """Compute TILE of `groups` groups of BLOCK gate and BLOCK up values. EVEN: whether TILE divides `groups`."""
    # Offsets inside a tile are small: only where the tile begins may exceed 32 bits.
    first = tl.program_id(0).to(tl.int64) * TILE
    group = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    narrow = group * BLOCK + column
    gate_offset = group * (2 * BLOCK) + column
    up_offset = gate_offset + BLOCK
    if EVEN:
        inside = None
    else:
        inside = group < groups - first
    grad_hidden += first * BLOCK
    hidden += first * BLOCK
    gate_up += first * (2 * BLOCK)
    grad_gate_up += first * (2 * BLOCK)

    # Sums and products in float32, rounded once as they are stored.
    gate = tl.load(gate_up + gate_offset, mask=inside).to(tl.float32)
    up = tl.load(gate_up + up_offset, mask=inside).to(tl.float32)
    grad = tl.load(grad_hidden + narrow, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    kind = hidden.dtype.element_ty
    tl.store(hidden + narrow, (silu * up).to(kind), mask=inside)
    tl.store(grad_gate_up + gate_offset, (grad * up * slope).to(kind), mask=inside)
    tl.store(grad_gate_up + up_offset, (grad * silu).to(kind), mask=inside)


def tile_groups(block: int, itemsize: int) -> int:
    """Return groups a program takes, for groups of `block` values of `itemsize` bytes."""
    return max(1, TILE_BYTES // (block * itemsize))


def run_swiglu_backward(grad_hidden: Tensor, gate_up: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Do as `kernels.swiglu.swiglu_backward_reference`, for contiguous tensors of a CUDA or ROCm device."""
    grad_gate_up, hidden = torch.empty_like(gate_up), torch.empty_like(grad_hidden)
    groups = grad_hidden.numel() // block
    tile = tile_groups(block, gate_up.element_size())
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device(gate_up.device):
        swiglu_backward_kernel[(triton.cdiv(groups, tile),)](
            grad_hidden,
            gate_up,
            grad_gate_up,
            hidden,
            groups,
            BLOCK=block,
            TILE=tile,
            EVEN=groups % tile == 0,
            num_warps=WARPS,
        )
    return grad_gate_up, hidden
