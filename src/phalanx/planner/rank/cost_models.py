"""What layouts take on one machine with one profile of its device: step times, memory, and both in detail for one layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError
from phalanx.families.family import BoundModel
from phalanx.hardware.collectives import Constants, send
from phalanx.hardware.device_facts import DeviceFacts, device_facts
from phalanx.hardware.machine import Machine, host_of
from phalanx.layout.resolve import MemoryFits
from phalanx.layout.spec import OFFLOADS, LayoutTable, ResolvedLayout
from phalanx.planner.memory.model import Kernels, MemoryEstimates, memory, rank_memory
from phalanx.planner.memory.probability import BESIDE, Beside, communicators, fits
from phalanx.planner.schedule.schedule_table import Pass, schedule_table
from phalanx.planner.schedule.simulate import StageTimes, simulate
from phalanx.planner.time.part_time import in_training, part_times
from phalanx.planner.time.pipeline_time import PipelineModel, bound_pipelines, simulate_pipelines, stage_times
from phalanx.planner.time.profile import NamedProfile
from phalanx.planner.time.step_time import StepBreakdown, StepTimes
from phalanx.planner.time.timing import our_framework, step_times, steps_of_run
from phalanx.planner.trace.traced_model import TracedModel

Floats = npt.NDArray[np.float64]

WAITING = "pipeline bubble"
"""The part of a step's time in which a device has no work."""
STEP_COMPONENTS = {
    StepBreakdown.MATMUL: "matmul",
    StepBreakdown.ATTENTION: "attention",
    StepBreakdown.MEMORY: "memory traffic",
    StepBreakdown.TP: "tensor-parallel exposed",
    StepBreakdown.CP: "context-parallel exposed",
    StepBreakdown.HOST: "host",
    StepBreakdown.EP: "expert-parallel exposed",
    StepBreakdown.BUBBLE: WAITING,
    StepBreakdown.TRANSFER: "pipeline transfers exposed",
    StepBreakdown.DATA: "data-parallel exposed",
    StepBreakdown.OPTIMIZER: "optimizer",
    StepBreakdown.REST: "rest",
    StepBreakdown.OFFLOAD: "offloading exposed",
}
"""Names of the parts of a step's time, as they are printed."""
WORKING_SHARE = 0.75
"""Share of a device's board power that it draws while it works, where neither a run nor the device table says more. An
assumption: on average 0.67 of it was drawn while FORGE-L was trained on 1,024 GCDs of Frontier (48.9 MWh for 15,300 steps of
about 60 s; Yin et al., SC 2023, power traces)."""
WAITING_SHARE = 0.53
"""Power while a device waits for others over that while it works. An assumption."""
SPREAD = 0.1
"""One standard deviation of the logarithm of a predicted step's time where no fit says it."""
HOST_SHARE = 0.8
"""Share of a node's host memory that ranks may take for what lies there; the rest is for processes, data read ahead and
checkpoints. An assumption."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_PRIOR_RUNS = 5
"""Runs that SPREAD counts as much as: a profile that was judged by one or two is hardly known better than without them."""
_DRAWN = 2
"""Micro-batches in the picture of a pipeline, in pipeline ranks: enough to fill and to drain it."""


@dataclass(frozen=True)
class Times:
    """Seconds of an optimizer step. Arrays of [layouts]."""

    total: Floats
    causes: dict[str, Floats]
    """The breakdown by name; its values add up to `total`."""
    spread: Floats
    """One standard deviation of the natural logarithm of `total`: how far such predictions are off."""

    def take(self, which: Any) -> Times:
        """Return the times at these positions."""
        causes = {name: values[which] for name, values in self.causes.items()}
        return Times(self.total[which], causes, self.spread[which])

    def extend(self, others: Times) -> Times:
        """Return these times and then `others`."""
        causes = {name: np.concatenate([values, others.causes[name]]) for name, values in self.causes.items()}
        return Times(np.concatenate([self.total, others.total]), causes, np.concatenate([self.spread, others.spread]))

    def put(self, which: Any, others: Times) -> Times:
        """Return these times with `others` in place of those at these positions."""

        def replaced(values: Floats, new: Floats) -> Floats:
            values = values.copy()
            values[which] = new
            return values

        causes = {name: replaced(values, others.causes[name]) for name, values in self.causes.items()}
        return Times(replaced(self.total, others.total), causes, replaced(self.spread, others.spread))

    def mean_power(self, working_w: float) -> Floats:
        """Return watts of one device, the mean over a step, [layouts]. working_w: while it works; see `working_watts`."""
        waiting = sum((seconds for name, seconds in self.causes.items() if is_waiting(name)), np.zeros(len(self.total)))
        share = np.clip(waiting / self.total, 0.0, 1.0)
        return np.asarray(working_w * (1.0 + (WAITING_SHARE - 1.0) * share))


def working_watts(facts: DeviceFacts, measured: float | None = None) -> float | None:
    """Return the watts of a device that works: as a run measured them, else as the device table says; None unknown."""
    assumed = None if facts.power_w is None else WORKING_SHARE * facts.power_w
    return measured or facts.training_w or assumed


def is_waiting(cause: str) -> bool:
    """Return whether a device computes nothing in the part of a step that `cause` names."""
    return cause == WAITING or "exposed" in cause


@dataclass(frozen=True)
class Memory:
    """Memory of the rank that needs most. Arrays of [layouts]."""

    peak: Floats
    """Bytes of tensors and of the buffers that peers read: what a run logs as its peak."""
    p_fits: Floats
    """Probability that all ranks have room for them and for the overhead that is no tensor; 0 where a node's host memory has
    no room for what its ranks keep there."""
    host: Floats
    """Bytes that a rank keeps in host memory."""

    def take(self, which: Any) -> Memory:
        """Return the memory at these positions."""
        return Memory(self.peak[which], self.p_fits[which], self.host[which])


@dataclass(frozen=True)
class Bar:
    """One pass of one pipeline rank, for a picture."""

    rank: int
    kind: str
    """forward, backward, input or weight."""
    stage: int
    microbatch: int
    start: float
    """Seconds from the start of the step."""
    end: float


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

    def times(self, model: TracedModel, layouts: LayoutTable) -> Times:
        """Return the step times of layouts, their pipelines simulated."""
        return self._time(model, layouts, simulate_pipelines)

    def bound_times(self, model: TracedModel, layouts: LayoutTable) -> Times:
        """Return step times that lie nowhere above `times`; they need no simulation."""
        return self._time(model, layouts, bound_pipelines)

    def _time(self, model: TracedModel, layouts: LayoutTable, pipelines: PipelineModel) -> Times:
        # Nothing is traced for no layouts.
        if not len(layouts):
            return Times(np.zeros(0), {name: np.zeros(0) for name in STEP_COMPONENTS.values()}, np.zeros(0))
        profile, constants = self.profile.profile, self._constants
        # Steps of samples of several shapes take turns: their mean is what a run takes.
        each = [
            share * step_times(one, layouts, self.machine, profile, constants=constants, pipelines=pipelines).seconds
            for one, share in model.sample_shapes()
        ]
        found = StepTimes(np.sum(each, axis=0))
        causes = {name: found.of(component) for component, name in STEP_COMPONENTS.items()}
        return Times(found.total, causes, np.full(len(layouts), estimate_spread(self.profile)))

    def memory(self, model: TracedModel, layouts: LayoutTable) -> Memory:
        """Return the memory of layouts."""
        if not len(layouts):
            return Memory(np.zeros(0), np.zeros(0), np.zeros(0))
        found = memory(model, layouts, self._kernels(model), peer_copies=self._copies(model))
        groups = communicators(layouts)
        p_fits = fits(
            found.allocated,
            groups,
            self.device_bytes,
            self.beside,
            found.peer_buffers,
            model.load_spread_bytes(layouts),
        )
        return Memory(found.held, np.where(self._host_holds(layouts, found.host), p_fits, 0.0), found.host)

    def _host_holds(self, layouts: LayoutTable, held: Floats) -> npt.NDArray[np.bool_]:
        """Return where a node has room in host memory for what each of its ranks keeps there, [layouts].

        held: bytes of a rank. Raises ConfigError as `host_of`.
        """
        if not np.any(held):
            return np.ones(len(layouts), np.bool_)
        room = HOST_SHARE * 1e9 * host_of(self.machine).memory_gb
        return np.asarray(self._ranks_of_node(layouts) * held <= room)

    def _ranks_of_node(self, layouts: LayoutTable) -> npt.NDArray[np.int64]:
        return np.minimum(self.machine.node.devices, layouts.world_size)

    def explain_host_shortage(self, model: TracedModel, layouts: LayoutTable) -> str:
        """Return why a node's host memory has no room for what the ranks of a single layout keep there; empty if it has."""
        held = self.memory(model, layouts).host
        if self._host_holds(layouts, held).all():
            return ""
        asked = [name for name in OFFLOADS if getattr(layouts, name)[0]]
        needed = float((self._ranks_of_node(layouts) * held)[0]) / 1e9
        return (
            f"{' and '.join(f'layout.{name}=true' for name in asked)} keeps {needed:,.0f} GB in the host memory of a node, "
            f"and {HOST_SHARE:.0%} of {host_of(self.machine).memory_gb:,.0f} GB may be taken; shard over more ranks "
            f"(layout.dp_shard) or give {' or '.join(f'layout.{name}=false' for name in asked)}"
        )

    def stage_memory(self, model: TracedModel, layouts: LayoutTable) -> list[dict[str, float]]:
        """Return bytes by cause at the peak of each pipeline rank of a single layout."""
        row = layouts.row(0)
        ranks = rank_memory(model, row, row.recompute, self._kernels(model), peer_copies=self._copies(model))
        return [{**rank.causes, "peer buffers": rank.peer_buffers} for rank in ranks]

    def timeline(self, model: TracedModel, layouts: LayoutTable) -> list[Bar]:
        """Return the passes of one layout's pipeline ranks in a step: as many micro-batches as fill the pipeline twice."""
        layout = layouts.row(0)
        if layout.pp == 1:
            return []
        count = min(layout.accumulation, _DRAWN * layout.pp)
        # PyTorch's 1f1b takes no fewer micro-batches than stages.
        if layout.schedule == "1f1b":
            count = max(count, layout.n_stages)
        table = schedule_table(layout.schedule, layout.pp, layout.stages_per_rank, count)
        profile, constants = self.profile.profile, self._constants
        steps = steps_of_run(model, layouts, self.machine, our_framework(model, self.machine))
        stages = stage_times(steps, np.zeros(1, np.int64), part_times(steps.parts, self.machine, constants, profile))
        sent = send(steps.hidden_bytes, steps.pipeline, in_training(constants, profile))
        done = simulate(table, StageTimes(stages.forward[0], stages.backward[0], stages.weight[0], float(sent[0])))
        columns = (table.kind, table.stage, table.microbatch, done.start, done.end)
        return [
            Bar(rank, Pass(kind).name.lower(), stage, microbatch, start, end)
            for rank, rows in enumerate(zip(*(column.tolist() for column in columns), strict=True))
            for kind, stage, microbatch, start, end in zip(*rows, strict=True)
        ]

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

    def _kernels(self, model: TracedModel) -> Kernels:
        return Kernels.on_accelerators(model, rocm=self._rocm)

    def _copies(self, model: TracedModel) -> bool:
        return our_framework(model, self.machine).copy_engines


