"""What may be chosen: ranges of parameters, and what samplers ask of a space.

Spaces differ in what a choice means for a run: `study.layouts.space` enumerates legal layouts, `study.hyperparameters.space`
combines fields of the run file freely. Samplers see neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Scalar = bool | int | float | str | None
Values = dict[str, Scalar]
"""A choice: values by the name of their parameter, without those of parameters that do not apply."""


@dataclass(frozen=True)
class Choices:
    """One of several values without an order."""

    values: tuple[Scalar, ...]

    def draw(self, random: np.random.Generator) -> Scalar:
        """Return one of the values, each as often."""
        return self.values[int(random.integers(len(self.values)))]

    def contains(self, value: Scalar) -> bool:
        """Return whether the value may be chosen."""
        return value in self.values

    def position(self, value: Scalar) -> float:
        """Return the index of a value."""
        return float(self.values.index(value))


@dataclass(frozen=True)
class Integers:
    """A whole number from `low` to `high`, both included, in steps."""

    low: int
    high: int
    log: bool = False
    """Whether ratios matter rather than differences."""
    step: int = 1
    """1 where `log`."""

    def draw(self, random: np.random.Generator) -> Scalar:
        """Return a number between the bounds, evenly spread; where `log`, its logarithm is."""
        if self.log:
            drawn = math.exp(random.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(drawn), self.low), self.high)
        return self.low + self.step * int(random.integers((self.high - self.low) // self.step + 1))

    def contains(self, value: Scalar) -> bool:
        """Return whether the value may be chosen."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0  # type: ignore[operator]

    def position(self, value: Scalar) -> float:
        """Return how far a value lies up the range, from 0 to 1."""
        return _share_of_range(value, self.low, self.high, self.log)


@dataclass(frozen=True)
class Reals:
    """A number from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Whether ratios matter rather than differences."""

    def draw(self, random: np.random.Generator) -> Scalar:
        """Return a number between the bounds, evenly spread; where `log`, its logarithm is."""
        if self.log:
            return math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        return float(random.uniform(self.low, self.high))

    def contains(self, value: Scalar) -> bool:
        """Return whether the value may be chosen."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def position(self, value: Scalar) -> float:
        """Return how far a value lies up the range, from 0 to 1."""
        return _share_of_range(value, self.low, self.high, self.log)


Range = Choices | Integers | Reals


class Space(Protocol):
    """All choices, as samplers see them."""

    @property
    def ranges(self) -> dict[str, Range]:
        """What general samplers suggest values from, by name: these may be positions rather than the values themselves."""

    def encode(self, values: Mapping[str, Scalar]) -> Values | None:
        """Return a choice in terms of `ranges`; None where the space does not have it."""

    def decode(self, suggested: Mapping[str, Scalar], taken: set[str]) -> Values | None:
        """Return the choice that a suggestion in terms of `ranges` stands for.

        taken: keys of choices that are not to be returned. None where no legal choice is left that the suggestion may mean.
        """

    def draw(self, random: np.random.Generator, taken: set[str]) -> Values | None:
        """Return a legal choice at random whose key is not taken; None where none is found."""


def format_override(name: str, value: Scalar) -> str:
    """Return the `section.field=value` override of the run file that sets a field."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _share_of_range(value: Scalar, low: float, high: float, log: bool) -> float:
    assert isinstance(value, int | float)
    if low == high:
        return 0.0
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
