"""The Triton kernel behind `optimizers.adamw`; import only where Triton is installed.

One pass: parameter, gradient and both moments are read once, parameter and moments written once, and the parameter once
more in the format of the arithmetic where a copy is kept in it, by threads that move 16 bytes at a time. A copy in 8 bits is
written by the scale of the copy before: whoever finds that the largest number, which the same pass looks for, wants another
scale writes it again.
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
        # As `kernels.float8.quantise` does.
        value = p.to(tl.bfloat16).to(tl.float32) * tl.div_rn(1.0, tl.load(scale))
        tl.store(quantised + start + place, value.to(quantised.dtype.element_ty), mask=inside)
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
