"""How long an optimizer step takes in each of many layouts, and what that time goes to.

The busiest pipeline rank computes its micro-batches; the others make it wait while the pipeline fills and drains
(`pipeline_time`). Data-parallel ranks gather parameters and add up gradients behind that as far as it goes. Then the
optimizer passes over its part of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from phalanx.hardware.collectives import Constants, all_gather, all_reduce, all_to_all, reduce_scatter, send
from phalanx.planner.time.framework import FrameworkProfile
from phalanx.planner.time.host_time import HostWaits
from phalanx.planner.time.operation_time import Direction, Floats, Ints, PartBreakdown
from phalanx.planner.time.part_time import PartTimes, in_training
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
    OFFLOAD = 12
    """Waiting for activations on their way to host memory and back."""


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
class Busiest:
    """The rank that computes longest: its parts of the model, and its times. Arrays of [layouts]."""

    blocks: Floats
    """Blocks, leading ones apart."""
    leading: Floats
    """Leading blocks of the model."""
    embedding: Floats
    """1 on the rank of the embedding, else 0."""
    head: Floats
    forward: Floats
    """Seconds of one micro-batch."""
    backward: Floats

    def sum_parts(self, block: Floats, leading: Floats, embedding: Floats, head: Floats) -> Floats:
        """Return the sum over the parts of the rank, [layouts]. block and the others: of one such part, [layouts]."""
        return np.asarray(self.blocks * block + self.leading * leading + self.embedding * embedding + self.head * head)

    def of_parts(self, steps: Steps, column: Floats) -> Floats:
        """Return the sum of `column`, a quantity of each part, over the parts of the rank, [layouts]."""
        places = (steps.block, steps.leading, steps.embedding, steps.head)
        return self.sum_parts(*(column[place] for place in places))


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
    layouts, count, forecasts = steps.layouts, steps.passes, steps.forecast_passes
    constants = in_training(constants, profile)
    busiest = busiest_rank(steps, times)
    seconds = np.zeros((len(StepBreakdown), len(steps)))
    components, of_forecast = times.seconds.sum(axis=1), times.seconds[:, Direction.FORWARD]
    for component in PartBreakdown:
        if np.any(components[:, component]):
            seconds[component] = count * busiest.of_parts(steps, components[:, component])
            seconds[component] += forecasts * busiest.of_parts(steps, of_forecast[:, component])
    waits = HostWaits.of(steps, times, profile)
    if waits is not None:
        of_parts = (waits.block, waits.leading, waits.embedding, waits.head)
        seconds[StepBreakdown.HOST] += count * busiest.sum_parts(*(each.sum(axis=1) for each in of_parts))
        seconds[StepBreakdown.HOST] += forecasts * busiest.sum_parts(*(each[:, Direction.FORWARD] for each in of_parts))
    pipeline, piped = pipelines(steps, times, constants, profile), layouts.pp > 1
    # What a pipeline takes beyond the passes of its busiest rank is waiting.
    ramp = pipeline.computing - count * (busiest.forward + busiest.backward)
    seconds[StepBreakdown.BUBBLE] = np.where(piped, ramp * profile.pipeline_ramp, 0.0)
    seconds[StepBreakdown.TRANSFER] = pipeline.whole - pipeline.computing
    data = (data_parallel or DataParallel).of(steps, times, waits, profile, constants, framework)
    seconds[StepBreakdown.DATA] = data.exposed(steps, busiest)
    trained, mine = most_trained(steps)
    renewed = steps.sum_quantised().max(axis=1) / layouts.shards
    seconds[StepBreakdown.OPTIMIZER] = (
        mine * framework.optimizer_bytes / profile.optimizer_b_s
        + renewed * framework.renewal_bytes / profile.memory_b_s
    )
    # Gradients of further micro-batches are added to what is there, unless they are reduced first.
    reduced = layouts.reduces_each & data.reduces_each_microbatch
    added = np.where(reduced, mine, trained) * framework.sum_bytes
    by_themselves = np.where(layouts.sums_in_products, summed_in_products(steps), 0.0)
    added -= by_themselves * (framework.sum_bytes - framework.product_sum_bytes)
    # Those of the first are where nobody reduces them at once brought into the sums' format, where that is another.
    alone = (steps.shards.size == 1) & (steps.replicas.size == 1)
    waits_for_more = ~layouts.reduces_each & (count > 1)
    begun = np.where((alone | waits_for_more) & framework.low_precision_copy, trained, 0.0) * (
        framework.gather_bytes + framework.reduce_bytes
    )
    seconds[StepBreakdown.MEMORY] += ((count - 1) * added + begun) / profile.memory_b_s
    # The norm of the gradients reads each of them once, in 32 bits.
    between = profile.step_s * np.where(layouts.world_size == 1, framework.single_rank_overhead, 1.0)
    seconds[StepBreakdown.REST] = between + 4 * mine / profile.memory_b_s
    return StepTimes(seconds.T)


def most_trained(steps: Steps) -> tuple[Floats, Floats]:
    """Return the most elements that a rank trains, before and after data parallelism shards them, [layouts]."""
    layouts, trained = steps.layouts, steps.sum_trained()
    # Experts under expert parallelism have shards of their own. Leading blocks have none.
    experts = steps.ranks.blocks * steps.trained.experts[:, None]
    mine = (trained - experts) / layouts.shards[:, None] + experts / layouts.expert_shards[:, None]
    return trained.max(axis=1), mine.max(axis=1)


def summed_in_products(steps: Steps) -> Floats:
    """Return the most elements of a rank whose gradients our products add to sums by themselves, [layouts]."""
    own, ranks = steps.trained, steps.ranks
    of_blocks = ranks.blocks * (own.block - own.experts)[:, None] + ranks.leading * own.leading[:, None]
    return np.asarray((of_blocks - steps.sum_quantised()).max(axis=1).clip(min=0.0))


def busiest_rank(steps: Steps, times: PartTimes) -> Busiest:
    """Return the rank of each layout that computes longest."""
    both = times.seconds.sum(axis=2)
    longest = steps.sum_parts(both.sum(axis=1)).argmax(axis=1)[:, None]

    def of_longest(column: Floats) -> Floats:
        """Return a column of all ranks, [layouts, ranks], for the one that computes longest, [layouts]."""
        return np.take_along_axis(column, longest, axis=1)[:, 0]

    ranks = steps.ranks
    return Busiest(
        blocks=of_longest(ranks.blocks),
        leading=of_longest(ranks.leading),
        embedding=of_longest(ranks.embedding),
        head=of_longest(ranks.head),
        forward=of_longest(steps.sum_parts(both[:, Direction.FORWARD])),
        backward=of_longest(steps.sum_parts(both[:, Direction.BACKWARD])),
    )


@dataclass(frozen=True)
class _OfEach:
    """Seconds of one kind of exchange for each part. Arrays of [layouts]."""

    unit: Floats
    """Seconds for the blocks that are gathered together."""
    leading: Floats
    """Seconds for as many leading blocks."""
    embedding: Floats
    head: Floats


@dataclass(frozen=True)
class _BlockExchanges:
    """What data-parallel ranks exchange for blocks of one kind. Arrays of [layouts]; seconds of those gathered together."""

    units: Floats
    """How often so many blocks are on the busiest rank."""
    passes: tuple[Floats, Floats]
    """Their forward and backward pass, behind which exchanges hide."""
    gather: Floats
    again: Floats
    """Gathering them once more, for their backward pass."""
    scatter: Floats
    summed: Floats | None
    """Replicas adding up gradients; None where there are no replicas."""


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
    leading: tuple[Floats, Floats]
    """Those of a leading block."""
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
        seconds = times.seconds.sum(axis=2)
        block, leading = seconds[steps.block], seconds[steps.leading]
        if waits is not None:
            block, leading = block + waits.block, leading + waits.leading
        block_passes, leading_passes = (
            (both[:, Direction.FORWARD], both[:, Direction.BACKWARD]) for both in (block, leading)
        )
        copied = (steps.shards.nodes == 1) & (steps.shards.size > 1) & framework.copy_engines
        return cls(profile, framework, constants, block_passes, leading_passes, copied)

    def exposed(self, steps: Steps, busiest: Busiest) -> Floats:
        """Return the seconds of exchanges that nothing hides, per step, [layouts]."""
        several = (steps.shards.size > 1) | (steps.replicas.size > 1) | (steps.expert_shards.size > 1)
        if not np.any(several):
            return np.zeros(len(steps))
        layouts, count = steps.layouts, steps.passes
        exchanges = self._exchanges(steps)
        gather, scatter = exchanges.gather, exchanges.scatter
        each = layouts.gathers_each
        # What a pipeline gathers for a backward pass stays for the next forward pass.
        gathers = np.where(each & (layouts.pp == 1), count + steps.forecast_passes, layouts.zero > 0)
        scatters = np.where(layouts.reduces_each, count, 1)
        forward, backward = (steps.unit * passed for passed in self.block)
        # Nothing runs yet behind which the first gathers could hide, and nothing is left behind the last reductions.
        seconds = gathers * (
            busiest.embedding * gather.embedding
            + np.where(busiest.leading > 0, gather.leading, gather.unit)
            + busiest.head * self._shown(gather.head, forward)
        )
        seconds += scatters * (
            busiest.embedding * scatter.embedding + busiest.head * self._shown(scatter.head, backward)
        )
        if (summed := exchanges.summed) is not None:
            seconds += busiest.embedding * summed.embedding + busiest.head * self._shown(summed.head, backward)
        for blocks in self._of_blocks(steps, busiest, exchanges):
            seconds += self._exposed_of_blocks(blocks, gathers, scatters, count)
        if (ring := exchanges.ring) is not None:
            seconds += self._streaming(steps, busiest, ring)
        if np.any(exchanges.experts):
            # They are asked for when their rows have arrived, for whose number the host has waited: nothing was issued
            # before behind which they could come.
            seconds += gathers * busiest.blocks * exchanges.experts
        return seconds + self._straggling(steps, busiest)

    def _of_blocks(self, steps: Steps, busiest: Busiest, exchanges: _Exchanges) -> Iterator[_BlockExchanges]:
        """Yield what is exchanged for the blocks of each kind."""
        unit, summed = steps.unit, exchanges.summed
        again = steps.layouts.gathers_each & steps.layouts.reshard_after_forward
        gather, scatter = exchanges.gather, exchanges.scatter
        yield _BlockExchanges(
            busiest.blocks / unit,
            (unit * self.block[0], unit * self.block[1]),
            gather.unit,
            np.where(again, gather.unit + unit * exchanges.experts, 0.0),
            scatter.unit,
            None if summed is None else summed.unit,
        )
        if np.any(busiest.leading):
            yield _BlockExchanges(
                busiest.leading / unit,
                (unit * self.leading[0], unit * self.leading[1]),
                gather.leading,
                np.where(again, gather.leading, 0.0),
                scatter.leading,
                None if summed is None else summed.leading,
            )

    def _exposed_of_blocks(self, blocks: _BlockExchanges, gathers: Floats, scatters: Floats, count: Ints) -> Floats:
        """Return the seconds of the exchanges of blocks of one kind that their passes do not hide, per step, [layouts].

        gathers, scatters: exchanges of each kind in a step, [layouts]. count: backward passes.
        """
        forward, backward = blocks.passes
        behind = blocks.scatter + blocks.again
        shown = self._shown(behind, backward)
        seconds = gathers * self._shown(blocks.gather, forward) + scatters * shown
        seconds += (count - scatters) * self._shown(blocks.again, backward)
        if blocks.summed is not None:
            seconds += self._shown(behind + blocks.summed, backward) - shown
        return np.asarray(blocks.units * seconds)

    def _exchanges(self, steps: Steps) -> _Exchanges:
        """Return the seconds of what data-parallel ranks exchange of each part, [layouts]."""
        own, streamed = steps.trained, steps.streams.parameters
        unit = steps.unit * (steps.block_parameters - streamed - steps.expert_parameters)
        leading = steps.unit * steps.leading_parameters if np.any(steps.leading_layers) else unit
        held = (unit, leading, steps.embedding_parameters, steps.head_parameters)
        # Nobody exchanges gradients of what is frozen.
        trained_unit = steps.unit * (own.block - streamed - own.experts)
        trained_leading = steps.unit * own.leading if np.any(steps.leading_layers) else trained_unit
        trained = (trained_unit, trained_leading, own.embedding, own.head)

        def of_each(seconds: Callable[[Steps, Floats], Floats], elements: Sequence[Floats]) -> _OfEach:
            return _OfEach(*(np.where(some > 0, seconds(steps, some), 0.0) for some in elements))

        ring = self._ring(steps) if np.any(streamed) else None
        gather, scatter = of_each(self.gather, held), of_each(self.scatter, trained)
        if np.any(steps.quantised_parameters) and self.framework.quantised_bytes < self.framework.gather_bytes:
            # As if so many elements less were gathered.
            saved = steps.unit * (1 - self.framework.quantised_bytes / self.framework.gather_bytes)
            narrow = self.gather(steps, unit - saved * steps.quantised_parameters)
            first_narrow = self.gather(steps, leading - saved * steps.leading_quantised)
            gather = replace(gather, unit=narrow, leading=first_narrow)
        summed = of_each(self.sum_replicas, trained) if np.any(steps.replicas.size > 1) else None
        experts = np.zeros(len(steps))
        if np.any(steps.expert_parameters):
            size = steps.unit * own.experts * self.framework.reduce_bytes
            experts = all_gather(
                steps.expert_parameters * self.framework.gather_bytes, steps.expert_shards, self.constants
            )
            reduced = reduce_scatter(size, steps.expert_shards, self.constants)
            scatter = replace(scatter, unit=scatter.unit + reduced)
            added = all_reduce(size / steps.layouts.expert_shards, steps.expert_replicas, self.constants)
            summed = summed or _OfEach(*np.zeros((4, len(steps))))
            summed = replace(summed, unit=summed.unit + added)
        return _Exchanges(gather, scatter, summed, ring, experts)

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
        of_forecast = ring.own + self._shown(ring.weights, forward)
        passes = of_forecast + ring.own * (1 + streams.again)
        passes += self._shown((1 + streams.again) * ring.weights + ring.gradients, backward)
        shown = busiest.blocks * (steps.passes * passes + steps.forecast_passes * of_forecast + ring.summed)
        return np.where(streams.parameters > 0, shown, 0.0)

    def _message(self, steps: Steps, size: Floats) -> Floats:
        """Return the seconds in which each rank sends `size` bytes to the next one."""
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
        computing = steps.passes * (busiest.forward + busiest.backward) + steps.forecast_passes * busiest.forward
        return np.where(waits, computing * share, 0.0)

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
