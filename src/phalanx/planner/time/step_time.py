"""How long an optimizer step takes in each of many layouts, and what that time goes to.

The busiest pipeline rank computes its micro-batches; the others make it wait while the pipeline fills and drains
(`pipeline_time`). Data-parallel ranks gather parameters and add up gradients behind that as far as it goes. Then the
optimizer passes over its part of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from phalanx.hardware.collectives import Constants, all_gather, all_reduce, all_to_all, reduce_scatter, send
from phalanx.planner.time.framework import FrameworkProfile
from phalanx.planner.time.host_time import HostWaits
from phalanx.planner.time.operation_time import Direction, Floats, PartBreakdown
from phalanx.planner.time.part_time import PartTimes, at, in_training
from phalanx.planner.time.pipeline_time import PipelineModel, simulate_pipelines
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps


class StepBreakdown(IntEnum):
    """Components of an optimizer step's time; the first are those of `PartBreakdown`, with the same numbers."""

    MATMUL = 0
    ATTENTION = 1
    MEMORY = 2
    TP = 3
    """Waiting for tensor-parallel ranks."""
    CP = 4
    """Waiting for context-parallel ranks."""
    HOST = 5
    """The device waits for the host to issue operations."""
    EP = 6
    """Waiting for rows on their way to experts and back."""
    BUBBLE = 7
    """The pipeline fills and drains."""
    TRANSFER = 8
    """Waiting for activations from other pipeline ranks."""
    DATA = 9
    """Waiting for data-parallel ranks, and what computing loses while they communicate."""
    OPTIMIZER = 10
    REST = 11
    """Norm of the gradients, data, logging."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on the busiest rank."""

    seconds: Floats
    """[layouts, components]"""

    @property
    def total(self) -> Floats:
        """Seconds of all components together, [layouts]."""
        return np.asarray(self.seconds.sum(axis=1))

    def of(self, component: StepBreakdown) -> Floats:
        """Return the seconds of one component, [layouts]."""
        return self.seconds[:, component]


@dataclass(frozen=True)
class RankParts:
    """Parts of the model that a pipeline rank computes. Arrays of [layouts]."""

    blocks: Floats
    embedding: Floats
    """1 on the rank of the embedding, else 0."""
    head: Floats

    def of_parts(self, steps: Steps, column: Floats) -> Floats:
        """Return the sum of `column`, a quantity of each part, over the parts of the rank, [layouts]."""
        return np.asarray(
            self.blocks * column[steps.block] + self.embedding * steps.of_start(column) + self.head * column[steps.head]
        )


@dataclass(frozen=True)
class Busiest(RankParts):
    """The rank that computes longest, and its times. Arrays of [layouts]."""

    forward: Floats
    """Seconds of one micro-batch."""
    backward: Floats


def time_steps(
    steps: Steps,
    times: PartTimes,
    profile: Profile,
    constants: Constants,
    framework: FrameworkProfile,
    *,
    pipelines: PipelineModel = simulate_pipelines,
    data_parallel: type[DataParallel] | None = None,
) -> StepTimes:
    """Return the seconds of every step, with the times of its parts.

    constants: of the machine's collectives, alone. pipelines: how the time of pipelines is found; `bound_pipelines` gives
    times that no step stays below. data_parallel: how data-parallel ranks exchange, as our training does it where None.
    """
    layouts, count = steps.layouts, steps.layouts.accumulation
    constants = in_training(constants, profile)
    busiest = busiest_rank(steps, times)
    seconds = np.zeros((len(StepBreakdown), len(steps)))
    components = times.seconds.sum(axis=1)
    for component in PartBreakdown:
        if np.any(components[:, component]):
            seconds[component] = count * busiest.of_parts(steps, components[:, component])
    waits = HostWaits.of(steps, times, profile)
    if waits is not None:
        seconds[StepBreakdown.HOST] += count * (
            busiest.blocks * waits.block.sum(axis=1)
            + busiest.embedding * waits.embedding.sum(axis=1)
            + busiest.head * waits.head.sum(axis=1)
        )
    pipeline, piped = pipelines(steps, times, constants, profile), layouts.pp > 1
    ramp = pipeline.computing - count * (busiest.forward + busiest.backward)
    seconds[StepBreakdown.BUBBLE] = np.where(piped, ramp * profile.pipeline_ramp, 0.0)
    seconds[StepBreakdown.TRANSFER] = pipeline.whole - pipeline.computing
    data = (data_parallel or DataParallel).of(steps, times, waits, profile, constants, framework)
    seconds[StepBreakdown.DATA] = data.exposed(steps, busiest)
    held = parameters_held(steps)
    # Experts under expert parallelism have shards of their own.
    experts = steps.expert_parameters * steps.layers.most
    mine = (held - experts) / layouts.shards + experts / layouts.expert_shards
    seconds[StepBreakdown.OPTIMIZER] = mine * framework.optimizer_bytes / profile.optimizer_b_s
    # Gradients of further micro-batches are added to what is there, unless they are reduced first.
    reduced = layouts.reduces_each & data.reduces_each_microbatch
    added = np.where(reduced, mine, held) * (framework.gather_bytes + 2 * framework.reduce_bytes)
    # Those of the first are where nobody reduces them at once brought into the sums' format, where that is another.
    alone = (steps.shards.size == 1) & (steps.replicas.size == 1)
    waits_for_more = ~layouts.reduces_each & (count > 1)
    begun = np.where((alone | waits_for_more) & framework.low_precision_copy, held, 0.0) * (
        framework.gather_bytes + framework.reduce_bytes
    )
    seconds[StepBreakdown.MEMORY] += ((count - 1) * added + begun) / profile.memory_b_s
    between = profile.step_s * np.where(layouts.world_size == 1, framework.single_rank_overhead, 1.0)
    seconds[StepBreakdown.REST] = between + 4 * mine / profile.memory_b_s
    return StepTimes(seconds.T)


