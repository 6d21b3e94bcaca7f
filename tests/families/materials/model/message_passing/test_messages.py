"""Sums over edges in chunks, and recomputation whose gradient can be differentiated again."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phalanx.families.materials.model.message_passing.messages import recompute_function, sum_messages


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]


def message(edge_E2: Tensor, source_E: Tensor, atoms_N2: Tensor, weight_23: Tensor) -> Tensor:
    return torch.tanh(edge_E2 * atoms_N2.index_select(0, source_E)) @ weight_23


def test_messages_are_summed_where_edges_end() -> None:
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    target_E = torch.tensor([2, 0, 2, 2])
    for chunk in (None, 1, 3, 4, 100):
        sums = sum_messages(lambda x: 10.0 * x, (values,), (), target_E, 4, chunk)
        assert sums.flatten().tolist() == [20.0, 0.0, 130.0, 0.0]


@pytest.mark.parametrize("chunk", [None, 2])
def test_first_and_second_derivatives_of_sums(chunk: int | None) -> None:
    source_E, target_E = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 0, 0, 2, 2])

    def total(edge: Tensor, atoms: Tensor, weight: Tensor) -> Tensor:
        return sum_messages(message, (edge, source_E), (atoms, weight), target_E, 3, chunk)

    inputs = tensors((5, 2), (3, 2), (2, 3))
    assert torch.autograd.gradcheck(total, inputs)
    assert torch.autograd.gradgradcheck(total, inputs)


def test_derivatives_where_only_some_inputs_want_one() -> None:
    source_E, target_E = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 0, 0, 2, 2])
    edge, atoms, weight = tensors((5, 2), (3, 2), (2, 3))

    def total(edge: Tensor, weight: Tensor) -> Tensor:
        return sum_messages(message, (edge, source_E), (atoms.detach(), weight), target_E, 3, 2)

    assert torch.autograd.gradgradcheck(total, (edge, weight))
    assert torch.autograd.gradgradcheck(lambda e: total(e, weight.detach()), (edge,))


def test_a_linear_message_has_no_second_derivative_and_no_error() -> None:
    edge, weight = tensors((4, 2), (2, 3))
    target_E = torch.tensor([0, 1, 1, 0])

    def total(edge: Tensor) -> Tensor:
        return sum_messages(lambda e, w: e @ w, (edge,), (weight.detach(),), target_E, 2, 3)

    (grad,) = torch.autograd.grad(total(edge).sum(), edge, create_graph=True)
    torch.testing.assert_close(grad.detach(), weight.detach().sum(1).expand(4, 2))
    assert torch.autograd.gradgradcheck(total, (edge,))


def test_a_third_derivative_is_refused() -> None:
    (x,) = tensors((3,))
    (y,) = recompute_function(lambda t: (t**4,), x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivative"):
        torch.autograd.grad(first.sum(), x, create_graph=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_chunk_computed_is_not_kept_between_the_passes(recompute: bool) -> None:
    """Neither after the forward pass nor after a backward pass that is to be differentiated again."""
    seen: list[weakref.ref[Tensor]] = []

    def watched(x: Tensor) -> tuple[Tensor]:
        inside = torch.exp(x)
        seen.append(weakref.ref(inside))
        return (inside.square(),)

    (x,) = tensors((3,))
    run: Callable[[Tensor], tuple[Tensor, ...]] = (lambda t: recompute_function(watched, t)) if recompute else watched
    (y,) = run(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert any(ref() is not None for ref in seen) == (not recompute)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 4.0 * torch.exp(2.0 * x.detach()))
