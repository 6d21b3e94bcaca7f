"""What verification asks of a bound model: samples without files, and a small run of the same shape class."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from phalanx.config.schema import Run
from phalanx.data.batch_stream import Batch
from phalanx.layout.family import LayoutModel
from phalanx.layout.spec import ResolvedLayout


class VerifiableModel(LayoutModel):
    """A bound model under verification."""

    absent: ClassVar[str] = (
        "model.family={family} cannot be verified: its class is no phalanx.verification.family.VerifiableModel"
    )

    @abstractmethod
    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        """Samples `first` to `first + count` of the global batch of `step` (from 1): a function of their numbers alone."""

    def branch_samples(self, step: int, layout: ResolvedLayout, rank: int) -> Batch:
        """The same samples, of those the ones that data-parallel rank `rank` of a layout with sub-groups for branches reads.

        Asked only of models that have branches."""
        raise NotImplementedError(f"{type(self).__name__} has branches and no branch_samples")

    @abstractmethod
    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Sections with the fields that make the run small, such that any layout legal for it on `world_size` ranks stays
        legal."""

    @abstractmethod
    def in_words(self) -> str:
        """The model that runs, for a person."""


_STAGES_PER_RANK = 2
"""Of the interleaved schedules where the run file does not say."""


def most_stages(run: Run, world_size: int) -> int:
    """Pipeline stages that a layout of `run` on `world_size` ranks has at most; a small model needs a layer for each."""
    stated = run.layout.stages_per_rank
    return world_size * (_STAGES_PER_RANK if stated == "auto" else max(stated, _STAGES_PER_RANK))
