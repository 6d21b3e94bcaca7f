"""Which grid the samples of each optimizer step lie on, where the sources of a run have several.

All samples of a step lie on one grid: every rank then has equal micro-batches, whatever the layout, and a pipeline one shape
at a time. Grids take turns by the summed weights of their sources, as evenly as sources take turns for samples. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from phalanx.config.check import BatchSizes, batch_sizes
from phalanx.data.sample_order import Mixture
from phalanx.families.weather.config import ModelGrid, WeatherRun


@dataclass(frozen=True)
class GridTurns:
    """The grids of optimizer steps, in closed form: step 10**9 costs what step 1 costs."""

    weights: Mapping[ModelGrid | None, float]
    """Summed weights of the sources on each grid; None is the model's own."""
    sizes: BatchSizes

    @classmethod
    def of_run(cls, run: WeatherRun) -> Self:
        """Return those of a run."""
        return cls(run.grid_weights, batch_sizes(run))

    @cached_property
    def grids(self) -> tuple[ModelGrid | None, ...]:
        """Return the grids, in the order of `samples_through`."""
        return tuple(self.weights)

    @cached_property
    def mixture(self) -> Mixture:
        """Return what assigns steps to grids."""
        return Mixture(list(self.weights.values()))

    def grid_of(self, step: int) -> ModelGrid | None:
        """Return the grid of optimizer step `step`, from 1."""
        return self.grids[int(self.mixture(np.array([step - 1]))[0][0])]

    def samples_through(self, step: int) -> list[int]:
        """Return the samples on each grid in the first `step` steps together."""
        total, begun = [0] * len(self.grids), 0
        for steps, samples in (*self.sizes.stages, (step, self.sizes.final)):
            ended = min(step, begun + steps)
            counts = zip(self.mixture.counts(ended), self.mixture.counts(begun), strict=True)
            total = [had + (after - before) * samples for had, (after, before) in zip(total, counts, strict=True)]
            begun = ended
        return total
