"""What of a model may be split over ranks, in the small vocabulary in which a family declares it as data.

A family names modules (patterns as in fnmatch) and says how each may be split over a tensor-parallel axis; `layout` does
the splitting. Models themselves know none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SplitKind = Literal["column", "part", "row", "lookup", "logits", "norm", "heads", "gather", "attention"]


@dataclass(frozen=True)
class Split:
    """How a module's parameters are split, and what flows in and out of it.

    column: a `Linear` that keeps some of its output features; its input must be whole.
    part: as column, where every rank has the whole input without being sent it.
    row: a `Linear` that keeps some of its input features; its outputs are summed over the ranks.
    lookup: a table that keeps some of its rows; lookups are summed over the ranks.
    logits: the output head, which keeps some rows of the vocabulary and computes the loss from them.
    norm: a `Norm` over features of which every rank has some; its statistics are joined.
    heads: a module of one number for every query head, which every rank keeps for its own.
    gather: a `SharedKey`, which gives every rank what all positions share.
    attention: the core between projections, where context parallelism takes place.
    """

    kind: SplitKind
    unit: int = 1
    """Features that stay together: a part is a whole number of units."""


Splits = list[tuple[str, Split]]
"""Patterns of module names with their split; a module that no pattern names is computed alike on every rank."""


def name_splits(module: str, splits: Splits) -> Splits:
    """Return `splits` of a module, which go by the names in it, by the names in the model. module: pattern of its name."""
    return [(f"{module}.{name}" if name else module, split) for name, split in splits]


@dataclass(frozen=True)
class SplitCount:
    """A number of equal things that a degree of parallelism must divide."""

    field: str
    """The field of the run file that says how many, e.g. `model.n_heads`."""
    count: int
    together: int = 1
    """How many of what the field counts each of the equal things holds."""


@dataclass(frozen=True)
class ModelChunk:
    """Consecutive blocks of a model, with the embedding before them and the head behind them where they belong."""

    blocks: range
    first: bool = True
    """Holds the embedding: takes model inputs rather than hidden activations."""
    last: bool = True
    """Holds the head: gives the loss rather than hidden activations."""
