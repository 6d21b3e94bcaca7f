"""Compiling a function that contains a derivative, for arguments of several sizes, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from phalanx.torch_compat.compiler import SizedProgram

ROWS = [("rows", 0), None]


def slope_and_its_gradient(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((factor * x.pow(3)).sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.square().sum(), x)
    return slope.detach(), curvature


def test_derivatives_are_part_of_the_program() -> None:
    x, factor = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    program = SizedProgram(slope_and_its_gradient, (x, factor), ROWS).compile(torch.float32)
    for rows in (7, 3, 50):
        assert program.holds_for({"rows": rows})
        given = torch.linspace(-1.0, 2.0, rows, dtype=torch.float64)
        slope, curvature = program(given, factor)
        torch.testing.assert_close(slope, 6.0 * given.square())
        torch.testing.assert_close(curvature, 144.0 * given.pow(3))


def test_a_program_knows_for_which_sizes_it_holds() -> None:
    def halves(x: Tensor, factor: Tensor) -> Tensor:
        return x.repeat(1 + x.shape[0] // 10) * factor if x.shape[0] > 5 else x.sum() * factor

    x, factor = torch.ones(20), torch.tensor([2.0])
    program = SizedProgram(halves, (x, factor), ROWS)
    assert program.holds_for({"rows": 6}) and not program.holds_for({"rows": 5})
    assert program(torch.ones(31), factor).shape == (124,)


def test_sizes_that_differ_only_by_name_are_told_apart() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y

    program = SizedProgram(product, (torch.ones(4), torch.ones(4)), [("rows", 0), ("columns", 0)])
    assert program.holds_for({"rows": 4, "columns": 9})
    torch.testing.assert_close(program(torch.arange(4.0), torch.ones(9)), torch.arange(4.0)[:, None].expand(4, 9))


def test_numbers_are_arguments_like_others() -> None:
    program = SizedProgram(torch.mul, (torch.ones(4), torch.tensor(2.0, dtype=torch.float64)), ROWS).compile(
        torch.float32
    )
    torch.testing.assert_close(program(torch.ones(3), torch.tensor(5.0, dtype=torch.float64)), torch.full((3,), 5.0))


def test_functions_may_change_what_they_made() -> None:
    """The compiler first makes a graph of such a function that changes nothing."""

    def scaled_twice(x: Tensor, factor: Tensor) -> Tensor:
        found = x + 1.0
        found.mul_(factor)
        return found + found.relu_()

    x, factor = torch.linspace(-3.0, 2.0, 6), torch.tensor([2.0])
    program = SizedProgram(scaled_twice, (x, factor), ROWS).compile(torch.float32)
    torch.testing.assert_close(program(x, factor), scaled_twice(x, factor))


def test_a_program_that_was_compiled_before_comes_from_the_cache() -> None:
    with fresh_cache():
        for found in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
            counters.clear()
            SizedProgram(torch.sin, [torch.ones(3)], [("n", 0)]).compile(torch.float32)
            assert counters["inductor"][found] == 1
