"""What a model family declares about a parameter: its kind, the values it begins with, the matrices it is composed of.

Data alone: imports no torch, so that a run file is checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

ParameterKind = Literal["norm", "bias", "embedding", "matrix"]
"""Kinds of parameter that an optimizer may treat differently."""

Table = Callable[["Tensor", tuple[int, ...]], "Tensor"]
"""Values of some elements of a parameter: a pure function of their row-major indices in the whole parameter (int64) and
its shape. Float64, of the shape of the indices; the same however the elements are sharded, and on every device."""


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a parameter's name matches one of `patterns`, as in fnmatch."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class InitRule:
    """Initial values of a parameter: normal with mean 0 and standard deviation `value`, or, of kind fan_in, `value` over the
    square root of its columns; all equal to `value`; or a table."""

    kind: Literal["normal", "fan_in", "constant", "table"]
    value: float
    table: Table | None = None
    """Gives the values of kind `table`."""

    @classmethod
    def normal(cls, std: float) -> InitRule:
        """Return a rule for normal values with mean 0 and standard deviation `std`."""
        return cls("normal", std)

    @classmethod
    def fan_in(cls) -> InitRule:
        """Return a rule for normal values with standard deviation 1/sqrt(columns), which keep the size of an input."""
        return cls("fan_in", 1.0)

    @classmethod
    def constant(cls, value: float) -> InitRule:
        """Return a rule that gives all elements one value."""
        return cls("constant", value)

    @classmethod
    def of_index(cls, table: Table) -> InitRule:
        """Return a rule that takes its values from `table`."""
        return cls("table", 1.0, table)


InitRules = list[tuple[str, InitRule]]
"""Patterns of parameter names (as in fnmatch) with their rule; the first that matches counts."""


@dataclass(frozen=True)
class MatrixRows:
    """How the rows of a parameter belong to the matrices that it is composed of; all of them have its columns.

    `stack` equal parts follow each other, as experts do. In each, `pattern` says how many rows in a row belong to which
    matrix, again and again: (G E, E, E) for G query heads of E rows, a key and a value; empty where a part is one matrix.
    """

    stack: int = 1
    pattern: tuple[int, ...] = ()

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return rows and columns of every matrix of one part of the stack. shape: of the whole parameter."""
        rows, columns = shape[0] // self.stack, shape[1]
        pattern = self.pattern or (rows,)
        return [(rows // sum(pattern) * each, columns) for each in pattern]


MatrixRules = list[tuple[str, MatrixRows | None]]
"""Patterns of parameter names with their matrices, None for what is none to an optimizer; the first match counts."""


def name_matrices(module: str, rules: MatrixRules) -> MatrixRules:
    """Return `rules` of a module, which go by the names in it, by the names in the model. module: pattern of its name."""
    return [(f"{module}.{name}", rows) for name, rows in rules]
