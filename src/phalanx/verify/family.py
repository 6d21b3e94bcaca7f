"""What verification needs of a model family: samples without files, and a small run of the same shape class.

A family's module `verify.<family>` holds one object that gives both.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from phalanx.config.schema import Run
from phalanx.data.batch import Batch
from phalanx.layout.spec import ResolvedLayout


class FamilyVerification(Protocol):
    """One family under verification. `run` is a run of its kind."""

    def samples(self, run: Any, step: int, first: int, count: int, global_batch: int) -> Batch:
        """Samples `first` to `first + count` of the global batch of `step` (from 1): a function of their numbers alone."""

    def branch_samples(self, run: Any, step: int, layout: ResolvedLayout, rank: int) -> Batch:
        """The same samples, of those the ones that data-parallel rank `rank` of a layout with sub-groups for branches reads.

        Asked only of families whose models have branches."""

    def reduced(self, run: Any, world_size: int) -> dict[str, dict[str, Any]]:
        """Sections with the fields that make `run` small, such that any layout legal for it on `world_size` ranks stays
        legal."""

    def in_words(self, run: Any) -> str:
        """The model that runs, for a person."""


_STAGES_PER_RANK = 2
"""Of the interleaved schedules where the run file does not say."""


def most_stages(run: Run, world_size: int) -> int:
    """Pipeline stages that a layout of `run` on `world_size` ranks has at most; a small model needs a layer for each."""
    stated = run.layout.stages_per_rank
    return world_size * (_STAGES_PER_RANK if stated == "auto" else max(stated, _STAGES_PER_RANK))


def family_verification(run: Run) -> FamilyVerification:
    """Of the family of `run`, imported only now."""
    family: FamilyVerification = import_module(f"phalanx.families.{run.model.family}.verification").VERIFICATION
    return family
