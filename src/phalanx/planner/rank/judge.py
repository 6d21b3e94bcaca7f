"""All legal layouts of a run on a number of devices, judged: pruned by memory, timed, the best ones simulated, ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.config.check import global_batch_samples
from phalanx.config.override import parse_overrides
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.explain.budget import power_w
from phalanx.planner.layouts.candidates import Candidates
from phalanx.planner.layouts.enumerate import CHOSEN, Limits, legal_candidates, without_twins
from phalanx.planner.layouts.microbatch import LEAST_P
from phalanx.planner.rank.models import Floats, Memory, Models, Times
from phalanx.planner.rank.prune import gathered_bytes, least_bytes

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SIMULATED = 256
"""Layouts, best by the closed form first, whose schedule is simulated."""
SPLITS = 20
"""Choices of tp, cp and pp, best by the closed form first, of which the fastest layouts are simulated in any case."""
OF_EACH_SPLIT = 16
"""Layouts of each of those: simulated, the fastest may be another one than by the closed form."""
WORTH_STREAMING = 0.02
"""Share of a device's memory that a block's parameters and gradients take, gathered, where streaming is considered."""
_AT_ONCE = 50_000
"""Layouts the models see at a time: few enough for their arrays to stay in the processor's cache."""


def fixed_fields(run: Run, words: Sequence[str], *, everything: bool = False) -> dict[str, Any]:
    """The fields of the layout that are not to be chosen: those of the command line, or of the run file as well."""
    stated = {str(change.path[-1]) for change in parse_overrides(words) if change.path[0] == "layout"}
    if everything:
        stated |= run.layout.model_fields_set
    values = {name: getattr(run.layout, name) for name in CHOSEN if name in stated}
    return {name: value for name, value in values.items() if value != "auto"}


@dataclass(frozen=True)
class Task:
    """What is to be planned: a run on so many devices."""

    run: Run
    devices: int
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of `layout` that keep these values."""

    def __post_init__(self) -> None:
        assert set(self.fixed) <= set(CHOSEN)

    @property
    def samples(self) -> int:
        """Samples an optimizer step."""
        return global_batch_samples(self.run)

    @property
    def unit(self) -> str:
        """What a person counts training in: tokens of text, samples of all else."""
        return "samples" if self.run.sample_tokens is None else "tokens"

    @property
    def amount(self) -> int:
        """Of these an optimizer step."""
        return self.samples * (self.run.sample_tokens or 1)

    @property
    def batch(self) -> str:
        """The global batch in words."""
        if self.run.sample_tokens is None:
            return f"{self.samples:,} samples"
        return f"{self.samples:,} x {self.run.sample_tokens:,} tokens"


@dataclass(frozen=True)
class Ranked:
    """Layouts that fit, fastest first, with times from the simulation of their schedules."""

    candidates: Candidates
    times: Times
    memory: Memory

    def __len__(self) -> int:
        return len(self.candidates)

    def take(self, which: Any) -> Ranked:
        """Those at these positions."""
        return Ranked(self.candidates.take(which), self.times.take(which), self.memory.take(which))


@dataclass(frozen=True)
class Judged:
    """Everything that was found out about the layouts of a task."""

    task: Task
    legal: Candidates
    """All of them."""
    peak: Floats
    """Bytes on the worst rank of each; NaN for those that were seen not to fit without computing it."""
    p_fits: Floats
    fitting: Ints
    """Positions of those that are likely enough to fit."""
    seconds: Floats
    """Of a step of those, by the closed form."""
    ranked: Ranked
    """Simulated: the best of them, the best of each choice of tp, cp and pp, and those that need less memory, or less
    energy, than any faster one, or less memory than any that takes less energy."""


@dataclass(frozen=True)
class Planner:
    """Plans on one machine, with one set of models."""

    machine: Machine
    models: Models
    least_p: float = LEAST_P
    """Probability of fitting below which a layout is left out."""
    limits: Limits = field(default_factory=Limits)
    simulated: int = SIMULATED

    def judge(self, task: Task) -> Judged:
        """Judge every legal layout. Raises ConfigError where none is legal, or the machine has fewer devices; there may be
        none that fits."""
        self.machine.check_devices(task.devices)
        legal = self.legal(task)
        if not len(legal):
            raise ConfigError(self._why_nothing(task))
        peak, p_fits = self._room(task.run, legal)
        fitting = np.flatnonzero(p_fits >= self.least_p)
        seconds, energy = self._seconds_and_energy(task.run, legal.take(fitting))
        best = np.argsort(seconds, kind="stable")[: self.simulated]
        splits = fastest_of_each_split(legal.take(fitting), seconds)
        leans = (lean(seconds, peak[fitting]), lean(seconds, energy), lean(energy, peak[fitting]))
        chosen = np.unique(np.concatenate([best, splits, *leans]))
        return Judged(task, legal, peak, p_fits, fitting, seconds, self.rank(task.run, legal.take(fitting[chosen])))

    def legal(self, task: Task) -> Candidates:
        """All legal layouts of a task, within the limits; of those that run the same way one."""
        return without_twins(self.every_legal(task))

    def every_legal(self, task: Task) -> Candidates:
        """All legal layouts of a task, within the limits."""
        legal = legal_candidates(task.run, task.devices, self.machine.node.devices, task.fixed, self.limits)
        if "gather" in task.fixed:
            return legal
        # Where gathered blocks are small, streaming has nothing to save; without `tp` they are whole, and FSDP does better.
        worth = gathered_bytes(task.run, legal) >= WORTH_STREAMING * self.models.device_bytes
        return legal.take((legal.streamed == 1) | (worth & (legal.tp > 1)))

    def rank(self, run: Run, candidates: Candidates) -> Ranked:
        """These layouts, simulated, fastest first; of equally fast ones that which needs less memory."""
        times, memory = self.models.times(run, candidates, exact=True), self.models.memory(run, candidates)
        order = np.lexsort((memory.peak, times.total))
        return Ranked(candidates, times, memory).take(order)

    def leanest(self, run: Run, candidates: Candidates, peak: Floats) -> Candidates:
        """The one that needs least memory. peak: as far as it is known, [candidates]; all NaN where it is not."""
        if np.isnan(peak).all():
            lean = np.argsort(least_bytes(run, candidates), kind="stable")[: self.simulated]
            return candidates.take(lean[[int(np.argmin(self.models.memory(run, candidates.take(lean)).peak))]])
        return candidates.take([int(np.nanargmin(peak))])

    def memory_causes(self, run: Run, candidate: Candidates) -> dict[str, float]:
        """Bytes by cause on the pipeline rank that needs most, what takes most first, of a single candidate."""
        worst = max(self.models.stage_memory(run, candidate), key=lambda causes: sum(causes.values()))
        return dict(sorted(worst.items(), key=lambda item: -item[1]))

    def _room(self, run: Run, candidates: Candidates) -> tuple[Floats, Floats]:
        """(bytes on the worst rank, probability of fitting); NaN and 0 of those that cannot fit.

        Small micro-batches and much recompute come first. Where nothing fits with those, nothing does with larger ones and
        less recompute, for the same split of the model: these are left out, and the model is not traced for them.
        """
        peak, p_fits = np.full(len(candidates), np.nan), np.zeros(len(candidates))
        possible = least_bytes(run, candidates) <= self.models.device_bytes
        alike = (candidates.tp << 40) + (candidates.cp << 20) + (candidates.streamed << 2) + candidates.context
        names, split = np.unique(alike, return_inverse=True)
        order = -candidates.recompute
        hopeless: list[tuple[Bools, int, int]] = []
        for microbatch in np.unique(candidates.microbatch).tolist():
            for recompute in np.unique(order).tolist():
                wave = possible & (candidates.microbatch == microbatch) & (order == recompute)
                worse = np.zeros(len(names), bool)
                for splits, m, r in hopeless:
                    if microbatch % m == 0 and recompute >= r:
                        worse |= splits
                for lot in _lots(np.flatnonzero(wave & ~worse[split])):
                    found = self.models.memory(run, candidates.take(lot))
                    peak[lot], p_fits[lot] = found.peak, found.p_fits
                tried, fits = np.zeros((2, len(names)), bool)
                tried[split[wave]] = True
                fits[split[wave & (p_fits >= self.least_p)]] = True
                hopeless.append((tried & ~fits, microbatch, recompute))
        return peak, p_fits

    def _seconds_and_energy(self, run: Run, candidates: Candidates) -> tuple[Floats, Floats]:
        """Of a step by the closed form; energy over that of a device at its board power for a second, each device's."""
        seconds, energy = np.zeros((2, len(candidates)))
        for lot in _lots(np.arange(len(candidates))):
            times = self.models.times(run, candidates.take(lot), exact=False)
            seconds[lot], energy[lot] = times.total, times.total * power_w(times, 1.0)
        return seconds, energy

    def _why_nothing(self, task: Task) -> str:
        """What the rules say of the fixed fields with all else as it is by default."""
        free = type(task.run.layout).model_fields
        plain = {name: task.fixed.get(name, free[name].default) for name in CHOSEN}
        run = task.run.model_copy(update={"layout": task.run.layout.model_copy(update=plain)})
        try:
            resolve_layout(run, task.devices, self.machine.node.devices)
        except ConfigError as error:
            return str(error)
        return f"no layout of {task.devices} devices is legal within {self.limits}; fix the fields that go beyond"


