"""What the planner expects of one layout, to set beside what was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phalanx.config.schema import Run
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.layouts.candidates import Candidates
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.summary import interval
from phalanx.planner.time.profile import NamedProfile


@dataclass(frozen=True)
class Expected:
    """Of one layout on one machine."""

    cluster: str
    device: str
    """What the cluster's devices are."""
    profile: str
    """Name and source of the constants."""
    step_s: float
    step_s_interval: tuple[float, float]
    """What holds 90% of what may come."""
    time_by_cause_s: dict[str, float]
    memory_bytes: float
    """On the worst rank, as a run logs it."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def expected(run: Run, layout: ResolvedLayout, machine: Machine, profile: NamedProfile) -> Expected:
    """What the models of `machine` say of `run` in `layout`, with its pipeline simulated. Raises ConfigError like plans."""
    models = CostModels(machine, profile)
    candidate = Candidates.of([layout], [run.layout.recompute])
    times, memory = models.times(run, candidate, exact=True), models.memory(run, candidate)
    seconds = float(times.total[0])
    causes = {name: float(values[0]) for name, values in times.causes.items() if values[0] > 0}
    return Expected(
        cluster=machine.name,
        device=machine.node.device,
        profile=models.profile_words,
        step_s=seconds,
        step_s_interval=interval(seconds, float(times.spread[0])),
        time_by_cause_s=dict(sorted(causes.items(), key=lambda item: -item[1])),
        memory_bytes=float(memory.peak[0]),
    )