def parameters_held(steps: Steps) -> Floats:
    """Return the elements on the rank that holds most, before data parallelism shards them, [layouts]."""
    start = steps.embedding_parameters + steps.leading_parameters
    first = steps.layers.first * steps.block_parameters + start + steps.joined * steps.head_parameters
    last = steps.layers.last * steps.block_parameters + np.where(steps.joined > 0, 0.0, steps.head_parameters)
    return np.maximum(np.maximum(first, last), steps.layers.other * steps.block_parameters)


def busiest_rank(steps: Steps, times: PartTimes) -> Busiest:
    """Return the rank of each layout that computes longest."""
    both = times.seconds.sum(axis=2)
    whole, layers = both.sum(axis=1), steps.layers
    apart = 1.0 - steps.joined
    one, end, start = whole[steps.block], whole[steps.head], steps.of_start(whole)
    first = layers.first * one + start + steps.joined * end
    last = layers.last * one + apart * end
    other = layers.other * one
    is_first = first >= np.maximum(last, other)
    is_last = ~is_first & (last >= other)
    parts = RankParts(
        blocks=np.where(is_first, layers.first, np.where(is_last, layers.last, layers.other)),
        embedding=is_first.astype(np.float64),
        head=np.where(is_first, steps.joined, apart * is_last),
    )
    forward, backward = (parts.of_parts(steps, both[:, direction]) for direction in Direction)
    return Busiest(parts.blocks, parts.embedding, parts.head, forward, backward)


@dataclass(frozen=True)
class _OfEach:
    """Seconds of one kind of exchange for each part. Arrays of [layouts]."""

    unit: Floats
    """Seconds for the blocks that are gathered together."""
    embedding: Floats
    head: Floats


@dataclass(frozen=True)
class _Ring:
    """Seconds of what goes around the ring for a streamed block. Arrays of [layouts]."""

    weights: Floats
    """All chunks, once around."""
    gradients: Floats
    """To where they belong."""
    own: Floats
    """What must have come before the first product."""
    summed: Floats
    """Replicas adding up what stays."""


@dataclass(frozen=True)
class _Exchanges:
    """Seconds of everything that data-parallel ranks exchange, alone; None where no layout does."""

    gather: _OfEach
    scatter: _OfEach
    summed: _OfEach | None
    ring: _Ring | None
    experts: Floats
    """Gathering the experts of a block, which `gather` does not count."""


