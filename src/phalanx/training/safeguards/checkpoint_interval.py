"""When a run writes its checkpoints: every so many steps, or as often as loses least by what it measures itself.

Ranks decide alike: after a checkpoint, which all of them have taken part in, the first one chooses and tells the others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass

from phalanx.checkpoint import RankGroup
from phalanx.config.schema import Run
from phalanx.formatting import format_duration
from phalanx.hardware.reliability import RESTART_MINUTES, find_goodput
from phalanx.layout.mesh import Ranks
from phalanx.training.logs import RunLog

FIRST_STEPS = 8
"""Steps before the first checkpoint of a run that begins or resumes: by it a save and steps are measured."""
_WINDOW = 64
"""Last steps whose median is the duration of a step."""
_WORTH_TELLING = 0.25
"""Change of the interval, as a share of it, that is printed."""
INTERVAL_EVENT = "checkpoint_interval"


def count_nodes(run: Run, ranks: Ranks) -> int:
    """Return the nodes of a run, as far as the run file or the launcher says what shares a node; else 1."""
    per_node = run.cluster.devices_per_node or ranks.ranks_per_node or ranks.world_size
    return math.ceil(ranks.world_size / per_node)


@dataclass(frozen=True)
class ChosenInterval:
    """An interval between checkpoints, and what it was chosen from; times in seconds."""

    every: int
    """Steps."""
    stall_seconds: float
    """Time that training stood still for the last checkpoint."""
    write_seconds: float
    """Time until the last one was on storage; a shorter interval would make saves wait for each other."""
    step_seconds: float
    """Median of the last steps, without checkpoints."""
    failure_seconds: float
    """Mean time between failures of the job."""
    goodput: float
    """Expected share of the job's time in steps that count."""

    def in_words(self, nodes: int, mtbf_hours: float) -> str:
        """Return the choice and its reasons in one line."""
        return (
            f"checkpoint every {self.every:,} steps ({format_duration(self.every * self.step_seconds)}) from here: one "
            f"holds training up for {format_duration(self.stall_seconds)} and is on storage after "
            f"{format_duration(self.write_seconds)}, a step takes {format_duration(self.step_seconds)}, and {nodes:,} "
            f"node{'s' * (nodes > 1)} of {mtbf_hours:,g} h between failures (cluster.mtbf_hours) stop the job every "
            f"{format_duration(self.failure_seconds)}"
        )


def choose_interval(stall_s: float, write_s: float, step_s: float, nodes: int, mtbf_hours: float) -> ChosenInterval:
    """Return the interval that loses least (`hardware.reliability.find_goodput`), in whole steps, at least one.

    stall_s, write_s, step_s: as measured, see `ChosenInterval`. nodes, mtbf_hours: of the job, any of which ends it.
    """
    found = find_goodput(stall_s, nodes, mtbf_hours, RESTART_MINUTES * 60, least_s=write_s)
    every = max(1, round(found.interval_s / max(step_s, 1e-9)))
    return ChosenInterval(every, stall_s, write_s, step_s, found.failure_s, found.share)


class CheckpointInterval:
    """Says after which steps a checkpoint is due (`checkpoint.every`). The same on all ranks."""

    def __init__(self, run: Run, ranks: Ranks, log: RunLog, first_step: int) -> None:
        """Begin after step `first_step`."""
        self._every = run.checkpoint.every
        self._keep_every = run.checkpoint.keep_every
        self._mtbf_hours = run.cluster.mtbf_hours
        self._nodes = count_nodes(run, ranks)
        self._log = log
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._told = 0
        self._chosen = FIRST_STEPS
        self._next = first_step + FIRST_STEPS

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`."""
        if self._every != "auto":
            return self._every is not None and step % self._every == 0
        kept = self._keep_every is not None and step % self._keep_every == 0
        return kept or step >= self._next

    def note_step(self, seconds: float) -> None:
        """Take note of how long a step took, the wait for a checkpoint not included."""
        self._steps.append(seconds)

    def begin(self, step: int) -> None:
        """Count anew from `step`, to which the run has returned."""
        self._next = step + self._chosen

    def saved(self, step: int, stall_s: float, write_s: float) -> None:
        """Choose the interval anew after the checkpoint of `step`, on all ranks together.

        stall_s, write_s: what this one, and the last that is on storage, took on this rank; the first rank's count.
        """
        if self._every != "auto":
            return
        chosen = RankGroup.default().from_first(lambda: self._choose(stall_s, write_s))
        self._chosen = chosen.every
        self._next = step + chosen.every
        self._log.event(INTERVAL_EVENT, step, **asdict(chosen))
        if abs(chosen.every - self._told) > _WORTH_TELLING * self._told:
            self._told = chosen.every
            self._log.note(chosen.in_words(self._nodes, self._mtbf_hours))

    def _choose(self, stall_s: float, write_s: float) -> ChosenInterval:
        # Before the first step is through nothing is measured; the next choice comes after one step then.
        step_s = statistics.median(self._steps) if self._steps else max(stall_s, write_s)
        return choose_interval(stall_s, write_s, step_s, self._nodes, self._mtbf_hours)
