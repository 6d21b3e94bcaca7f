"""Constants of equivariant products: they turn as they say, and there are as many as group theory counts."""

from __future__ import annotations

import pytest
import torch
from e3nn import o3
from torch import Tensor

from atom_graphs import orthogonal
from phalanx.families.materials.model.message_passing.equivariant_constants import (
    component_range,
    contraction_constants,
    count_components,
    coupling_coefficients,
    coupling_paths,
    equivariant_polynomials,
    monomial_products,
)
from phalanx.families.materials.model.message_passing.mace import spherical_harmonics
from phalanx.families.materials.sizes import _polynomial_count

DEGREE = 3


def turn(degree: int, matrix: Tensor) -> Tensor:
    """How components up to `degree` turn, [S, S]: read off e3nn's harmonics of many directions, before and after."""
    unit = torch.nn.functional.normalize(features(100)[:, 1:4], dim=1)
    before, after = (
        o3.spherical_harmonics(list(range(degree + 1)), u, normalize=False) for u in (unit, unit @ matrix.T)
    )
    return torch.linalg.lstsq(before, after).solution.T


@pytest.fixture(params=[False, True], ids=["rotation", "reflection"])
def matrix(request: pytest.FixtureRequest) -> Tensor:
    return torch.from_numpy(orthogonal(11, reflect=request.param))


def features(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, count_components(DEGREE), generator=draw, dtype=torch.float64)


def test_harmonics_are_those_of_e3nn() -> None:
    unit = torch.nn.functional.normalize(features(20)[:, 1:4], dim=1)
    wanted = o3.spherical_harmonics([0, 1, 2, 3, 4], unit, normalize=False, normalization="component")
    torch.testing.assert_close(spherical_harmonics(4, unit), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spherical_harmonics(1, unit)[:, 1:], 3**0.5 * unit)


@pytest.mark.parametrize("path", coupling_paths(2, 2, 2), ids=str)
def test_couplings_turn_with_their_factors(path: tuple[int, int, int], matrix: Tensor) -> None:
    a, b, c = path
    values = coupling_coefficients(coupling_paths(a, b, c)[-1])
    x, y = features(5)[:, component_range(a)], features(9)[4:, component_range(b)]
    d = turn(DEGREE, matrix)
    parts = [d[component_range(ell), component_range(ell)] for ell in path]
    together = torch.einsum("na,nb,abc->nc", x, y, values)
    turned = torch.einsum("na,nb,abc->nc", x @ parts[0].T, y @ parts[1].T, values)
    torch.testing.assert_close(turned, together @ parts[2].T, rtol=1e-10, atol=1e-10)
    assert together.abs().max() > 0.1


def evaluate(order: int, result: int, x_NS: Tensor) -> Tensor:
    """All polynomials of the basis, [N, K, 2 result + 1]."""
    products = x_NS
    for n in range(2, order + 1):
        table = monomial_products(count_components(DEGREE), n)
        products = products[:, table.shorter_P] * x_NS[:, table.factor_P]
    return torch.einsum("kmp,np->nkm", equivariant_polynomials(DEGREE, order, result), products)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("result", [0, 1, 2])
def test_polynomials_turn_like_their_degree(order: int, result: int, matrix: Tensor) -> None:
    x_NS, d = features(6), turn(DEGREE, matrix)
    part = d[component_range(result), component_range(result)]
    before, after = evaluate(order, result, x_NS), evaluate(order, result, x_NS @ d.T)
    torch.testing.assert_close(after, before @ part.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("outside", [0, 1])
@pytest.mark.parametrize("correlation", [1, 2, 3])
def test_products_that_are_formed_make_all_polynomials(correlation: int, outside: int) -> None:
    x_NS = features(6)
    basis, indices = contraction_constants(DEGREE, correlation, outside)
    assert len(basis) == correlation == len(indices) + 1
    products = x_NS
    for order in range(1, correlation + 1):
        if order > 1:
            shorter, factor = indices[order - 2]
            products = products[:, shorter.values] * x_NS[:, factor.index_P.values]
        wanted = torch.cat([evaluate(order, result, x_NS).flatten(1) for result in range(outside + 1)], dim=1)
        found = products @ basis[order - 1].on(x_NS.device, x_NS.dtype).T
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if correlation > 1:
        # Of the longest only those that some polynomial has.
        longest = basis[-1].on(x_NS.device, x_NS.dtype)
        assert bool((longest.abs().amax(0) > 0).all()) and longest.shape[1] < count_products(correlation)


def count_products(order: int) -> int:
    """Return the number of distinct products of `order` factors."""
    return len(monomial_products(count_components(DEGREE), order).factor_P)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("result", [0, 1, 2])
def test_no_polynomial_is_missing_or_there_twice(degree: int, order: int, result: int) -> None:
    basis = equivariant_polynomials(degree, order, result)
    assert len(basis) == _polynomial_count(degree, order, result)
    if len(basis):
        assert torch.linalg.matrix_rank(basis.flatten(1)) == len(basis)


def test_products_are_each_there_once() -> None:
    x = torch.tensor([2.0, 3.0, 5.0])
    pairs = monomial_products(3, 2)
    products = x[pairs.shorter_P] * x[pairs.factor_P]
    assert products.tolist() == [4.0, 6.0, 10.0, 9.0, 15.0, 25.0]
    triples = monomial_products(3, 3)
    found = products[triples.shorter_P] * x[triples.factor_P]
    assert sorted(found.tolist()) == [8.0, 12.0, 18.0, 20.0, 27.0, 30.0, 45.0, 50.0, 75.0, 125.0]