@dataclass(frozen=True)
class DataParallel:
    """What data-parallel ranks exchange for each part, and what of it shows. Arrays of [layouts], seconds."""

    profile: Profile
    framework: FrameworkProfile
    constants: Constants
    block: tuple[Floats, Floats]
    """A block's forward and backward pass, behind which exchanges hide."""
    copied: npt.NDArray[np.bool_]
    """Where copy engines exchange."""
    reduces_each_microbatch: ClassVar[bool] = True
    """Whether gradients are reduced after every micro-batch where the layout says so."""

    @classmethod
    def of(
        cls,
        steps: Steps,
        times: PartTimes,
        waits: HostWaits | None,
        profile: Profile,
        constants: Constants,
        framework: FrameworkProfile,
    ) -> Self:
        """Return the exchanges of these steps, with what they may overlap."""
        both = times.seconds.sum(axis=2)[steps.block]
        if waits is not None:
            both = both + waits.block
        copied = (steps.shards.nodes == 1) & (steps.shards.size > 1) & framework.copy_engines
        return cls(profile, framework, constants, (both[:, Direction.FORWARD], both[:, Direction.BACKWARD]), copied)

    def exposed(self, steps: Steps, busiest: Busiest) -> Floats:
        """Return the seconds of exchanges that nothing hides, per step, [layouts]."""
        several = (steps.shards.size > 1) | (steps.replicas.size > 1) | (steps.expert_shards.size > 1)
        if not np.any(several):
            return np.zeros(len(steps))
        layouts, count = steps.layouts, steps.layouts.accumulation
        forward, backward = (steps.unit * each for each in self.block)
        units = busiest.blocks / steps.unit
        exchanges = self._exchanges(steps)
        gather, scatter = exchanges.gather, exchanges.scatter
        each = layouts.gathers_each
        again = np.where(each & layouts.reshard_after_forward, gather.unit + steps.unit * exchanges.experts, 0.0)
        # What a pipeline gathers for a backward pass stays for the next forward pass.
        gathers = np.where(each & (layouts.pp == 1), count, layouts.zero > 0)
        scatters = np.where(layouts.reduces_each, count, 1)
        # Nothing runs yet behind which the first gathers could hide, and nothing is left behind the last reductions.
        seconds = gathers * (
            units * self._shown(gather.unit, forward)
            + busiest.embedding * gather.embedding
            + gather.unit
            + busiest.head * self._shown(gather.head, forward)
        )
        behind = scatter.unit + again
        shown = self._shown(behind, backward)
        seconds += scatters * (
            units * shown + busiest.embedding * scatter.embedding + busiest.head * self._shown(scatter.head, backward)
        )
        seconds += (count - scatters) * units * self._shown(again, backward)
        if (summed := exchanges.summed) is not None:
            seconds += (
                busiest.embedding * summed.embedding
                + units * (self._shown(behind + summed.unit, backward) - shown)
                + busiest.head * self._shown(summed.head, backward)
            )
        if (ring := exchanges.ring) is not None:
            seconds += self._streaming(steps, busiest, ring)
        if np.any(exchanges.experts):
            # They are asked for when their rows have arrived, for whose number the host has waited: nothing was issued
            # before behind which they could come.
            seconds += gathers * busiest.blocks * exchanges.experts
        return seconds + self._straggling(steps, busiest)

    def _exchanges(self, steps: Steps) -> _Exchanges:
        """Return the seconds of exchanges, computed once for all layouts with the same `Steps.alike`."""
        first = np.zeros(int(steps.alike.max()) + 1, np.int64)
        first[steps.alike] = np.arange(len(steps))
        few = steps.take(first)
        one = replace(self, copied=self.copied[first])
        unit = few.unit * (few.block_parameters - few.streams.parameters - few.expert_parameters)
        parameters = (unit, few.embedding_parameters, few.head_parameters)

        def of_each(seconds: Callable[[Steps, Floats], Floats]) -> _OfEach:
            return _OfEach(*(seconds(few, held)[steps.alike] for held in parameters))

        ring = one._ring(few) if np.any(few.streams.parameters) else None
        gather, scatter = of_each(one.gather), of_each(one.scatter)
        summed = of_each(one.sum_replicas) if np.any(few.replicas.size > 1) else None
        experts = np.zeros(len(steps))
        if np.any(few.expert_parameters):
            each = few.unit * few.expert_parameters
            size = each * self.framework.reduce_bytes
            experts = all_gather(few.expert_parameters * self.framework.gather_bytes, few.expert_shards, self.constants)
            experts = experts[steps.alike]
            reduced = reduce_scatter(size, few.expert_shards, self.constants)[steps.alike]
            scatter = replace(scatter, unit=scatter.unit + reduced)
            added = all_reduce(size / few.layouts.expert_shards, few.expert_replicas, self.constants)[steps.alike]
            summed = summed or _OfEach(*np.zeros((3, len(steps))))
            summed = replace(summed, unit=summed.unit + added)
        return _Exchanges(gather, scatter, summed, None if ring is None else at(ring, steps.alike), experts)

    def _ring(self, steps: Steps) -> _Ring:
        streams, width = steps.streams, self.framework.gather_bytes
        chunk = width * streams.sent / np.maximum(streams.messages, 1)
        return _Ring(
            weights=streams.messages * self._message(steps, chunk),
            gradients=self._exchange(
                steps, all_to_all(width * streams.parameters, steps.shards, self.constants), width * streams.parameters
            ),
            # A chunk that several ranks hold together is there before its products begin.
            own=np.where(streams.own > 0, self._message(steps, width * streams.own), 0.0),
            summed=all_reduce(self.framework.reduce_bytes * streams.piece, steps.replicas, self.constants),
        )

    def _streaming(self, steps: Steps, busiest: Busiest, ring: _Ring) -> Floats:
        """Return the seconds of streamed chunks that the products do not hide, per step, [layouts].

        Weights go around the ring in the forward pass; in the backward pass weights, those that recompute needs once more,
        and gradients. The sum over replicas comes last, and nothing hides it.
        """
        streams = steps.streams
        forward, backward = (streams.busy * each for each in self.block)
        passes = ring.own * (2 + streams.again) + self._shown(ring.weights, forward)
        passes += self._shown((1 + streams.again) * ring.weights + ring.gradients, backward)
        shown = busiest.blocks * (steps.layouts.accumulation * passes + ring.summed)
        return np.where(streams.parameters > 0, shown, 0.0)

    def _message(self, steps: Steps, size: Floats) -> Floats:
        """Each rank sends `size` bytes to the next one."""
        sent = send(size, steps.shards, self.constants)
        if not np.any(self.copied):
            return sent
        rate = steps.shards.ring_b_s * self.profile.copy_share
        return np.where(self.copied, self.constants.launch_s + size / rate, sent)

    def _straggling(self, steps: Steps, busiest: Busiest) -> Floats:
        """Return the seconds lost to the slowest node: where every block waits for its parameters, all go at its pace."""
        layouts = steps.layouts
        waits = (layouts.gathers_each | (layouts.streamed > 1)) & (steps.shards.nodes > 1)
        share = self.profile.straggling * np.log2(np.maximum(steps.shards.nodes, 1))
        return np.where(waits, layouts.accumulation * (busiest.forward + busiest.backward) * share, 0.0)

    def _shown(self, exchange: Floats, computing: Floats) -> Floats:
        hidden = np.minimum(exchange, self.profile.hidden * computing)
        slowdown: Any = self.profile.slowdown
        if np.any(self.copied):
            slowdown = np.where(self.copied, self.profile.copy_slowdown, slowdown)
        return np.asarray(exchange - hidden + slowdown * hidden)

    def gather(self, steps: Steps, parameters: Floats) -> Floats:
        """Return the seconds of gathering so many parameters, [layouts], when nothing hides them."""
        size = parameters * self.framework.gather_bytes
        return self._exchange(steps, all_gather(size, steps.shards, self.constants), size)

    def scatter(self, steps: Steps, parameters: Floats) -> Floats:
        """Return the seconds of reducing the gradients of so many parameters and scattering the sums, [layouts]."""
        size = parameters * self.framework.reduce_bytes
        # Copies carry gradients as they were computed.
        return self._exchange(
            steps, reduce_scatter(size, steps.shards, self.constants), parameters * self.framework.gather_bytes
        )

    def _exchange(self, steps: Steps, collective: Floats, copied_bytes: Floats) -> Floats:
        if not np.any(self.copied):
            return collective
        shards = steps.shards
        rate = shards.ring_b_s * self.profile.copy_share
        copies = self.constants.launch_s + copied_bytes * (shards.size - 1) / shards.size / rate
        return np.where(self.copied, copies, collective)

    def sum_replicas(self, steps: Steps, parameters: Floats) -> Floats:
        """Return the seconds of adding up, over replicas, the shards of the gradients of so many parameters, [layouts]."""
        size = parameters * self.framework.reduce_bytes / steps.layouts.shards
        return all_reduce(size, steps.replicas, self.constants)
