"""Two parts of a backward pass give what one gives, and compute nothing twice."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.torch_compat.split_backward import input_gradients

Parameters = dict[str, Tensor]
WIDTH = 8


class Counting(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class SumAndProduct(torch.autograd.Function):
    """Two results of an input and a parameter, both used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x + w, x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        added, times = grads
        return added + times * w, (added + times * x).sum(0)


class SquaredError(torch.autograd.Function):
    """A loss with a parameter; nothing but the loss leads to its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x - w).square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * grads[0] * (x - w), -2 * grads[0] * (x - w).sum(0)


def layers(x: Tensor, p: Parameters) -> Tensor:
    """Linear layers with biases, a norm, and a way around them."""
    y = F.linear(F.layer_norm(x, (WIDTH,), p["norm"], p["shift"]), p["up"], p["up bias"])
    return x + F.linear(F.gelu(y), p["down"])


def two_results(x: Tensor, p: Parameters) -> Tensor:
    added, times = SumAndProduct.apply(x @ p["up"], p["norm"])
    return added.sin() + times.cos()


def function_on_top(x: Tensor, p: Parameters) -> Tensor:
    return SquaredError.apply(layers(x, p), p["top"])


def used_twice(x: Tensor, p: Parameters) -> Tensor:
    """A parameter that is reached on two ways, one of them through the other's node, with others in between."""
    y = F.linear(torch.tanh(x * p["norm"]), p["up"]).tanh()
    y = F.linear(y, p["down"]).tanh()
    return F.linear(y * p["norm"], p["up"]).sum(1)


def through_another_format(x: Tensor, p: Parameters) -> Tensor:
    """A parameter that is cast, joined with another, before the input meets it."""
    joined = torch.cat((p["up"].double().t(), p["down"].double() * p["norm"].double()))
    return (x.double() @ joined.t()).float()


def parameters(frozen: str = "shift") -> Parameters:
    random = torch.Generator().manual_seed(3)
    shapes = {"norm": (WIDTH,), "shift": (WIDTH,), "up": (WIDTH, WIDTH), "up bias": (WIDTH,), "down": (WIDTH, WIDTH)}
    found = {name: torch.randn(shape, generator=random) for name, shape in {**shapes, "top": (WIDTH,)}.items()}
    return {name: tensor.requires_grad_(name != frozen) for name, tensor in found.items()}


def start(function: Callable[[Tensor, Parameters], Tensor], p: Parameters, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn((5, WIDTH), generator=random).requires_grad_()
    y = function(x, p)
    return x, y, torch.randn(y.shape, generator=random)


def leave(_told: Sequence[Tensor]) -> None:
    """Take no gradients away."""


@pytest.mark.parametrize(
    "function",
    [layers, two_results, function_on_top, used_twice, through_another_format],
    ids=lambda f: str(f.__name__),
)
def test_both_parts_together_give_what_one_pass_gives(function: Callable[[Tensor, Parameters], Tensor]) -> None:
    whole, parts = parameters(), parameters()
    given: list[Tensor | None] = []
    waiting = []
    for micro_batch in range(3):
        x, y, grad = start(function, whole, micro_batch)
        y.backward(grad)
        given.append(x.grad)
        # All first parts come before all second ones.
        x, y, grad = start(function, parts, micro_batch)
        (found, none), left = input_gradients((y,), (grad,), (x, "no tensor"), list(parts.values()))
        assert found is not None and none is None and not y.requires_grad
        torch.testing.assert_close(found, given[-1], rtol=1e-6, atol=1e-6)
        assert all(p.grad is None for p in parts.values())
        waiting.append(left)
        del x, y
    gc.collect()
    for left in waiting:
        left.run(leave)
    for name, parameter in whole.items():
        if parameter.grad is None:
            assert parts[name].grad is None, name
        else:
            torch.testing.assert_close(parts[name].grad, parameter.grad, rtol=1e-5, atol=1e-5, msg=name)
    assert parts["shift"].grad is None and whole["norm"].grad is not None


def test_gradients_can_be_taken_before_there_are_more() -> None:
    whole, parts = parameters(), parameters()
    x, y, grad = start(layers, whole, 1)
    y.backward(grad)
    x, y, grad = start(layers, parts, 1)
    _, left = input_gradients((y,), (grad,), (x,), list(parts.values()))
    taken: dict[int, Tensor] = {}

    def take(told: Sequence[Tensor]) -> None:
        there = [p for p in parts.values() if p.grad is not None]
        assert {id(p) for p in there} == {id(p) for p in told}
        assert not taken.keys() & {id(p) for p in told}
        for parameter in there:
            assert parameter.grad is not None
            taken[id(parameter)], parameter.grad = parameter.grad, None

    left.run(take)
    wanted = {name: p.grad for name, p in whole.items() if p.grad is not None}
    assert len(wanted) > 1 and len(taken) == len(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(taken[id(parts[name])], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_nothing_is_computed_twice_and_gradients_of_weights_wait() -> None:
    p = parameters()
    x, y, grad = start(layers, p, 1)
    with Counting() as whole:
        y.backward(grad)
    assert whole.counts["aten.mm.default"] == 4
    x, y, grad = start(layers, p, 1)
    with Counting() as first:
        _, left = input_gradients((y,), (grad,), (x,), list(p.values()))
    with Counting() as second:
        left.run(leave)
    assert first.counts["aten.mm.default"] == second.counts["aten.mm.default"] == 2
    assert first.counts["aten.gelu_backward.default"] == 1 and second.counts["aten.gelu_backward.default"] == 0


def test_the_graph_goes_with_the_second_part() -> None:
    p = parameters()
    x, y, _ = start(function_on_top, p, 1)
    node = weakref.ref(y.grad_fn)
    _, left = input_gradients((y,), None, (x,), list(p.values()))
    del x
    assert node() is not None
    left.run(leave)
    gc.collect()
    assert node() is None and y.grad_fn is None
