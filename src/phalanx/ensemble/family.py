"""What making an ensemble asks of a bound model: to join its members, calibrate and score them.

A family's bound model derives from `EnsembleModel` where trained models of it can be joined.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from phalanx.ensemble.members import EnsembleFile, Kind, Member, Share
from phalanx.families.family import BoundModel

Progress = Callable[[str, int, int], None]
"""Called with the split at work, the number of its samples that are done, and their number in all."""


@dataclass(frozen=True)
class EnsembleOptions:
    """How an ensemble is made. Families that join all members alike refuse all but `samples`."""

    top: int | None = None
    """Number of members to choose; None takes all candidates."""
    diversity: float = 1.0
    """Weight of the disagreement between members in their selection; see `ensemble.select_members.choose_members`."""
    weights: Literal["equal", "fitted"] = "fitted"
    calibration: Kind | None = None
    """Kind of calibration; None takes the likeliest on held-out samples."""
    samples: int | None = None
    """Samples of each split; None takes all."""
    side_by_side: int | None = None
    """Most members on a device at a time; None takes as many as fit in memory."""
    hours: int | None = None
    """Longest lead time of forecasts, hours; None takes the longest that members were trained for."""


class Ensemble(Protocol):
    """Joined members with their scores."""

    def summary(self) -> dict[str, Any]:
        """Return members, calibration and scores as plain values, for JSON and reports."""

    def document(self, folder: Path) -> EnsembleFile:
        """Return the content of `folder/ensemble.json`."""


class EnsembleModel(BoundModel):
    """A model whose trained runs can be joined into an ensemble."""

    absent = "trained models of model.family={family} cannot be joined into an ensemble"
    selects_members: bool = False
    """Whether members are chosen among candidates by their errors, and weighted and calibrated."""
    forecasts: bool = False
    """Whether members forecast a number of hours."""

    @abstractmethod
    def build_ensemble(
        self,
        members: Sequence[Member],
        options: EnsembleOptions,
        device: torch.device,
        share: Share,
        progress: Progress,
    ) -> Ensemble:
        """Join `members`, of which the first is bound to this object, and score them. Every rank calls this function.

        share: this rank's share of the samples. progress: called as samples are done. Raises ConfigError and DataError for
        members that do not go together and for splits that are too small.
        """
