"""Means and standard deviations that a run normalises by: of the whole training period, never of a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.data.order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.data.stores.grid import Float32Array, Float64Array
from phalanx.families.weather.data.stores.store import FieldStore
from phalanx.files import write_atomically

_PAIRS_AT_ONCE = 16


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class VariableStatistics(_Part):
    """One variable, in its own units."""

    mean: float
    std: Annotated[float, Field(gt=0.0)]


class FieldStatistics(_Part):
    """What a run normalises by; as a file, what a later run goes on with."""

    format: Literal["phalanx-field-statistics"] = "phalanx-field-statistics"
    version: Literal[1] = 1
    period: str
    """The times behind them, in words."""
    frames: int
    """How many frames those are."""
    variables: dict[str, VariableStatistics]
    """By name in the run, static fields too."""

    def mean_of(self, names: Sequence[str]) -> Float64Array:
        """[n]: means of these variables."""
        return np.array([self.variables[name].mean for name in names])

    def std_of(self, names: Sequence[str]) -> Float64Array:
        """[n]: standard deviations of these variables."""
        return np.array([self.variables[name].std for name in names])

    def write(self, path: Path) -> None:
        """Write them to a file."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")


def read_statistics(path: Path, names: Sequence[str]) -> FieldStatistics:
    """Statistics of at least the variables `names` from a file. Raises DataError naming the file and what is wrong."""
    try:
        statistics = FieldStatistics.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; data.statistics names a file written by an earlier run") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise DataError(f"{path}: {where}: {first['msg']}") from None
    missing = [name for name in names if name not in statistics.variables]
    if missing:
        raise DataError(f"{path} has no statistics of {', '.join(missing)}; it has {', '.join(statistics.variables)}")
    return statistics


def static_statistics(names: Sequence[str], fields: Float32Array) -> dict[str, VariableStatistics]:
    """Of static fields [S, H, W], each over its points; a field that is the same everywhere gets the deviation 1."""
    found = {}
    for name, field in zip(names, fields.astype(np.float64), strict=True):
        found[name] = VariableStatistics(mean=float(field.mean()), std=float(field.std()) or 1.0)
    return found


def difference_std(
    store: FieldStore, variables: Sequence[int], starts: Int64Array, targets: Int64Array
) -> Float64Array:
    """[V]: standard deviation of what a variable changes by from frame `starts[i]` to `targets[i]`, both int64 [n].

    Over all points and pairs that have both values, each counted once. It scales what a model that predicts the change
    has to predict. NaN where no pair has values.
    """
    count, total, squares = (np.zeros(len(variables)) for _ in range(3))
    for first in range(0, len(starts), _PAIRS_AT_ONCE):
        part = slice(first, first + _PAIRS_AT_ONCE)
        change = store.read(targets[part], variables).astype(np.float64) - store.read(starts[part], variables)
        there = ~np.isnan(change)
        values = np.where(there, change, 0.0)
        count += there.sum(axis=(0, 2, 3))
        total += values.sum(axis=(0, 2, 3))
        squares += (values**2).sum(axis=(0, 2, 3))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(squares / count - (total / count) ** 2)