def estimate_spread(named: NamedProfile) -> float:
    """Return one standard deviation of the logarithm of the times that a profile predicts.

    It pools what the fit of the profile saw in runs it was not fitted to with SPREAD, which counts as much as _PRIOR_RUNS of
    them, and is never less than what those runs say.
    """
    fitted = named.fitted or {}
    median, count = fitted.get("held_out_median_error"), int(fitted.get("held_out") or 0)
    if median is None or count == 0:
        return SPREAD
    seen = _NORMAL * float(median)
    # Variances are pooled, weighted by the runs that each is known from.
    pooled = math.sqrt((_PRIOR_RUNS * SPREAD**2 + count * seen**2) / (_PRIOR_RUNS + count))
    return max(seen, pooled)


LEAST_P = 0.9
"""Probability of fitting below which a micro-batch is taken to be too large; plans leave layouts out at the same."""


@dataclass(frozen=True)
class SeenMemory:
    """What a step took."""

    layout: ResolvedLayout
    allocated: float
    """Most bytes of live tensors on any rank's device."""


def memory_fits(model: BoundModel, capacity: float, *, rocm: bool, seen: SeenMemory | None = None) -> MemoryFits | None:
    """Return the question whether a layout of the model probably fits accelerators of `capacity` bytes.

    None for families that the memory model does not cover: what their batches take depends on the samples. rocm: whether the
    devices are AMD's. seen: corrects the estimates by what one layout really took.
    """
    if not isinstance(model, TracedModel):
        return None
    kernels = Kernels.on_accelerators(model, rocm=rocm)
    # Buffers between peers are counted wherever they may be used: whether ranks reach each other is not known here.
    copies = model.run.layout.peer_copies is not False

    def estimate(layout: ResolvedLayout) -> MemoryEstimates:
        return memory(model, layout.table, kernels, peer_copies=copies)

    # The model is taken to err by one factor in all layouts that are asked about.
    correction = 1.0 if seen is None else seen.allocated / float(estimate(seen.layout).allocated[0])

    def probably_fits(layout: ResolvedLayout) -> bool:
        candidate, found = layout.table, estimate(layout)
        beside = BESIDE["rocm" if rocm else "cuda"]
        p_fits = fits(
            found.allocated * correction,
            communicators(candidate),
            capacity,
            beside,
            found.peer_buffers,
            model.load_spread_bytes(candidate),
        )
        return bool(p_fits[0] >= LEAST_P)

    return probably_fits
