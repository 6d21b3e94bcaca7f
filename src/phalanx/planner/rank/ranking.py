"""All legal layouts of a run on a number of devices, ranked: pruned by memory, timed, and the best ones simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.config.check import global_batch_samples
from phalanx.config.load import parse_overrides
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.hardware.device_facts import known_devices
from phalanx.hardware.machine import Machine
from phalanx.layout.legality import is_legal
from phalanx.layout.legality.rule import Requirements
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import SCHEDULES, Bools, Ints, LayoutTable
from phalanx.nn.precision import PRECISIONS
from phalanx.optimizers import find_optimizer, kept_values
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.rank.cost_models import LEAST_P, CostModels, Floats, Memory, Times
from phalanx.planner.rank.enumeration import CHOSEN, Limits, drop_equivalent, enumerate_layouts, list_options
from phalanx.planner.schedule.bounds import in_flight
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.planner.trace.trained_flops import trained_flops_per_sample

SPLITS = 20
"""Choices of tp, cp and pp, fastest first, of which the fastest layouts are found."""
OF_EACH_SPLIT = 16
"""Layouts found per (tp, cp, pp)."""
_NEAREST = 256
"""Layouts, nearest to a bound of their memory first, of which one may need least."""
WORTH_SHARDING = 0.02
"""Share of a device's memory that parameters and gradients take, gathered, where ways to avoid that are considered: those
of a block, to stream it, and of an expert, to share it out over ranks."""


def fixed_fields(run: Run, words: Sequence[str], *, everything: bool = False) -> dict[str, Any]:
    """Return the fields of the layout that are not to be chosen: those of the command line, or of the run file as well."""
    stated = {str(change.path[-1]) for change in parse_overrides(words) if change.path[0] == "layout"}
    if everything:
        # Pydantic keeps which fields were written and which are defaults.
        stated |= run.layout.model_fields_set
    values = {name: getattr(run.layout, name) for name in CHOSEN if name in stated}
    return {name: value for name, value in values.items() if value != "auto"}


@dataclass(frozen=True)
class Task:
    """What is to be planned: the model of a run on so many devices, with what plans need of it again and again."""

    model: TracedModel
    devices: int
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of `layout` that keep these values."""

    def __post_init__(self) -> None:
        assert set(self.fixed) <= set(CHOSEN)

    @property
    def run(self) -> Run:
        """The run that the model is bound to."""
        return self.model.run

    @cached_property
    def samples(self) -> int:
        """Samples per optimizer step."""
        return global_batch_samples(self.run)

    @cached_property
    def sample_tokens(self) -> int | None:
        """Tokens of a sample; None where samples are no texts."""
        return self.run.sample_tokens

    @property
    def unit(self) -> str:
        """What a person counts training in: tokens of text, samples of all else."""
        return "samples" if self.sample_tokens is None else "tokens"

    @property
    def amount(self) -> int:
        """Units per optimizer step."""
        return self.samples * (self.sample_tokens or 1)

    @property
    def batch(self) -> str:
        """The global batch in words."""
        if self.sample_tokens is None:
            return f"{self.samples:,} samples"
        return f"{self.samples:,} x {self.sample_tokens:,} tokens"

    def device_throughput(self, seconds: npt.ArrayLike) -> Floats:
        """Return units per second and device of steps that take so long."""
        return np.asarray(self.amount / (np.asarray(seconds, np.float64) * self.devices))

    def model_tflops(self, seconds: npt.ArrayLike) -> Floats:
        """Return model TFLOP/s per device of steps that take so long, in the convention that `training.flops` names."""
        tflop = self.samples * trained_flops_per_sample(self.model) / 1e12
        return np.asarray(tflop / (np.asarray(seconds, np.float64) * self.devices))


