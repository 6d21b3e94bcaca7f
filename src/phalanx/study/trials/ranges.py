"""What a parameter may be: one of several values, or a number between two bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Choices:
    """One of several values without an order."""

    values: tuple[Scalar, ...]

    def draw(self, random: np.random.Generator) -> Scalar:
        """Any of them."""
        return self.values[int(random.integers(len(self.values)))]

    def holds(self, value: Scalar) -> bool:
        """Whether it is one of them."""
        return value in self.values

    def position(self, value: Scalar) -> float:
        """Which of them it is."""
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
        """Any of them; where `log`, any size as often."""
        if self.log:
            drawn = math.exp(random.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(drawn), self.low), self.high)
        return self.low + self.step * int(random.integers((self.high - self.low) // self.step + 1))

    def holds(self, value: Scalar) -> bool:
        """Whether it is one of them."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0  # type: ignore[operator]

    def position(self, value: Scalar) -> float:
        """How far up it lies, from 0 to 1."""
        return _share(value, self.low, self.high, self.log)


@dataclass(frozen=True)
class Reals:
    """A number from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Whether ratios matter rather than differences."""

    def draw(self, random: np.random.Generator) -> Scalar:
        """Any of them; where `log`, any size as often."""
        if self.log:
            return math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        return float(random.uniform(self.low, self.high))

    def holds(self, value: Scalar) -> bool:
        """Whether it lies between the bounds."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def position(self, value: Scalar) -> float:
        """How far up it lies, from 0 to 1."""
        return _share(value, self.low, self.high, self.log)


Range = Choices | Integers | Reals


@dataclass(frozen=True)
class Told:
    """What a sampler is told of a trial that ended."""

    values: Mapping[str, Scalar]
    """Of parameters that applied."""
    score: float | None
    """What is minimised; None for a failure."""
    cause: str = "crash"
    """Of a failure."""


def worst_score(history: Sequence[Told]) -> float:
    """The largest score; 1 without any."""
    return max((told.score for told in history if told.score is not None), default=1.0)


def _share(value: Scalar, low: float, high: float, log: bool) -> float:
    assert isinstance(value, int | float)
    if low == high:
        return 0.0
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
