"""What verification asks of a bound model: samples without files, and a small run of the same shape class."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from phalanx.config.families import sizes_of
from phalanx.config.schema import Run
from phalanx.data.batch_stream import Batch
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.spec import ResolvedLayout


class VerifiableModel(LayoutModel):
    """A bound model under verification."""

    absent: ClassVar[str] = (
        "model.family={family} cannot be verified: its class is no phalanx.verification.family.VerifiableModel"
    )

    @abstractmethod
    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        """Return samples `first` to `first + count` of the global batch of `step` (from 1), without reading files.

        They are a function of their numbers alone, so that all layouts read the same ones.
        """

    def least_steps(self) -> int:
        """Return the optimizer steps of which some have samples of every shape; by default 1."""
        return 1

    def branch_samples(self, step: int, layout: ResolvedLayout, rank: int) -> Batch:
        """Return those of the same samples that data-parallel rank `rank` reads where sub-groups hold task heads.

        Asked only of models with several task heads.
        """
        raise NotImplementedError(f"{type(self).__name__} has branches and no branch_samples")

    @abstractmethod
    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Return fields, by section of the run file, that make the run small enough for a laptop.

        Every layout on `world_size` ranks that is legal for the run must be legal for the small one.
        """

    def fitted_to_samples(self) -> dict[str, dict[str, Any]]:
        """Return fields, by section, that the run file leaves to its data, as the samples have them; by default none."""
        return {}

    def in_words(self) -> str:
        """Describe the model that runs, for a person; by default as the family's `Sizes` do."""
        return sizes_of(self.model).in_words(self.model)


_STAGES_PER_RANK = 2
"""Stages per rank of interleaved schedules where the run file does not say."""


def most_stages(run: Run, world_size: int) -> int:
    """Return the most pipeline stages that a layout of `run` on `world_size` ranks has; a small model needs a layer each."""
    stated = run.layout.stages_per_rank
    return world_size * (_STAGES_PER_RANK if stated == "auto" else max(stated, _STAGES_PER_RANK))