@dataclass(frozen=True)
class RankedLayouts:
    """Layouts that fit, fastest first, with times from the simulation of their schedules."""

    layouts: LayoutTable
    times: Times
    memory: Memory

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, which: Any) -> RankedLayouts:
        """Return the layouts at these positions."""
        return RankedLayouts(self.layouts.take(which), self.times.take(which), self.memory.take(which))


@dataclass(frozen=True)
class Ranking:
    """Everything that was found out about the layouts of a task."""

    task: Task
    legal: LayoutTable
    """All legal layouts."""
    peak: Floats
    """Bytes on the worst rank of each legal layout; NaN where a bound showed that it does not fit."""
    fitting: Ints
    """Indices of the legal layouts that are likely enough to fit."""
    bounds: Times
    """Times of those that fit by which no simulation takes less, [fitting]."""
    ranked: RankedLayouts
    """Simulated layouts, among them the fastest of each choice of tp, cp and pp, and those that are Pareto-optimal in two
    of time, memory and energy."""


def check_products(run: Run, device: str) -> None:
    """Raise ConfigError where a run multiplies 8-bit numbers and `device`, by its name in `devices.yaml`, does not."""
    known = next((facts for _, facts in known_devices() if facts.name == device), None)
    if run.layout.in_8_bits and known is not None and "fp8" not in known.peak_tflops:
        raise ConfigError(
            f"layout.precision={run.layout.precision}: {device} has no products of 8-bit floating-point numbers\n"
            "set layout.precision=bf16"
        )
    if run.layout.precision == "mxfp8":
        raise ConfigError(
            "layout.precision=mxfp8 is emulated on the CPU and computed on no accelerator\nset layout.precision=fp8-block"
        )


