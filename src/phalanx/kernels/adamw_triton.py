"""The Triton kernels behind `optimizers.adamw` and `optimizers.adamw8bit`; import only where Triton is installed.

AdamW in one pass: parameter, gradient and both moments are read once, parameter and moments written once, and the parameter
once more in the format of the arithmetic where a copy is kept in it, by threads that move 16 bytes at a time. A copy in 8
bits is written by the scale of the copy before: whoever finds that the largest number, which the same pass looks for, wants
another scale writes it again.

AdamW with moments in 8 bits in one pass as well: a program decodes the moments of some blocks, updates them and the
parameter, and codes them again, so that of a moment only its codes and scales travel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.float8 import QuantisedCopy

TILE = 1024
"""Elements that a program updates."""
WARPS = 4
BLOCKS = 32
"""Blocks of a moment in 8 bits that a program updates."""


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(
    parameter: tl.tensor,
    gradient: tl.tensor,
    first_moment: tl.tensor,
    second_moment: tl.tensor,
    rounded: tl.tensor,
    corrections: tl.tensor,
    divisor: tl.tensor,
    skip: tl.tensor,
    quantised: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    n: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    COPY: tl.constexpr,
    QUANTISE: tl.constexpr,
) -> None:
    """Update TILE of `n` elements, all float32 but for `rounded`, `quantised` and `amax`.

    corrections: [2], see `run_adamw`. amax: bits of a float32, whose order is that of the sizes they stand for. EVEN:
    whether TILE divides `n`. COPY: whether `rounded` is written. QUANTISE: whether `quantised` is, by `scale`, and `amax`.
    """
    if tl.load(skip) != 0.0:
        return
    # 64 bits: parameters of over 2^31 elements exist.
    start = tl.program_id(0).to(tl.int64) * TILE
    place = tl.arange(0, TILE)
    # Without a mask the compiler emits loads of whole 16 bytes: a mask only where the last program is not full.
    if EVEN:
        inside = None
    else:
        inside = place < n - start
    parameter += start
    gradient += start
    first_moment += start
    second_moment += start
    g = tl.load(gradient + place, mask=inside) / tl.load(divisor)
    p = tl.load(parameter + place, mask=inside)
    m = tl.load(first_moment + place, mask=inside)
    v = tl.load(second_moment + place, mask=inside)
    p -= lr * decay * p
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    # Rounded to nearest, as PyTorch's own kernel does: Triton's plain root is an approximation.
    denominator = tl.sqrt_rn(v) / tl.load(corrections + 1) + eps
    p -= lr / tl.load(corrections) * m / denominator
    tl.store(parameter + place, p, mask=inside)
    tl.store(first_moment + place, m, mask=inside)
    tl.store(second_moment + place, v, mask=inside)
    # In the same pass, while the parameter is in a register: casting later would read it once more.
    if COPY:
        tl.store(rounded + start + place, p.to(rounded.dtype.element_ty), mask=inside)
    if QUANTISE:
        store_quantised(p, quantised + start, place, scale, amax, inside, EVEN)


@triton.jit  # type: ignore[untyped-decorator]
def store_quantised(
    p: tl.tensor,
    quantised: tl.tensor,
    place: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    inside: tl.tensor,
    EVEN: tl.constexpr,
) -> None:
    """Write the copy of `p` in 8 bits by `scale`, and raise `amax` to the largest size of an element."""
    # As `kernels.float8.quantise` does.
    value = p.to(tl.bfloat16).to(tl.float32) * tl.div_rn(1.0, tl.load(scale))
    tl.store(quantised + place, value.to(quantised.dtype.element_ty), mask=inside)
    size = tl.abs(p) if EVEN else tl.where(inside, tl.abs(p), 0.0)
    # As whole numbers: what is no number is larger than all that are.
    tl.atomic_max(amax, tl.max(size.to(tl.int32, bitcast=True), 0), sem="relaxed")


def run_adamw(
    parameter: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    rounded: Tensor | None,
    quantised: QuantisedCopy | None,
    corrections: Tensor,
    divisor: Tensor,
    skip: Tensor,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update once by AdamW, in place (Loshchilov & Hutter 2019, algorithm 2), contiguous float32 tensors of one device.

    rounded: takes the parameter in its own format, where there is such a copy. quantised: takes it in 8 bits by the scale
    that is there; its `amax` is raised to the largest size of an element. corrections: [2], 1 - beta1^t and
    sqrt(1 - beta2^t) of the update's number t. divisor: 0-dim, of the gradient. skip: 0-dim, nothing is changed unless it
    is 0.
    """
    n = parameter.numel()
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device(parameter.device):
        adamw_kernel[(triton.cdiv(n, TILE),)](
            parameter,
            gradient,
            *moments,
            parameter if rounded is None else rounded,
            corrections,
            divisor,
            skip,
            parameter if quantised is None else quantised.q,
            parameter if quantised is None else quantised.scale,
            parameter if quantised is None else quantised.amax.view(torch.int32),
            n,
            lr,
            decay,
            *betas,
            eps,
            TILE=TILE,
            EVEN=n % TILE == 0,
            COPY=rounded is not None,
            QUANTISE=quantised is not None,
            num_warps=WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def adamw8bit_kernel(
    parameter: tl.tensor,
    gradient: tl.tensor,
    mean_codes: tl.tensor,
    mean_scales: tl.tensor,
    root_codes: tl.tensor,
    root_scales: tl.tensor,
    tables: tl.tensor,
    corrections: tl.tensor,
    divisor: tl.tensor,
    skip: tl.tensor,
    blocks: tl.tensor,
    columns: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    eps: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """Update BLOCKS of `blocks` blocks of BLOCK neighbours in a row, all float32 but for the codes, which are uint8.

    tables: [4, SHARES + 1]: the shares that codes of the mean and of the root stand for, ascending, then what lies in the
    middle between two neighbours of each. corrections: [2], 1 - beta1^t and sqrt(1 - beta2^t). EVEN: whether BLOCK divides
    `columns` and BLOCKS divides `blocks`, so that all blocks follow each other in memory.
    """
    if tl.load(skip) != 0.0:
        return
    # 64 bits: parameters of over 2^31 elements exist.
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, BLOCK)[None, :]
    if EVEN:
        place = block[:, None] * BLOCK + within
        inside = None
        there = None
    else:
        in_a_row = tl.cdiv(columns, BLOCK)
        column = (block % in_a_row)[:, None] * BLOCK + within
        place = (block // in_a_row)[:, None] * columns + column
        there = block < blocks
        inside = there[:, None] & (column < columns)
    g = tl.load(gradient + place, mask=inside) / tl.load(divisor)
    p = tl.load(parameter + place, mask=inside)
    mean_code = tl.load(mean_codes + place, mask=inside).to(tl.int32)
    root_code = tl.load(root_codes + place, mask=inside).to(tl.int32)
    mean = tl.load(tables + mean_code) * tl.load(mean_scales + block, mask=there)[:, None]
    root = tl.load(tables + SHARES + 1 + root_code) * tl.load(root_scales + block, mask=there)[:, None]
    mean += (1.0 - beta1) * (g - mean)
    square = root * root
    root = tl.sqrt_rn(square + (1.0 - beta2) * (g * g - square))
    if not EVEN:
        # What stands beside a row's end, whatever was loaded there, would count in the scale of its last block.
        mean = tl.where(inside, mean, 0.0)
        root = tl.where(inside, root, 0.0)
    mean_scale = tl.max(tl.abs(mean), 1)
    root_scale = tl.max(root, 1)
    smallest = 1.1754943508222875e-38
    mean_share = tl.div_rn(mean, tl.maximum(mean_scale, smallest)[:, None])
    root_share = tl.div_rn(root, tl.maximum(root_scale, smallest)[:, None])
    # Of the mean, half of the codes are for each sign, and one is 0.
    size = guess_code(tl.abs(mean_share), 7)
    guess = tl.where(mean_share < 0.0, SHARES // 2 - 1 - size, SHARES // 2 + 1 + size)
    mean_code = nearest_code(mean_share, guess, tables + 2 * (SHARES + 1), SHARES)
    root_code = nearest_code(root_share, guess_code(root_share, 8), tables + 3 * (SHARES + 1), SHARES)
    tl.store(mean_codes + place, mean_code.to(tl.uint8), mask=inside)
    tl.store(root_codes + place, root_code.to(tl.uint8), mask=inside)
    tl.store(mean_scales + block, mean_scale, mask=there)
    tl.store(root_scales + block, root_scale, mask=there)
    direction = mean / (root / tl.load(corrections + 1) + eps)
    p -= lr * decay * p
    p -= lr / tl.load(corrections) * direction
    tl.store(parameter + place, p, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def guess_code(size: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the number of the share of dynamic tree quantisation in whose stretch `size`, from 0 to 1, lies.

    Decade p below 1 has 2^p stretches of equal length, and those below it 2^p - 1. A share lies in the middle of its
    stretch, so that the nearest one is this one or a neighbour.
    """
    decade = tl.clamp(tl.ceil(tl.log2(size) * 0.30102999566398120) + BITS - 1.0, 0.0, BITS - 1.0)
    stretches = tl.exp2(decade)
    # 10 to the decade's power.
    reach = tl.exp2((decade + 1.0 - BITS) * 3.3219280948873623)
    which = tl.clamp(tl.floor((size / reach - 0.1) / 0.9 * stretches), 0.0, stretches - 1.0)
    return (stretches - 1.0 + which).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def nearest_code(share: tl.tensor, guess: tl.tensor, middles: tl.tensor, SHARES: tl.constexpr) -> tl.tensor:
    """Return how many of the SHARES - 1 `middles` lie below each share, where `guess` is off by one at most."""
    below = tl.load(middles + guess - 1, mask=guess > 0, other=-float("inf"))
    above = tl.load(middles + guess, mask=guess < SHARES - 1, other=float("inf"))
    return guess - tl.where(below < share, 0, 1) + tl.where(above < share, 1, 0)


def run_adamw8bit(
    parameter_RC: Tensor,
    gradient_RC: Tensor,
    mean: tuple[Tensor, Tensor],
    root: tuple[Tensor, Tensor],
    tables: Tensor,
    corrections: Tensor,
    divisor: Tensor,
    skip: Tensor,
    *,
    block: int,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update once by AdamW, in place, contiguous float32 matrices of one device whose moments are in 8 bits.

    mean, root: codes (R, C) and scales (R, B) of the first moment and of the second one's root, a scale for each `block`
    neighbours in a row, a power of two. tables: [4, 256], see `adamw8bit_kernel`. corrections, divisor, skip: as
    `run_adamw` takes them.
    """
    columns, blocks = parameter_RC.shape[1], mean[1].numel()
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device(parameter_RC.device):
        adamw8bit_kernel[(triton.cdiv(blocks, BLOCKS),)](
            parameter_RC,
            gradient_RC,
            *mean,
            *root,
            tables,
            corrections,
            divisor,
            skip,
            blocks,
            columns,
            lr,
            decay,
            *betas,
            eps,
            BLOCKS=BLOCKS,
            BLOCK=block,
            SHARES=tables.shape[1] - 1,
            EVEN=columns % block == 0 and blocks % BLOCKS == 0,
            num_warps=WARPS,
        )
