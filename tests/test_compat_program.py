"""Compiling a function that contains a derivative, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.compat_program import compiled_program


def slope_and_its_gradient(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((factor * x.pow(3)).sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.square().sum(), x)
    return slope.detach(), curvature


def test_derivatives_are_part_of_the_program() -> None:
    x, factor = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    program = compiled_program(slope_and_its_gradient, (x, factor))
    for given in (x, x.flip(0) * 0.5):
        slope, curvature = program(given, factor)
        torch.testing.assert_close(slope, 6.0 * given.square())
        torch.testing.assert_close(curvature, 144.0 * given.pow(3))