@dataclass(frozen=True)
class Planner:
    """Plans on one machine, with one set of models."""

    machine: Machine
    models: CostModels
    least_p: float = LEAST_P
    """Probability of fitting below which a layout is left out."""
    limits: Limits = field(default_factory=Limits)

    def rank_layouts(self, task: Task) -> Ranking:
        """Rank every legal layout of a task; it may be that none fits.

        Raises ConfigError where none is legal, or the machine has fewer devices.
        """
        legal, peak, fitting, bounds = self.find_fitting(task)
        ranked = self.simulate_best(task.model, legal.take(fitting), peak[fitting], bounds)
        return Ranking(task, legal, peak, fitting, bounds, ranked)

    def find_fitting(self, task: Task) -> tuple[LayoutTable, Floats, Ints, Times]:
        """Return all legal layouts, bytes on the worst rank of each, indices of those likely enough to fit, and their times.

        Several chunks of tokens are tried in the fastest layouts alone, unless their number is fixed.
        Bytes are NaN where a bound showed that a layout does not fit. Times are bounds that no simulation stays below.
        Raises what `rank_layouts` raises.
        """
        self.machine.check_devices(task.devices)
        check_products(task.run, self.machine.node.device)
        legal = self.legal_layouts(task)
        if not len(legal):
            raise ConfigError(self._explain_nothing_legal(task))
        peak, p_fits = self._estimate_memory(task, legal)
        # Memory comes before time: most layouts do not fit, and times need a trace of each micro-batch that is left.
        fitting = np.flatnonzero(p_fits >= self.least_p)
        bounds = self.models.bound_times(task.model, legal.take(fitting))
        chunked = self._chunk_tokens(task, legal.take(fitting), bounds.total)
        if len(chunked):
            found = self.models.memory(task.model, chunked)
            more = np.flatnonzero(found.p_fits >= self.least_p)
            bounds = bounds.extend(self.models.bound_times(task.model, chunked.take(more)))
            fitting = np.concatenate([fitting, len(legal) + more])
            legal, peak = LayoutTable.joined([legal, chunked]), np.concatenate([peak, found.peak])
        return legal, peak, fitting, bounds

    def simulate_best(self, model: TracedModel, layouts: LayoutTable, peak: Floats, bounds: Times) -> RankedLayouts:
        """Simulate the layouts that are best in some respect, and rank these.

        The best are the fastest of each choice of tp, cp and pp, and those that are Pareto-optimal in two of time, memory
        and energy. At first all times are bounds that no simulation stays below. What seems best by them is simulated, again
        and again, until all that seems best is simulated: then it is best, since the others take at least their bounds.

        peak: bytes on the worst rank, [layouts]. bounds: times that no simulation stays below, [layouts].
        """
        times = bounds
        # At 1 W a device: what a device draws multiplies the energy of all layouts alike.
        seconds, energy = times.total.copy(), times.total * times.mean_power(1.0)
        known = np.zeros(len(layouts), bool)
        while True:
            fronts = [pareto_front(*goals) for goals in ((seconds, peak), (seconds, energy), (energy, peak))]
            best = np.concatenate([fastest_of_each_split(layouts, seconds), *fronts])
            chosen = np.unique(best[~known[best]])
            if not len(chosen):
                return self.rank_simulated(model, layouts.take(known), times.take(known))
            found = self.models.times(model, layouts.take(chosen))
            times = times.put(chosen, found)
            seconds[chosen], energy[chosen] = found.total, found.total * found.mean_power(1.0)
            known[chosen] = True

    def _chunk_tokens(self, task: Task, layouts: LayoutTable, seconds: Floats) -> LayoutTable:
        """Return the fastest of the layouts with several chunks of tokens on their way to experts, where that is legal.

        seconds: of a step with one chunk, [layouts].
        """
        more = list_options(task.model, task.fixed, self.limits)["ep_chunks"][1:]
        spread = layouts.take(layouts.ep > 1)
        if not more or not len(spread):
            return layouts.take([])
        # Blocks are traced anew for each number of chunks, which takes long: not for layouts that are slow anyway.
        best = fastest_of_each_split(spread, seconds[layouts.ep > 1])
        chunked = spread.take(np.sort(best)).vary("ep_chunks", more)
        needs = Requirements.of_model(task.model, task.devices, self.machine.node.devices)
        return chunked.take(is_legal(needs, chunked))

    def legal_layouts(self, task: Task) -> LayoutTable:
        """Return all legal layouts of a task, within the limits; one of those that run the same way.

        Tokens travel to their experts in one chunk, unless another number is fixed: more are tried in the fastest layouts
        that fit with one (`find_fitting`).
        """
        return drop_equivalent(self.every_legal(task))

    def every_legal(self, task: Task) -> LayoutTable:
        """Return all legal layouts of a task, within the limits; see `legal_layouts`."""
        fixed = {"ep_chunks": 1, **task.fixed}
        legal = enumerate_layouts(task.model, task.devices, self.machine.node.devices, fixed, self.limits)
        least = WORTH_SHARDING * self.models.device_bytes
        worth = np.ones(len(legal), bool)
        if "gather" not in task.fixed:
            # Where gathered blocks are small, streaming has nothing to save; without `tp` they are whole, FSDP does better.
            streams = (count_gathered_bytes(task.model, legal) >= least) & (legal.tp > 1)
            worth &= (legal.streamed == 1) | streams
        if "expert_tp" not in task.fixed:
            # Each row travels to all ranks that share its expert: for a small one that saves nothing and takes longer.
            worth &= (legal.expert_tp == 1) | (count_expert_bytes(task.model) >= least)
        return legal.take(worth)

    def _estimate_memory(self, task: Task, layouts: LayoutTable) -> tuple[Floats, Floats]:
        """Return (bytes on the worst rank, probability of fitting) of each layout; NaN and 0 where it cannot fit.

        Small micro-batches and much recompute come first. Where none of the layouts that split the model alike fits with
        those, none does with larger ones and less recompute: these are left out, and the model is not traced for them.
        """
        peak, p_fits = np.full(len(layouts), np.nan), np.zeros(len(layouts))
        possible = bound_memory(task.model, layouts) <= self.models.device_bytes
        alike = ("tp", "cp", "streamed", "context", "ep", "expert_tp")
        splits, split = distinct_rows([getattr(layouts, name) for name in alike])
        effort = -layouts.recompute
        hopeless: list[tuple[Bools, int, int]] = []
        for microbatch in np.unique(layouts.microbatch).tolist():
            for recompute in np.unique(effort).tolist():
                wave = possible & (layouts.microbatch == microbatch) & (effort == recompute)
                worse = np.zeros(len(splits), bool)
                # A layout with a multiple of a micro-batch has a counterpart with that micro-batch, which was tried before.
                for failed, smaller, more_recompute in hopeless:
                    if microbatch % smaller == 0 and recompute >= more_recompute:
                        worse |= failed
                looked_at = np.flatnonzero(wave & ~worse[split])
                found = self.models.memory(task.model, layouts.take(looked_at))
                peak[looked_at], p_fits[looked_at] = found.peak, found.p_fits
                tried, fits = np.zeros((2, len(splits)), bool)
                tried[split[wave]] = True
                fits[split[wave & (p_fits >= self.least_p)]] = True
                hopeless.append((tried & ~fits, microbatch, recompute))
        return peak, p_fits

    def rank_simulated(self, model: TracedModel, layouts: LayoutTable, times: Times) -> RankedLayouts:
        """Sort simulated layouts: fastest first, of equally fast ones that which needs less memory."""
        memory = self.models.memory(model, layouts)
        # The last key of lexsort is the first to sort by.
        order = np.lexsort((memory.peak, times.total))
        return RankedLayouts(layouts, times, memory).take(order)

    def least_memory(self, task: Task, layouts: LayoutTable, peak: Floats) -> LayoutTable:
        """Return the layout that needs least memory. peak: as far as it is known, [layouts]; all NaN where it is not."""
        if np.isnan(peak).all():
            # None came within the bound: only those nearest to it are traced.
            nearest = layouts.take(np.argsort(bound_memory(task.model, layouts), kind="stable")[:_NEAREST])
            return nearest.take([int(np.argmin(self.models.memory(task.model, nearest).peak))])
        return layouts.take([int(np.nanargmin(peak))])

    def memory_breakdown(self, model: TracedModel, layout: LayoutTable) -> dict[str, float]:
        """Return bytes by cause on the pipeline rank of a single layout that needs most, largest first."""
        worst = max(self.models.stage_memory(model, layout), key=lambda causes: sum(causes.values()))
        return dict(sorted(worst.items(), key=lambda item: -item[1]))

    def _explain_nothing_legal(self, task: Task) -> str:
        """Return the message of the rules for the fixed fields with all else as it is by default."""
        free = type(task.run.layout).model_fields
        plain = {name: task.fixed.get(name, free[name].default) for name in CHOSEN}
        run = task.run.model_copy(update={"layout": task.run.layout.model_copy(update=plain)})
        try:
            resolve_layout(task.model.rebind(run), task.devices, self.machine.node.devices)
        except ConfigError as error:
            return str(error)
        return f"no layout of {task.devices} devices is legal within {self.limits}; fix the fields that go beyond"


