"""How long an optimizer step takes in each of many layouts, by cause, in closed form.

The busiest pipeline rank computes its micro-batches; the others make it wait while the pipeline fills and drains
(`bubble`). Data-parallel ranks gather parameters and add up gradients behind that as far as it goes. Then the optimizer
passes over its part of the parameters. `step_exact` simulates the pipeline instead, for a few layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from phalanx.cluster.collectives import Constants, all_gather, all_reduce, all_to_all, reduce_scatter, send
from phalanx.cost.bubble import MeanStage, makespan
from phalanx.cost.candidates import SCHEDULES
from phalanx.cost.operation_time import Cause, Floats, Way
from phalanx.cost.part_time import PartTimes, at, in_training
from phalanx.cost.profile import Profile
from phalanx.cost.software import Software
from phalanx.cost.steps import Steps


class StepCause(IntEnum):
    """What a step's time goes to; the first ones are those of parts."""

    MATMUL = 0
    ATTENTION = 1
    MEMORY = 2
    TP = 3
    """Waiting for tensor-parallel ranks."""
    CP = 4
    """Waiting for context-parallel ranks."""
    HOST = 5
    """The device waits for the host to issue operations."""
    BUBBLE = 6
    """The pipeline fills and drains."""
    TRANSFER = 7
    """Waiting for activations from other pipeline ranks."""
    DATA = 8
    """Waiting for data-parallel ranks, and what computing loses while they communicate."""
    OPTIMIZER = 9
    REST = 10
    """Norm of the gradients, data, logging."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on the busiest rank."""

    seconds: Floats
    """[layouts, causes]"""

    @property
    def total(self) -> Floats:
        """All causes together, [layouts]."""
        return np.asarray(self.seconds.sum(axis=1))

    def of(self, cause: StepCause) -> Floats:
        """Of one cause, [layouts]."""
        return self.seconds[:, cause]


@dataclass(frozen=True)
class Busiest:
    """What the rank that computes longest holds, and its times. Arrays of [layouts]."""

    blocks: Floats
    embedding: Floats
    """1 where it holds the embedding, else 0."""
    head: Floats
    forward: Floats
    """Seconds of one micro-batch."""
    backward: Floats
    others: Floats
    """What the mean of the other ranks takes, over what it takes."""


def closed_form(
    steps: Steps, times: PartTimes, profile: Profile, constants: Constants, software: Software
) -> StepTimes:
    """Seconds of every step, with the times of its parts. constants: of the machine's collectives, alone."""
    layouts, count = steps.layouts, steps.layouts.accumulation
    constants = in_training(constants, profile)
    busiest = busiest_rank(steps, times)
    seconds = np.zeros((len(steps), len(StepCause)))
    causes = times.seconds.sum(axis=1)
    for cause in Cause:
        each = causes[:, cause]
        seconds[:, cause] = count * (
            busiest.blocks * each[steps.block]
            + busiest.embedding * each[steps.embedding]
            + busiest.head * each[steps.head]
        )
    weight = (
        busiest.blocks * times.weight[steps.block]
        + busiest.embedding * times.weight[steps.embedding]
        + busiest.head * times.weight[steps.head]
    )
    bubble, transfer = _pipeline(steps, busiest, weight, constants)
    seconds[:, StepCause.BUBBLE], seconds[:, StepCause.TRANSFER] = bubble * profile.pipeline_ramp, transfer
    data = DataParallel.of(steps, times, profile, constants, software)
    seconds[:, StepCause.DATA] = data.exposed(steps, busiest)
    held = parameters_held(steps)
    mine = held / layouts.shards
    seconds[:, StepCause.OPTIMIZER] = mine * software.optimizer_bytes / profile.optimizer_b_s
    # Gradients of further micro-batches are added to what is there, unless they are reduced first.
    added = np.where((layouts.zero < 2) | ~np.bool_(software.overlap), held, mine) * (2 + 2 * software.reduce_bytes)
    seconds[:, StepCause.MEMORY] += (count - 1) * added / profile.memory_b_s
    seconds[:, StepCause.REST] = profile.step_s + 4 * mine / profile.memory_b_s
    return StepTimes(seconds)


def parameters_held(steps: Steps) -> Floats:
    """Elements on the rank that holds most, before data parallelism shares them out, [layouts]."""
    first = (
        steps.layers.first * steps.block_parameters + steps.embedding_parameters + steps.joined * steps.head_parameters
    )
    last = steps.layers.last * steps.block_parameters + np.where(steps.joined > 0, 0.0, steps.head_parameters)
    return np.maximum(np.maximum(first, last), steps.layers.other * steps.block_parameters)


