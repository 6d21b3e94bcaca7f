"""Constants of equivariant products: which polynomials of spherical components transform like a given degree.

Components are those of e3nn: degree l has 2l + 1 of them, degree 1 is (x, y, z), and reflections act with (-1)^l. All
constants are made in float64 by fixed arithmetic (no eigenvectors), so that they are the same on every machine.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from e3nn import o3
from torch import Tensor

_SAME = 1e-6
"""Norm, beside 1, below which what is left of a polynomial is rounding: it depends on earlier ones."""


class Path(NamedTuple):
    """One way to couple degrees `first` and `second` to `result`."""

    first: int
    second: int
    result: int


def components(degree: int) -> int:
    """Components of all degrees up to `degree`."""
    return (degree + 1) ** 2


def component_range(degree: int) -> slice:
    """Where the components of one degree stand among those of all degrees."""
    return slice(degree**2, (degree + 1) ** 2)


def coupling_paths(first: int, second: int, result: int) -> list[Path]:
    """Ways to couple degrees up to `first` with degrees up to `second` to degrees up to `result` that keep parity."""
    return [
        Path(a, b, c)
        for c in range(result + 1)
        for a in range(first + 1)
        for b in range(second + 1)
        if abs(a - b) <= c <= a + b and (a + b + c) % 2 == 0
    ]


@cache
def coupling(path: Path) -> Tensor:
    """Coupling coefficients, float64 [2a+1, 2b+1, 2c+1] on the CPU: normal inputs give results of variance 1."""
    with torch.device("cpu"):
        values: Tensor = o3.wigner_3j(path.first, path.second, path.result, dtype=torch.float64)
    return values * math.sqrt(2 * path.result + 1)


@cache
def harmonic_steps(degree: int) -> list[Tensor]:
    """How each spherical harmonic up to `degree` follows from the one below: float64 [2l-1, 3, 2l+1], l from 2.

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
            steps.append(step)
    return steps


class Products(NamedTuple):
    """All products of `order` of `count` numbers, and how to form them from those of one factor less."""

    shorter_P: Tensor
    """int64: which product of order - 1 is multiplied."""
    factor_P: Tensor
    """int64: by which number."""


@cache
def monomials(count: int, order: int) -> Products:
    """The distinct products, in lexicographic order of their sorted factors."""
    place = {factors: n for n, factors in enumerate(combinations_with_replacement(range(count), order - 1))}
    factors = list(combinations_with_replacement(range(count), order))
    shorter = torch.tensor([place[f[:-1]] for f in factors], dtype=torch.int64, device="cpu")
    return Products(shorter, torch.tensor([f[-1] for f in factors], dtype=torch.int64, device="cpu"))


@cache
def equivariant_polynomials(degree: int, order: int, result: int) -> Tensor:
    """A basis of the homogeneous polynomials of `order` in components up to `degree` that transform like `result`.

    float64 [K, 2 result + 1, monomials] on the CPU; parity is kept. Each is scaled so that independent normal inputs give
    components of about variance 1. The symmetric contraction of MACE (Batatia et al. 2022, equation 10) spans
    the same space.
    """
    count = components(degree)
    with torch.device("cpu"):
        paths = [p.flatten() for ell, even, p in _polynomials(degree, order, result) if ell == result and even]
        kept = _independent(paths)
        size = len(list(combinations_with_replacement(range(count), order)))
        if not kept:
            return torch.zeros(0, 2 * result + 1, size, dtype=torch.float64)
        return torch.stack(kept).view(len(kept), 2 * result + 1, size) * math.sqrt(2 * result + 1)


@cache
def _polynomials(degree: int, order: int, result: int) -> list[tuple[int, bool, Tensor]]:
    """(degree, whether parity is natural, coefficients [2 degree + 1, monomials]) of coupling factors one by one."""
    count = components(degree)
    if order == 1:
        one = torch.eye(count, dtype=torch.float64)
        return [(ell, True, one[component_range(ell)]) for ell in range(degree + 1)]
    factors = list(combinations_with_replacement(range(count), order))
    place = {f: n for n, f in enumerate(factors)}
    shorter = list(combinations_with_replacement(range(count), order - 1))
    joined = torch.tensor([[place[tuple(sorted((*f, n)))] for n in range(count)] for f in shorter])
    found = []
    # What is left to couple can lower a degree by at most `degree` a factor.
    for a, even, polynomial in _polynomials(degree, order - 1, result + degree):
        for b in range(degree + 1):
            for c in range(abs(a - b), min(a + b, result) + 1):
                cg = o3.wigner_3j(a, b, c, dtype=torch.float64)
                product = torch.einsum("abc,ap->cpb", cg, polynomial)
                flat = torch.zeros(2 * c + 1, len(factors), dtype=torch.float64)
                flat.index_add_(1, joined[:, component_range(b)].flatten(), product.flatten(1))
                found.append((c, even == ((a + b + c) % 2 == 0), flat))
    return found


def _independent(vectors: list[Tensor]) -> list[Tensor]:
    """An orthonormal basis of what `vectors` span: Gram-Schmidt in their order, twice each for accuracy."""
    kept: list[Tensor] = []
    for vector in vectors:
        norm = vector.norm()
        if norm < _SAME:
            continue
        rest = vector / norm
        for _ in range(2):
            for basis in kept:
                rest = rest - (basis @ rest) * basis
        if rest.norm() > _SAME:
            kept.append(rest / rest.norm())
    return kept
