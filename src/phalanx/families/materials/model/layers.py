"""Layers that several bodies share. Plain PyTorch for one device; parameters are cast where they are used."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.nn.layers import Linear
from phalanx.torch_compat.vmap import transformed

Block = TypeVar("Block", bound=nn.Module)


class Atoms(NamedTuple):
    """What flows from block to block."""

    scalars_NC: Tensor
    """Invariant features of atoms."""
    vectors_NMC: Tensor | None = None
    """Equivariant features of atoms: M = 3 cartesian components first, then those of degree 2; channels may differ."""
    edges_EC: Tensor | None = None
    """Features of edges."""


class Mlp(nn.Module):
    """Linear layers with SiLU between them. sizes: features in, in between and out."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        for number, (inside, outside) in enumerate(pairwise(sizes)):
            self.add_module(str(number), Linear(inside, outside, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        first, *rest = self.children()
        x = first(x)
        for layer in rest:
            x = layer(silu(x))
        return x


class ElementTable(nn.Module):
    """One row of features for each element. weight: [elements + 1, *shape]; row 0 belongs to no element."""

    def __init__(self, max_atomic_number: int, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_atomic_number + 1, *shape))

    def forward(self, species_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Atomic numbers, int64 [N] -> [N, *shape] in format `dtype`."""
        return self.weight.index_select(0, species_N).to(dtype)


class Constant:
    """Fixed numbers that a layer multiplies by; no parameter, no buffer, so nothing to save, shard or initialise."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.numpy(force=True)
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The numbers in format `dtype` on `device`, placed there once."""
        key = (device, dtype)
        if key in self._placed:
            return self._placed[key]
        placed = torch.from_numpy(self._values).to(device, dtype)
        # A fake tensor belongs to the mode that made it.
        if type(placed) is Tensor:
            self._placed[key] = placed
        return placed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, parameters cast to the format of x: for message functions, which are given parameters as tensors."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    # A compiler fuses the chain of operations itself; networks that run side by side are not trained.
    if torch.compiler.is_compiling() or not x.requires_grad or transformed():
        return F.silu(x)
    result: Tensor = _Silu.apply(x)
    return result


def shifted_softplus(x: Tensor) -> Tensor:
    """ln(0.5 e^x + 0.5): smooth, and 0 at 0."""
    return F.softplus(x) - math.log(2.0)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        result: Tensor = _SiluGradient.apply(grads[0], *ctx.saved_tensors)
        return result


class _SiluGradient(torch.autograd.Function):
    """The gradient by x, as a function of the gradient by the result and of x."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        (outer,) = grads
        grad, x = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        curvature = (x * (1.0 - 2.0 * sigmoid) + 2.0) * (sigmoid * (1.0 - sigmoid))
        return torch.ops.aten.silu_backward(outer, x), outer * grad * curvature