def busiest_rank(steps: Steps, times: PartTimes) -> Busiest:
    """The rank that computes longest, of each layout."""
    both = times.seconds.sum(axis=2)
    block, embedding, head = both[steps.block], both[steps.embedding], both[steps.head]
    apart = 1.0 - steps.joined
    one, end, start = block.sum(axis=1), head.sum(axis=1), embedding.sum(axis=1)
    ends = np.stack(
        [
            steps.layers.first * one + start + steps.joined * end,
            steps.layers.last * one + apart * end,
            steps.layers.other * one,
        ]
    )
    which = np.argmax(ends, axis=0)
    blocks = np.choose(which, [steps.layers.first, steps.layers.last, steps.layers.other])
    with_embedding = (which == 0).astype(np.float64)
    with_head = np.where(which == 0, steps.joined, np.where(which == 1, apart, 0.0))
    forward, backward = (
        blocks * block[:, way] + with_embedding * embedding[:, way] + with_head * head[:, way] for way in Way
    )
    pp = steps.layouts.pp
    everything = steps.layers.mean * pp * one + start + end
    mine = forward + backward
    others = np.where(pp > 1, (everything - mine) / (np.maximum(pp - 1, 1) * mine), 1.0)
    return Busiest(blocks, with_embedding, with_head, forward, backward, others)


def _pipeline(steps: Steps, busiest: Busiest, weight: Floats, constants: Constants) -> tuple[Floats, Floats]:
    """(bubble, waiting for transfers) of each layout, seconds."""
    layouts = steps.layouts
    bubble, transfer = np.zeros(len(steps)), np.zeros(len(steps))
    for number, schedule in enumerate(SCHEDULES):
        some = np.flatnonzero((layouts.schedule == number) & (layouts.pp > 1))
        if not len(some):
            continue
        pp, per_rank, count = layouts.pp[some], layouts.stages_per_rank[some], layouts.accumulation[some]
        sent = send(steps.hidden_bytes[some], at(steps.pipeline, some), constants)
        forward, backward = busiest.forward[some] / per_rank, busiest.backward[some] / per_rank
        stage = MeanStage(forward, backward, weight[some] / per_rank, 0.0, busiest.others[some])
        alone = makespan(schedule, pp, per_rank, count, stage)
        bubble[some] = alone - count * (busiest.forward[some] + busiest.backward[some])
        waiting = MeanStage(0.0, 0.0, 0.0, sent, 1.0)
        transfer[some] = makespan(schedule, pp, per_rank, count, waiting)
    return bubble, transfer


