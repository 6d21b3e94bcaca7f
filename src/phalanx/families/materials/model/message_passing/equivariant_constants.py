"""Constants of equivariant products: couplings of degrees, and polynomials of components that transform like a degree.

Components are those of e3nn: degree l has 2l + 1 of them, degree 1 is (x, y, z), and reflections act with (-1)^l. Constants
are made in float64 by fixed arithmetic (no eigenvectors), so that they are the same on every machine.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations_with_replacement, groupby, product
from typing import NamedTuple

import torch
from e3nn import o3
from torch import Tensor

from phalanx.families.materials.model.geometry import Constant
from phalanx.families.materials.model.message_passing.segmented_products import Term


@cache
def degrees_of_components(degrees: int) -> Constant:
    """Return the degree of each component of `degrees` degrees, int64 [degrees^2]."""
    # Degree l begins at component l^2, so a component's degree is the root of its number, rounded down.
    return Constant(torch.arange(degrees**2, device="cpu").sqrt().long())


@cache
def stack_couplings(paths: tuple[Path, ...], inside: int, harmonics: int) -> tuple[Constant, Constant]:
    """Return coefficients [harmonics, Q * inside] of all paths at once, and the path of each of the Q components.

    Paths of one result follow each other in `paths`; of each of its components they stand together.
    """
    blocks, path_of = [], []
    for result, group in groupby(enumerate(paths), key=lambda numbered: numbered[1].result):
        numbers, alike = zip(*group, strict=True)
        block = torch.zeros(harmonics, 2 * result + 1, len(alike), inside, dtype=torch.float64, device="cpu")
        for place, path in enumerate(alike):
            values = coupling_coefficients(path).permute(1, 2, 0)
            block[component_range(path.second), :, place, component_range(path.first)] = values
        blocks.append(block.flatten(1, 2))
        path_of += [*numbers] * (2 * result + 1)
    joined = torch.cat(blocks, dim=1).flatten(1)
    return Constant(joined), Constant(torch.tensor(path_of, device="cpu"))


_SAME = 1e-6
"""Norm, beside 1, below which what is left of a polynomial is rounding: it depends on earlier ones."""


class Path(NamedTuple):
    """One way to couple degrees `first` and `second` to `result`."""

    first: int
    second: int
    result: int


def count_components(degree: int) -> int:
    """Return the components of all degrees up to `degree`."""
    return (degree + 1) ** 2


def component_range(degree: int) -> slice:
    """Return where the components of one degree stand among those of all degrees."""
    return slice(degree**2, (degree + 1) ** 2)


def coupling_paths(first: int, second: int, result: int) -> list[Path]:
    """Return the ways to couple degrees up to `first` with degrees up to `second` to degrees up to `result` that keep
    parity."""
    return [
        Path(a, b, c)
        for c in range(result + 1)
        for a in range(first + 1)
        for b in range(second + 1)
        if abs(a - b) <= c <= a + b and (a + b + c) % 2 == 0
    ]


@cache
def coupling_coefficients(path: Path) -> Tensor:
    """Return coefficients, float64 [2a+1, 2b+1, 2c+1] on the CPU: normal inputs give results of variance 1."""
    with torch.device("cpu"):
        # Values are needed, also where a network is built on meta.
        values: Tensor = o3.wigner_3j(path.first, path.second, path.result, dtype=torch.float64)
    return values * math.sqrt(2 * path.result + 1)


@cache
def harmonic_steps(degree: int) -> list[Constant]:
    """Return how each spherical harmonic up to `degree` follows from the one below: [(2l-1) * 3, 2l+1], l from 2.

    Y_l is Y_(l-1) coupled with the direction. Its size is fixed at the pole (0, 1, 0), where it must be sqrt(2l+1).
    """
    with torch.device("cpu"):
        pole = torch.tensor([0.0, 3.0**0.5, 0.0], dtype=torch.float64)
        steps, below = [], pole
        for ell in range(2, degree + 1):
            step = o3.wigner_3j(ell - 1, 1, ell, dtype=torch.float64)
            value = torch.einsum("a,b,abc->c", below, pole, step)
            step = step * ((2 * ell + 1) ** 0.5 / value[ell])
            below = torch.einsum("a,b,abc->c", below, pole, step)
            steps.append(Constant(step.flatten(0, 1)))
    return steps


class RepeatedRows:
    """Names the rows of a tensor that are taken, each more than once: `select_rows` is for few that are taken often."""

    def __init__(self, rows: list[int], count: int) -> None:
        """count: rows that there are."""
        self.index_P = Constant(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self.matrix_SP = Constant(torch.eye(count, dtype=torch.float64, device="cpu")[:, rows])
        """Of zeros and ones: its product with what was taken adds that up by row."""


class Products(NamedTuple):
    """All products of `order` of `count` numbers, and how to form them from those of one factor less."""

    shorter_P: Tensor
    """int64: which product of order - 1 is multiplied."""
    factor_P: Tensor
    """int64: by which number."""


@cache
def monomial_products(count: int, order: int) -> Products:
    """Return the distinct products, in lexicographic order of their sorted factors."""
    place = {factors: n for n, factors in enumerate(combinations_with_replacement(range(count), order - 1))}
    factors = list(combinations_with_replacement(range(count), order))
    shorter = torch.tensor([place[f[:-1]] for f in factors], dtype=torch.int64, device="cpu")
    return Products(shorter, torch.tensor([f[-1] for f in factors], dtype=torch.int64, device="cpu"))


@cache
def contraction_constants(
    degree: int, correlation: int, outside: int
) -> tuple[list[Constant], list[tuple[Constant, RepeatedRows]]]:
    """Return of each order the polynomials of all degrees up to `outside`, [Q, P], and how to form their P products.

    That is, of each order from 2 on: which product of one factor less is multiplied, and by which component.
    Each distinct product comes once, since factors commute, and only if a polynomial has it or a longer one is made of it:
    most polynomials are made of few.
    """
    orders, count = range(1, correlation + 1), count_components(degree)
    bases = [
        torch.cat([equivariant_polynomials(degree, order, result).flatten(0, 1) for result in range(outside + 1)])
        for order in orders
    ]
    tables = [monomial_products(count, order) for order in orders[1:]]
    # From the longest on: each needs the shorter one that it is made of.
    wanted, needed_by_order = torch.zeros(0, dtype=torch.int64, device="cpu"), []
    for basis, table in zip(bases[:0:-1], tables[::-1], strict=True):
        needed_P = (basis.abs() > _SAME).any(0).index_fill(0, wanted, True).nonzero().squeeze(1)
        wanted = table.shorter_P[needed_P]
        needed_by_order.append(needed_P)
    place_P = torch.arange(count, device="cpu")
    kept, indices = [bases[0]], list[tuple[Constant, RepeatedRows]]()
    for basis, table, needed_P in zip(bases[1:], tables, reversed(needed_by_order), strict=True):
        shorter_P, factor = place_P[table.shorter_P[needed_P]], table.factor_P[needed_P].tolist()
        indices.append((Constant(shorter_P), RepeatedRows(factor, count)))
        kept.append(basis[:, needed_P])
        place_P = torch.zeros(basis.shape[1], dtype=torch.int64, device="cpu")
        place_P[needed_P] = torch.arange(len(needed_P), device="cpu")
    return [Constant(basis) for basis in kept], indices


@cache
def polynomial_places(degree: int, correlation: int, outside: int) -> list[tuple[int, int]]:
    """Return of each component of the same polynomials its polynomial, and the component of the result that it adds to."""
    places, number = list[tuple[int, int]](), 0
    for order, result in product(range(1, correlation + 1), range(outside + 1)):
        for _ in range(len(equivariant_polynomials(degree, order, result))):
            places += [(number, component) for component in range(result**2, (result + 1) ** 2)]
            number += 1
    return places


@cache
def contraction_terms(degree: int, correlation: int, outside: int) -> tuple[Term, ...]:
    """Return the same polynomials term by term: weight, components that are multiplied, component of the result."""
    basis, indices = contraction_constants(degree, correlation, outside)
    places = iter(polynomial_places(degree, correlation, outside))
    factors = [(component,) for component in range(count_components(degree))]
    terms = list[Term]()
    for order, polynomials in enumerate(basis):
        if order:
            shorter, factor = indices[order - 1]
            pairs = zip(shorter.values.tolist(), factor.index_P.values.tolist(), strict=True)
            factors = [(*factors[before], component) for before, component in pairs]
        for values in polynomials.values:
            weight, component = next(places)
            held = (abs(values) > _SAME).nonzero()[0].tolist()
            terms += [((weight, *factors[p], component), float(values[p])) for p in held]
    return tuple(terms)


@cache
def coupling_terms(paths: tuple[Path, ...], inside: int, harmonics: int) -> tuple[Term, ...]:
    """Return couplings term by term: path, component of the features, harmonic, component of the sum."""
    couplings, path_of = stack_couplings(paths, inside, harmonics)
    values_HQS = couplings.values.reshape(harmonics, path_of.values.size, inside)
    return tuple(
        ((int(path_of.values[q]), s, h, q), float(values_HQS[h, q, s]))
        for h, q, s in zip(*(axis.tolist() for axis in (abs(values_HQS) > _SAME).nonzero()), strict=True)
    )


@cache
def equivariant_polynomials(degree: int, order: int, result: int) -> Tensor:
    """Return a basis of the homogeneous polynomials of `order` in components up to `degree` that transform like `result`.

    float64 [K, 2 result + 1, monomials] on the CPU; parity is kept. Each is scaled so that independent normal inputs give
    components of about variance 1. The symmetric contraction of MACE (Batatia et al. 2022, equation 10) spans
    the same space.
    """
    count = count_components(degree)
    with torch.device("cpu"):
        paths = [p.flatten() for ell, even, p in _coupled_polynomials(degree, order, result) if ell == result and even]
        kept = _orthonormal_basis(paths)
        size = len(list(combinations_with_replacement(range(count), order)))
        if not kept:
            return torch.zeros(0, 2 * result + 1, size, dtype=torch.float64)
        return torch.stack(kept).view(len(kept), 2 * result + 1, size) * math.sqrt(2 * result + 1)


@cache
def _coupled_polynomials(degree: int, order: int, result: int) -> list[tuple[int, bool, Tensor]]:
    """Return (degree, whether parity is natural, coefficients [2 degree + 1, monomials]) of coupling factors one by one."""
    count = count_components(degree)
    if order == 1:
        one = torch.eye(count, dtype=torch.float64)
        return [(ell, True, one[component_range(ell)]) for ell in range(degree + 1)]
    factors = list(combinations_with_replacement(range(count), order))
    place = {f: n for n, f in enumerate(factors)}
    shorter = list(combinations_with_replacement(range(count), order - 1))
    joined = torch.tensor([[place[tuple(sorted((*f, n)))] for n in range(count)] for f in shorter])
    found = []
    # What is left to couple can lower a degree by at most `degree` a factor.
    for a, even, polynomial in _coupled_polynomials(degree, order - 1, result + degree):
        for b in range(degree + 1):
            for c in range(abs(a - b), min(a + b, result) + 1):
                cg = o3.wigner_3j(a, b, c, dtype=torch.float64)
                product = torch.einsum("abc,ap->cpb", cg, polynomial)
                flat = torch.zeros(2 * c + 1, len(factors), dtype=torch.float64)
                flat.index_add_(1, joined[:, component_range(b)].flatten(), product.flatten(1))
                found.append((c, even == ((a + b + c) % 2 == 0), flat))
    return found


def _orthonormal_basis(vectors: list[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis of what `vectors` span: Gram-Schmidt in their order, twice each for accuracy."""
    kept: list[Tensor] = []
    for vector in vectors:
        norm = vector.norm()
        if norm < _SAME:
            continue
        rest = vector / norm
        # Once leaves rounding of the order of what is kept where vectors are nearly dependent; twice is enough.
        for _ in range(2):
            for basis in kept:
                rest = rest - (basis @ rest) * basis
        if rest.norm() > _SAME:
            kept.append(rest / rest.norm())
    return kept
