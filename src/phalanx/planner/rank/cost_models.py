"""The time and the memory model of `phalanx.planner`, as planning asks them: for one machine and one profile of its
device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.hardware.collectives import Constants, send
from phalanx.hardware.device import device_facts
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.layouts.candidates import Candidates
from phalanx.planner.layouts.stage_layers import split
from phalanx.planner.memory.model import Kernels, memory, rank_memory
from phalanx.planner.memory.probability import BESIDE, Beside, communicators, fits
from phalanx.planner.rank.models import WAITING, Bar, Memory, Times
from phalanx.planner.schedule.simulate import StageTimes, simulate
from phalanx.planner.schedule.table import Pass, schedule_table
from phalanx.planner.time.operation_time import Way
from phalanx.planner.time.part_time import in_training, part_times
from phalanx.planner.time.profile import NamedProfile
from phalanx.planner.time.step_time import StepCause
from phalanx.planner.time.timing import our_framework, step_times, steps_of_run

CAUSES = {
    StepCause.MATMUL: "matmul",
    StepCause.ATTENTION: "attention",
    StepCause.MEMORY: "memory traffic",
    StepCause.TP: "tensor-parallel exposed",
    StepCause.CP: "context-parallel exposed",
    StepCause.HOST: "host",
    StepCause.BUBBLE: WAITING,
    StepCause.TRANSFER: "pipeline transfers exposed",
    StepCause.DATA: "data-parallel exposed",
    StepCause.OPTIMIZER: "optimizer",
    StepCause.REST: "rest",
}
"""What a person calls the causes of a step's time."""
SPREAD = 0.1
"""One standard deviation of the logarithm of a predicted step's time where no fit says it."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_PRIOR_RUNS = 5
"""Runs that SPREAD counts as much as: a profile that was judged by one or two is hardly known better than without them."""
_DRAWN = 2
"""Micro-batches in the picture of a pipeline, in pipeline ranks: enough to fill and to drain it."""


@dataclass(frozen=True)
class CostModels:
    """The models of one machine."""

    machine: Machine
    profile: NamedProfile

    @property
    def device_bytes(self) -> int:
        """Memory of a device. Raises ConfigError where it is not known."""
        found = device_facts(self.machine.node.device).memory_bytes
        if found is None:
            raise ConfigError(f"device {self.machine.node.device}: devices.yaml has no memory size, which plans need")
        return found

    @property
    def profile_words(self) -> str:
        """The name of the profile and its source."""
        return f"{self.profile.name}: {self.profile.source}"

    def times(self, run: Run, candidates: Candidates, *, exact: bool) -> Times:
        """Of each candidate."""
        if not len(candidates):
            return Times(np.zeros(0), {name: np.zeros(0) for name in CAUSES.values()}, np.zeros(0))
        found = step_times(run, candidates, self.machine, self.profile.profile, constants=self._constants, exact=exact)
        causes = {name: found.of(cause) for cause, name in CAUSES.items()}
        return Times(found.total, causes, np.full(len(candidates), spread_of(self.profile)))

    def memory(self, run: Run, candidates: Candidates) -> Memory:
        """Of each candidate."""
        if not len(candidates):
            return Memory(np.zeros(0), np.zeros(0))
        found = memory(run, candidates, self._kernels(run), peer_copies=self._copies(run), capacity=self.device_bytes)
        groups = communicators(candidates)
        p_fits = fits(found.allocated, groups, self.device_bytes, self.beside, found.peer_buffers)
        return Memory(found.held, p_fits)

    def stage_memory(self, run: Run, candidate: Candidates) -> list[dict[str, float]]:
        """Bytes by cause at the peak of each pipeline rank."""
        ranks = rank_memory(
            run,
            candidate.layout(0),
            candidate.recompute_of(0),
            self._kernels(run),
            peer_copies=self._copies(run),
        )
        return [{**rank.causes, "peer buffers": rank.peer_buffers} for rank in ranks]

    def timeline(self, run: Run, candidate: Candidates) -> list[Bar]:
        """What the pipeline ranks do in a step; of many micro-batches only as many as fill the pipeline twice."""
        layout = candidate.layout(0)
        if layout.pp == 1:
            return []
        count = min(layout.accumulation, _DRAWN * layout.pp)
        if layout.schedule == "1f1b":
            count = max(count, layout.n_stages)
        table = schedule_table(layout.schedule, layout.pp, layout.stages_per_rank, count)
        done = simulate(table, self._stage_times(run, candidate, layout))
        columns = (table.kind, table.stage, table.microbatch, done.start, done.end)
        return [
            Bar(rank, Pass(kind).name.lower(), stage, microbatch, start, end)
            for rank, rows in enumerate(zip(*(column.tolist() for column in columns), strict=True))
            for kind, stage, microbatch, start, end in zip(*rows, strict=True)
        ]

    def _stage_times(self, run: Run, candidate: Candidates, layout: ResolvedLayout) -> StageTimes:
        profile, constants = self.profile.profile, self._constants
        steps = steps_of_run(run, candidate, self.machine, our_framework(run, self.machine))
        times = part_times(steps.parts, self.machine, constants, profile)
        both = times.seconds.sum(axis=2)
        blocks = np.array(split(run.model.n_layers, layout.n_stages, *bind(run).block_costs()), np.float64)
        stages = []
        for column in (both[:, Way.FORWARD], both[:, Way.BACKWARD], times.weight):
            stage = blocks * column[steps.block[0]]
            stage[0] += column[steps.embedding[0]]
            stage[-1] += column[steps.head[0]]
            stages.append(stage)
        sent = send(steps.hidden_bytes, steps.pipeline, in_training(constants, profile))
        return replace(StageTimes(*stages), transfer=float(sent[0]))

    @property
    def _constants(self) -> Constants:
        return self.profile.collectives_on(self.machine)

    @property
    def beside(self) -> Beside:
        """What a device holds beside the tensors: as it was measured, else as it is assumed."""
        assumed = BESIDE["rocm" if self._rocm else "cuda"]
        measured = self.profile.beside
        return assumed if measured is None else replace(assumed, **measured, source=self.profile.source)

    @property
    def _rocm(self) -> bool:
        return self.machine.node.device.startswith("MI")

    def _kernels(self, run: Run) -> Kernels:
        return Kernels.on_accelerators(run, rocm=self._rocm)

    def _copies(self, run: Run) -> bool:
        return our_framework(run, self.machine).copy_engines


def spread_of(named: NamedProfile) -> float:
    """How far predicted times are off: what the fit of a profile saw in runs it was not fitted to, and SPREAD, which counts
    as much as _PRIOR_RUNS of them; never less than they say."""
    fitted = named.fitted or {}
    median, count = fitted.get("held_out_median_error"), int(fitted.get("held_out") or 0)
    if median is None or count == 0:
        return SPREAD
    seen = _NORMAL * float(median)
    pooled = math.sqrt((_PRIOR_RUNS * SPREAD**2 + count * seen**2) / (_PRIOR_RUNS + count))
    return max(seen, pooled)