@dataclass(frozen=True)
class DataParallel:
    """What data-parallel ranks exchange for each part, and what of it shows. Arrays of [layouts], seconds."""

    profile: Profile
    software: Software
    constants: Constants
    block: tuple[Floats, Floats]
    """A block's forward and backward pass, behind which exchanges hide."""
    copied: npt.NDArray[np.bool_]
    """Where copy engines exchange."""

    @classmethod
    def of(
        cls, steps: Steps, times: PartTimes, profile: Profile, constants: Constants, software: Software
    ) -> DataParallel:
        """For these steps."""
        both = times.seconds.sum(axis=2)[steps.block]
        copied = (steps.shards.nodes == 1) & (steps.shards.size > 1) & software.copy_engines
        return cls(profile, software, constants, (both[:, Way.FORWARD], both[:, Way.BACKWARD]), copied)

    def exposed(self, steps: Steps, busiest: Busiest) -> Floats:
        """Seconds a step."""
        if not np.any((steps.shards.size > 1) | (steps.replicas.size > 1)):
            return np.zeros(len(steps))
        if not self.software.overlap:
            return self._afterwards(steps, busiest)
        layouts, count = steps.layouts, steps.layouts.accumulation
        forward, backward = self.block
        each = (steps.block_parameters - steps.streams.parameters, steps.embedding_parameters, steps.head_parameters)
        gather, gather_embedding, gather_head = (self._gather(steps, parameters) for parameters in each)
        scatter, scatter_embedding, scatter_head = (self._scatter(steps, parameters) for parameters in each)
        three = layouts.zero == 3
        again = np.where(three & (layouts.reshard_after_forward | self.software.reshard), gather, 0.0)
        gathers = np.select([three, layouts.zero > 0], [count, 1], 0)
        scatters = np.where(layouts.zero >= 2, count, 1)
        # Nothing runs yet behind which the first gathers could hide, and nothing is left behind the last reductions.
        seconds = gathers * (
            busiest.blocks * self._shown(gather, forward)
            + busiest.embedding * gather_embedding
            + gather
            + busiest.head * self._shown(gather_head, forward)
        )
        seconds = seconds + scatters * (
            busiest.blocks * self._shown(scatter + again, backward)
            + busiest.embedding * scatter_embedding
            + busiest.head * self._shown(scatter_head, backward)
        )
        if np.any(steps.replicas.size > 1):
            summed, summed_embedding, summed_head = (self._sum(steps, parameters) for parameters in each)
            seconds = (
                seconds
                + busiest.embedding * summed_embedding
                + busiest.blocks
                * (self._shown(scatter + again + summed, backward) - self._shown(scatter + again, backward))
            )
            seconds = seconds + busiest.head * self._shown(summed_head, backward)
        return seconds + self._streaming(steps, busiest) + self._straggling(steps, busiest)

    def _streaming(self, steps: Steps, busiest: Busiest) -> Floats:
        """What shows of the chunks that go around the ring beside the products: weights forward; weights, and again those
        that recompute needs, and gradients backward. Replicas add up once, beside nothing."""
        streams, width = steps.streams, self.software.gather_bytes
        if not np.any(streams.parameters):
            return np.zeros(len(steps))
        chunk = width * streams.sent / np.maximum(streams.messages, 1)
        weights = streams.messages * self._message(steps, chunk)
        gradients = self._exchange(
            steps, all_to_all(width * streams.parameters, steps.shards, self.constants), width * streams.parameters
        )
        # A chunk that several ranks hold together is there before its products begin.
        own = np.where(streams.own > 0, self._message(steps, width * streams.own), 0.0)
        forward, backward = (streams.busy * each for each in self.block)
        passes = own * (2 + streams.again) + self._shown(weights, forward)
        passes = passes + self._shown((1 + streams.again) * weights + gradients, backward)
        summed = all_reduce(self.software.reduce_bytes * streams.piece, steps.replicas, self.constants)
        shown = busiest.blocks * (steps.layouts.accumulation * passes + summed)
        return np.where(streams.parameters > 0, shown, 0.0)

    def _message(self, steps: Steps, size: Floats) -> Floats:
        """Each rank sends `size` bytes to the next one."""
        sent = send(size, steps.shards, self.constants)
        if not np.any(self.copied):
            return sent
        rate = steps.shards.ring_b_s * self.profile.copy_share
        return np.where(self.copied, self.constants.launch_s + size / rate, sent)

    def _straggling(self, steps: Steps, busiest: Busiest) -> Floats:
        """Where every block waits for its parameters, all nodes go at the pace of the one that is slowest just then."""
        waits = (steps.layouts.zero == 3) & (steps.shards.nodes > 1)
        share = self.profile.straggling * np.log2(np.maximum(steps.shards.nodes, 1))
        return np.where(waits, steps.layouts.accumulation * (busiest.forward + busiest.backward) * share, 0.0)

    def _afterwards(self, steps: Steps, busiest: Busiest) -> Floats:
        held = (
            busiest.blocks * steps.block_parameters
            + busiest.embedding * steps.embedding_parameters
            + busiest.head * steps.head_parameters
        )
        return self._gather(steps, held) + self._scatter(steps, held) + self._sum(steps, held)

    def _shown(self, exchange: Floats, computing: Floats) -> Floats:
        hidden = np.minimum(exchange, self.profile.hidden * computing)
        slowdown = np.where(self.copied, self.profile.copy_slowdown, self.profile.slowdown)
        return np.asarray(exchange - hidden + slowdown * hidden)

    def _gather(self, steps: Steps, parameters: Floats) -> Floats:
        size = parameters * self.software.gather_bytes
        return self._exchange(steps, all_gather(size, steps.shards, self.constants), size)

    def _scatter(self, steps: Steps, parameters: Floats) -> Floats:
        size = parameters * self.software.reduce_bytes
        # Copies carry gradients as they were computed.
        return self._exchange(
            steps, reduce_scatter(size, steps.shards, self.constants), parameters * self.software.gather_bytes
        )

    def _exchange(self, steps: Steps, collective: Floats, copied_bytes: Floats) -> Floats:
        if not np.any(self.copied):
            return collective
        shards = steps.shards
        rate = shards.ring_b_s * self.profile.copy_share
        copies = self.constants.launch_s + copied_bytes * (shards.size - 1) / shards.size / rate
        return np.where(self.copied, copies, collective)

    def _sum(self, steps: Steps, parameters: Floats) -> Floats:
        size = parameters * self.software.reduce_bytes / steps.layouts.shards
        return all_reduce(size, steps.replicas, self.constants)