def pareto_front(*goals: Floats) -> Ints:
    """Return the indices of the Pareto-optimal layouts, sorted by the first objective.

    goals: what each layout needs, [layouts], the less the better. Of layouts with equal needs the first one is returned.
    """
    needs = np.stack(goals, axis=1)
    # In this order no layout is beaten by a later one: the first that is left is always optimal.
    left = np.lexsort(goals[::-1])
    front: list[int] = []
    while len(left):
        front.append(int(left[0]))
        left = left[(needs[left] < needs[left[0]]).any(axis=1)]
    return np.asarray(front, np.int64)


def fastest_of_each_split(layouts: LayoutTable, seconds: Floats) -> Ints:
    """Return the indices of the OF_EACH_SPLIT fastest layouts of each of the SPLITS fastest choices of tp, cp and pp."""
    order = np.argsort(seconds, kind="stable")
    _, first, split = np.unique(number_splits(layouts)[order], return_index=True, return_inverse=True)
    fastest_splits = np.argsort(first)[:SPLITS]
    of_each = [np.flatnonzero(split == number)[:OF_EACH_SPLIT] for number in fastest_splits]
    return np.asarray(order[np.concatenate([np.zeros(0, np.int64), *of_each])])


def number_splits(layouts: LayoutTable) -> Ints:
    """Return a number for each layout that is the same where tp, cp, pp, ep and expert_tp are."""
    return distinct_rows([layouts.tp, layouts.cp, layouts.pp, layouts.ep, layouts.expert_tp])[1]


