"""The gradient of a gated product in 8 bits, quantised as it is formed: it never lies in memory in 16 bits.

One scale of the whole tensor is known once every number is. Forming the numbers twice, first for the largest of them, reads
and writes less than to write and read them in between.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels import kernels_for, triton_module
from phalanx.kernels.float8 import quantise_reference
from phalanx.kernels.swiglu import SMALLEST_BLOCK, swiglu_backward_reference
from phalanx.torch_compat import common as compat

LARGEST_BLOCK = 128
"""Wider groups have more numbers than the registers of a program hold."""


@torch.library.custom_op("phalanx::swiglu_gradient_amax", mutates_args=())
def swiglu_gradient_amax(grad_NF: Tensor, gate_up: Tensor, block: int) -> Tensor:
    """Return the largest absolute value of the gradient of `gate_up`, float32 [1].

    grad: [N, F], gradient of swiglu(gate_up). gate_up: [N, 2F] as in `kernels.swiglu`, of the same format.
    """
    kernel = kernels_for(gate_up, "float8_triton")
    if kernel is None or not _covers(gate_up, block):
        return swiglu_backward_reference(grad_NF, gate_up, block)[0].abs().amax().float().view(1)
    result: Tensor = kernel.run_swiglu_gradient_amax(grad_NF.contiguous(), gate_up.contiguous(), block)
    return result


@swiglu_gradient_amax.register_fake
def _(grad_NF: Tensor, gate_up: Tensor, block: int) -> Tensor:
    return grad_NF.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("phalanx::quantise_swiglu_gradient", mutates_args=())
def quantise_swiglu_gradient(
    grad_NF: Tensor,
    gate_up: Tensor,
    block: int,
    scale: Tensor,
    hidden_scale: Tensor,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `gate_up` divided by `scale`, [N, 2F], the same transposed, [2F, N], both in `dtype`, and the
    transposed of swiglu(gate_up) divided by `hidden_scale`, [F, N] in `hidden_dtype`.

    grad, gate_up: see `swiglu_gradient_amax`. scale, hidden_scale: float32 [1]. Formed in at least float32, rounded twice,
    first to the format of gate_up, as numbers that lie in memory are.
    """
    kernel = kernels_for(gate_up, "float8_triton")
    if kernel is None or not _covers(gate_up, block):
        return quantise_swiglu_reference(grad_NF, gate_up, block, scale, hidden_scale, dtype, hidden_dtype)
    results = _empty_results(grad_NF, gate_up, dtype, hidden_dtype)
    inputs = grad_NF.contiguous(), gate_up.contiguous()
    kernel.run_quantise_swiglu_gradient(*inputs, block, scale, hidden_scale, *results)
    return results


@quantise_swiglu_gradient.register_fake
def _(grad_NF: Tensor, gate_up: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, dtype, hidden_dtype = rest
    return _empty_results(grad_NF, gate_up, dtype, hidden_dtype)


def quantise_swiglu_reference(
    grad_NF: Tensor,
    gate_up: Tensor,
    block: int,
    scale: Tensor,
    hidden_scale: Tensor,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `quantise_swiglu_gradient` in plain PyTorch, for every device and format."""
    rounded, hidden = swiglu_backward_reference(grad_NF, gate_up, block)
    q, q_t = quantise_reference(rounded, scale, scale, dtype, True, True)
    return q, q_t, quantise_reference(hidden, hidden_scale, hidden_scale, hidden_dtype, False, True)[1]


def _empty_results(
    grad_NF: Tensor, gate_up: Tensor, dtype: torch.dtype, hidden_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        gate_up.new_empty(gate_up.shape, dtype=dtype),
        gate_up.new_empty(gate_up.shape[::-1], dtype=dtype),
        grad_NF.new_empty(grad_NF.shape[::-1], dtype=hidden_dtype),
    )


@cache
def quantises_gradients(device: torch.device) -> bool:
    """Return whether the kernel of `quantise_swiglu_gradient` computes on `device` what its reference does; tried out once.

    Compilers have mixed up the numbers of such tiles: where they do, a gated product is better taken apart.
    """
    if device.type != "cuda":
        return True
    if triton_module("float8_triton") is None:
        return False
    kind, one = compat.float8_formats(device)[0], torch.ones(1, device=device)
    for rows in (37, 256):
        draw = torch.Generator().manual_seed(rows)
        grad, gate_up = (torch.randn(rows, size, generator=draw).bfloat16().to(device) for size in (128, 256))
        q, q_t, hidden_t = (x.float() for x in quantise_swiglu_gradient(grad, gate_up, 64, one, one, kind, kind))
        wanted, _, wanted_hidden = (
            x.float() for x in quantise_swiglu_reference(grad, gate_up, 64, one, one, kind, kind)
        )
        errors = [(a - b).norm() / b.norm() for a, b in ((q, wanted), (q_t.t(), wanted), (hidden_t, wanted_hidden))]
        if not max(map(float, errors)) <= 1e-2:
            return False
    return True


def _covers(gate_up: Tensor, block: int) -> bool:
    power_of_two = block & (block - 1) == 0
    known = gate_up.dtype in (torch.bfloat16, torch.float16)
    return known and power_of_two and SMALLEST_BLOCK <= block <= LARGEST_BLOCK and gate_up.numel() > 0