def lean(first_goal: Floats, second_goal: Floats) -> Ints:
    """Positions of those that need less of the second than every one that needs less of the first, least of that first."""
    order = np.lexsort((second_goal, first_goal))
    least = np.minimum.accumulate(second_goal[order])
    first = np.ones(len(order), bool)
    first[1:] = least[1:] < least[:-1]
    return np.asarray(order[first])


def fastest_of_each_split(candidates: Candidates, seconds: Floats) -> Ints:
    """Positions of the OF_EACH_SPLIT fastest of each choice of tp, cp and pp, of the SPLITS fastest choices."""
    order = np.argsort(seconds, kind="stable")
    _, first, split = np.unique(split_of(candidates)[order], return_index=True, return_inverse=True)
    # In the order of their fastest layout.
    rank = np.argsort(np.argsort(first))[split]
    grouped = np.argsort(rank, kind="stable")
    starts = np.searchsorted(rank[grouped], rank[grouped])
    place = np.arange(len(grouped)) - starts
    return np.asarray(order[grouped[(place < OF_EACH_SPLIT) & (rank[grouped] < SPLITS)]])


def split_of(candidates: Candidates) -> Ints:
    """A number for each choice of tp, cp and pp."""
    return np.asarray((candidates.tp << 40) + (candidates.cp << 20) + candidates.pp)


def throughput(task: Task, seconds: npt.ArrayLike) -> Floats:
    """Tokens, or samples (`Task.unit`), a second and device."""
    return np.asarray(task.amount / (np.asarray(seconds, np.float64) * task.devices))


def tflops(task: Task, seconds: npt.ArrayLike) -> Floats:
    """Model TFLOP/s of a device, in the convention that `training.flops` names."""
    each = bind(task.run).flops_per_sample()
    return np.asarray(task.samples * (each / 1e12) / (np.asarray(seconds, np.float64) * task.devices))


def _lots(positions: Ints) -> list[Ints]:
    return [positions[start : start + _AT_ONCE] for start in range(0, len(positions), _AT_ONCE)]
