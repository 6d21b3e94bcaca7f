"""How a parameter begins: the small vocabulary in which a model family declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InitRule:
    """Initial values of a parameter: normal with mean 0 and standard deviation `value`, or all equal to `value`."""

    kind: Literal["normal", "constant"]
    value: float

    @classmethod
    def normal(cls, std: float) -> InitRule:
        """Normal values with mean 0."""
        return cls("normal", std)

    @classmethod
    def constant(cls, value: float) -> InitRule:
        """One value for all elements."""
        return cls("constant", value)


InitRules = list[tuple[str, InitRule]]
"""Patterns of parameter names (as in fnmatch) with their rule; the first that matches counts."""
