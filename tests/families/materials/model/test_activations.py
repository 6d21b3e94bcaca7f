"""Activations and their first and second derivatives, against PyTorch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.families.materials.model.layers import shifted_softplus, silu

X = torch.linspace(-30.0, 30.0, 41, dtype=torch.float64)


def test_silu_and_its_derivatives_are_those_of_torch() -> None:
    found, wanted = [], []
    for function, results in ((silu, found), (F.silu, wanted)):
        x = X.clone().requires_grad_()
        y = function(x)
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * X.cos()).sum(), x)
        results += [y.detach(), first.detach(), second]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    x = X[::8].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(silu, x)


def test_without_a_gradient_silu_is_that_of_torch() -> None:
    assert torch.equal(silu(X), F.silu(X)) and not silu(X).requires_grad


def test_shifted_softplus_is_zero_at_zero_and_slopes_to_one() -> None:
    x = torch.tensor([-40.0, 0.0, 40.0], dtype=torch.float64, requires_grad=True)
    y = shifted_softplus(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.tolist() == [torch.sigmoid(x[0]).item(), 0.5, 1.0]
    assert y[1].item() == 0.0
    torch.testing.assert_close(y.detach()[2], 40.0 - torch.log(torch.tensor(2.0, dtype=torch.float64)))
