"""How well steps are balanced: what ranks do and what they wait, from the costs that were shared out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from phalanx.families.materials.data.balance import Division


@dataclass(frozen=True)
class StepBalance:
    """One step, in which every rank waits for the one with most to do."""

    imbalance: float
    """Cost of the heaviest rank over the mean."""
    seconds: float
    """Cost of the heaviest rank: how long the step takes, in seconds, or in units of cost where costs are no seconds."""
    wait_seconds: float
    """What a rank waits for the heaviest, in the mean over ranks; same unit."""
    heaviest_microbatch: float
    """Cost of the heaviest micro-batch; same unit."""
    idle_ranks: int
    """Ranks without any structure."""


def step_balance(division: Division, unit: float = 1.0) -> StepBalance:
    """The balance of one step. unit: what one of the whole-number costs is in seconds (`CostModel.unit` of a fit)."""
    ranks = division.loads.sum(axis=1)
    longest, mean = float(ranks.max()), float(ranks.mean())
    return StepBalance(
        longest / mean,
        longest * unit,
        (longest - mean) * unit,
        float(division.loads.max()) * unit,
        int((ranks == 0).sum()),
    )


@dataclass(frozen=True)
class BalanceReport:
    """Many steps together."""

    steps: int
    imbalance_mean: float
    imbalance_p95: float
    imbalance_max: float
    wait_mean: float
    """Share of all time that ranks wait: long steps count more."""
    wait_seconds_mean: float
    """Mean wait of a rank in a step, in seconds or units of cost."""

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def report(steps: Iterable[StepBalance]) -> BalanceReport:
    """What several steps, at least one, come to."""
    seen = list(steps)
    imbalance = np.array([step.imbalance for step in seen])
    waited = np.array([step.wait_seconds for step in seen])
    return BalanceReport(
        len(seen),
        float(imbalance.mean()),
        float(np.percentile(imbalance, 95)),
        float(imbalance.max()),
        float(waited.sum()) / sum(step.seconds for step in seen),
        float(waited.mean()),
    )