_MAIN_BYTES = 4
"""Bytes of a main parameter, and of a value of the optimizer's state or of a reduced gradient."""


def bound_memory(model: TracedModel, layouts: LayoutTable) -> Floats:
    """Return bytes below which no rank stays that has a mean share of the model, [layouts].

    Main parameters, optimizer state and gradients as they are sharded; or, in place of gradients, the inputs of all blocks
    of the first pipeline rank for the micro-batches in flight, which every kind of recompute keeps; offloaded, of one block.
    """
    run, config = model.run, model.config
    experts = model.expert_parameters()
    held = (model.parameter_count() - experts) / (layouts.pp * layouts.tp * layouts.shards)
    # Experts, or parts of one, go to each rank of `ep`; whole ones to each rank of `tp` where nobody shards them.
    experts_held = np.where(layouts.ep > 1, layouts.experts_over * layouts.expert_shards, layouts.shards)
    held = held + experts / (layouts.pp * experts_held)
    kept = min(kept_values(run), kept_values(run, matrix=True))
    states = held * _MAIN_BYTES * (1 + kept - layouts.offload_optimizer * find_optimizer(run.optimizer).state_values)
    gradients = held * _MAIN_BYTES
    microbatches = np.ones(len(layouts))
    for number, name in enumerate(SCHEDULES):
        some = np.flatnonzero((layouts.schedule == number) & (layouts.pp > 1))
        if len(some):
            pp, per_rank = layouts.pp[some], layouts.stages_per_rank[some]
            microbatches[some] = in_flight(name, pp, per_rank, layouts.accumulation[some])
    # The mean stage: some rank has at least as many blocks.
    blocks = np.where(layouts.offload_activations, 1, np.maximum(1, config.n_layers // layouts.n_stages))
    rows = layouts.microbatch * config.rows_per_sample
    positions = rows * (model.positions().count // layouts.cp // layouts.tp)
    inputs = (
        blocks * microbatches * positions * config.d_model * PRECISIONS[run.layout.precision].compute_dtype.itemsize
    )
    return np.asarray(states + np.maximum(gradients, inputs))


def count_gathered_bytes(model: TracedModel, layouts: LayoutTable) -> Floats:
    """Return bytes of a block that is gathered whole, [layouts]: what streaming saves at most in weights and gradients.

    Two blocks' parameters, and one's gradients as they are computed and as they are sent; `tp` alone splits them.
    """
    width = model.precision.compute_dtype.itemsize
    block = model.parameter_count() / model.run.model.n_layers / layouts.tp
    return np.asarray(block * (3 * width + _MAIN_BYTES))


def count_expert_bytes(model: TracedModel) -> float:
    """Return bytes of one expert of a block that is gathered whole; 0 without experts.

    `expert_tp` shards an expert where a rank has no other. Counted as `count_gathered_bytes` counts those of a block.
    """
    experts = model.experts()
    if experts is None:
        return 0.0
    expert = model.expert_parameters() / model.run.model.n_layers / experts.count
    return expert * (3 * model.precision.compute_dtype.itemsize + _MAIN_BYTES)
