"""What a model family declares about a parameter: its kind, and the values it begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

ParameterKind = Literal["norm", "bias", "embedding", "matrix"]
"""Kinds of parameter that an optimizer may treat differently."""

Table = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Values of some elements of a parameter: a pure function of their row-major indices in the whole parameter (int64) and
its shape. Float64, of the shape of the indices; the same however the elements are sharded, and on every device."""


@dataclass(frozen=True)
class InitRule:
    """Initial values of a parameter: normal with mean 0 and standard deviation `value`, all equal to `value`, or a table."""

    kind: Literal["normal", "constant", "table"]
    value: float
    table: Table | None = None
    """Gives the values of kind `table`."""

    @classmethod
    def normal(cls, std: float) -> InitRule:
        """Return a rule for normal values with mean 0 and standard deviation `std`."""
        return cls("normal", std)

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
