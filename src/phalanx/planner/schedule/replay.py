"""The state of a rank with several stages before each action of its schedule, read off the table that runs, as counts.

Its stages compute in turn, each at its own place in the step: while one computes, another keeps parameters that an earlier
backward pass has gathered, and a third has reduced its gradients already.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.planner.layouts.stage_layers import split
from phalanx.planner.schedule.table import IntArray, Pass, ScheduleTable, schedule_table

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[Any]
"""Whole numbers, or truth values that count as such."""

COUNTS = (
    "layers",
    "embedding",
    "head",
    "blocks_kept",
    "embeddings_kept",
    "heads_kept",
    "stages_kept",
    "received",
    "results",
    "messages",
    "sent_lately",
    "sent",
    "later_sent",
    "whole_blocks",
    "whole_embedding",
    "whole_head",
    "shared_blocks",
    "shared_embedding",
    "shared_head",
    "coming",
    "gathered_blocks",
    "gathered_embedding",
    "gathered_head",
    "arrived_blocks",
    "arrived_embedding",
    "arriving_blocks",
    "arriving_embedding",
    "embedding_forward",
    "block_forward",
    "head_forward",
    "embedding_backward",
    "block_backward",
    "head_backward",
    "embedding_reduced",
    "blocks_reduced",
    "head_reduced",
)
"""What is counted, in the order of the columns; `memory_weights` says of each what one takes.

layers, embedding, head: of the model on this rank. kept: activations of parts from forward to backward pass, each
micro-batch counted. received: inputs from other ranks that are kept. results: of the last block, on their way into the
head. messages: buffers besides, of the size of what stages exchange. later: of each micro-batch beyond those of the table.
sent: messages that the transport holds; lately: where it lets go after a round of them. whole: gradients before they are
shared out. coming: see `PartBytes`. gathered: parameters. arrived: in the buffer that they came in as well. arriving: on
their way. forward, backward, reduced: what is being done.
"""
COLUMN = {name: place for place, name in enumerate(COUNTS)}

_GATHERED = 3
"""Stages of a rank that PyTorch keeps gathered, where parameters go after a forward pass: those that compute next."""


@dataclass(frozen=True)
class Pipeline:
    """An interleaved pipeline as far as it decides what is held."""

    pp: int
    stages_per_rank: int
    microbatches: int
    n_layers: int
    costs: tuple[float, float]
    """What the embedding and the head cost beside one block, see `layout.pipeline.stage_assignment.split_layers`."""
    gather_blocks: int
    """Blocks that are gathered together."""
    gathers_ahead: int
    """Units that are gathered while one computes."""


@dataclass(frozen=True)
class Stages:
    """The stages of each rank, ascending; arrays of [ranks, stages of a rank]."""

    index: IntArray
    layers: IntArray
    first: Mask
    last: Mask
    gets: Mask
    """Whether activations come from another rank."""
    gives: Mask
    """Whether they go to another rank."""

    @classmethod
    def of(cls, table: ScheduleTable, pipeline: Pipeline) -> Stages:
        """Of all ranks."""
        index = table.stages_of_rank
        layers = np.asarray(split(pipeline.n_layers, table.n_stages, *pipeline.costs))[index]
        first, last = index == 0, index == table.n_stages - 1
        # A rank's stages are neighbours only where it is alone.
        return cls(index, layers, first, last, ~first, ~last)

    def take(self, ranks: IntArray) -> Stages:
        """Of these ranks."""
        return Stages(**{field.name: getattr(self, field.name)[ranks] for field in fields(self)})


class Replay:
    """Counts before each action of some ranks.

    A case is a rank whose parameters go after a forward pass, or stay. Arrays of [cases, actions], or of [cases, actions,
    stages of a rank].
    """

    def __init__(self, pipeline: Pipeline, ranks: IntArray, freed: Mask) -> None:
        p = pipeline
        table = schedule_table("interleaved_1f1b", p.pp, p.stages_per_rank, p.microbatches)
        self.stages, self.pipeline = Stages.of(table, p).take(ranks), p
        self.freed = freed[:, None]
        self.microbatch = table.microbatch[ranks]
        self.own = table.stage[ranks][:, :, None] == self.stages.index[:, None, :]
        """Whether an action is of a stage."""
        self.forward = table.kind[ranks] == Pass.FORWARD
        self.backward = ~self.forward
        self.time = np.arange(self.forward.shape[1])
        self.layers = self._over_stages(self.own, self.stages.layers)
        """Of the stage that computes."""
        self.is_first, self.is_last, self.gets, self.gives = (
            self._over_stages(self.own, mask) > 0
            for mask in (self.stages.first, self.stages.last, self.stages.gets, self.stages.gives)
        )
        self.units = -(-self.layers // pipeline.gather_blocks)
        self.unit = np.minimum(pipeline.gather_blocks, self.layers)
        self.tail = (self.layers - 1) % pipeline.gather_blocks + 1
        """Blocks of the last unit."""

    def _over_stages(self, each: Counts, amounts: Counts) -> IntArray:
        """The sum over a rank's stages. each: of every action and stage. amounts: of every stage."""
        return np.asarray(np.einsum("cas,cs->ca", each.astype(np.int32), amounts.astype(np.int32)))

    @cached_property
    def before(self) -> IntArray:
        """Counts before each action, [cases, actions, COUNTS]; gathered ones of the stages that do not compute."""
        stages, over = self.stages, self._over_stages
        change = np.where(self.forward, 1, -1)[:, :, None] * self.own
        flight = np.cumsum(change, axis=1) - change
        elsewhere = self.gathered & ~self.own
        late = 2 * self.done.sum(2) >= len(self.time) / 2
        links = (stages.gets.sum(1) + stages.gives.sum(1))[:, None]
        sent = self.gives * self.forward + self.gets * self.backward
        sent = np.cumsum(sent, axis=1) - sent
        values: dict[str, Counts] = {
            "layers": stages.layers.sum(1)[:, None],
            "embedding": np.asarray(stages.first.any(1))[:, None],
            "head": np.asarray(stages.last.any(1))[:, None],
            "blocks_kept": over(flight, stages.layers),
            "embeddings_kept": over(flight, stages.first),
            "heads_kept": over(flight, stages.last),
            "stages_kept": flight.sum(2),
            "received": over(flight, stages.gets),
            # Each direction of a stage keeps the buffer that others are made like.
            "messages": links,
            "sent": sent,
            "sent_lately": self._sent_lately(sent, self.pipeline.pp * links[:, 0]),
            "later_sent": late * links,
            "whole_blocks": over(self.whole, stages.layers),
            "whole_embedding": over(self.whole, stages.first),
            "whole_head": over(self.whole, stages.last),
            "shared_blocks": over(self.shared, stages.layers),
            "shared_embedding": over(self.shared, stages.first),
            "shared_head": over(self.shared, stages.last),
            "gathered_blocks": over(elsewhere, stages.layers),
            "gathered_embedding": over(elsewhere, stages.first),
            "gathered_head": over(self.active & ~self.own, stages.last),
        }
        rows = np.zeros((*self.forward.shape, len(COUNTS)), np.int32)
        for name, value in values.items():
            rows[:, :, COLUMN[name]] = value
        return rows

    def _sent_lately(self, sent: IntArray, most: IntArray) -> IntArray:
        """Messages and results before each action, where of messages the latest `most` are held and results until their
        backward pass. sent: messages before each action."""
        found = []
        stage = self.own.argmax(2)
        for case, before in enumerate(sent):
            results = np.flatnonzero(self.forward[case] & self.gives[case])
            back = np.flatnonzero(self.backward[case])
            until = np.zeros((self.own.shape[2], self.microbatch[case].max() + 1), np.int64)
            until[stage[case, back], self.microbatch[case, back]] = back
            end = until[stage[case, results], self.microbatch[case, results]]
            given_up = np.searchsorted(before, before[results] + 1 + most[case])
            longer = given_up <= end
            change = np.bincount(given_up[longer], minlength=len(before) + 1)
            change -= np.bincount(end[longer] + 1, minlength=len(before) + 1)
            found.append(np.minimum(before, most[case]) + np.cumsum(change)[:-1])
        return np.stack(found)

    @cached_property
    def done(self) -> IntArray:
        """Backward passes of each stage before an action."""
        backward = (self.own & self.backward[:, :, None]).astype(np.int32)
        return np.asarray(np.cumsum(backward, axis=1) - backward)

    @cached_property
    def last_backward(self) -> IntArray:
        """When each stage last goes backward, [cases, stages of a rank]."""
        return np.asarray(np.where(self.own & self.backward[:, :, None], self.time[:, None], 0).max(1))

    @cached_property
    def whole(self) -> Mask:
        """Whether a stage has gradients of whole parameters before an action."""
        return np.asarray((self.done > 0) & ~self.shared)

    @cached_property
    def shared(self) -> Mask:
        """Whether its gradients have been shared out."""
        return np.asarray(self.time[:, None] > self.last_backward[:, None])

    @cached_property
    def own_whole(self) -> Mask:
        """Whether the stage that computes has such gradients already."""
        return np.asarray((self.whole & self.own).any(2))

    @cached_property
    def active(self) -> Mask:
        """Whether PyTorch has gathered a stage and not given it up again; its head stays so long."""
        never = len(self.time)
        following = np.where(self.own, self.time[:, None], never)
        following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
        nearer = (following[:, :, None, :] < following[:, :, :, None]).sum(3)
        active = (nearer < _GATHERED) & (following < never)
        until = np.logical_or.accumulate(active[:, ::-1], axis=1)[:, ::-1]
        once = np.logical_or.accumulate(active, axis=1) & until
        return np.where(self.freed[:, :, None], active, once)

    @cached_property
    def gathered(self) -> Mask:
        """Whether all blocks of a stage are gathered before an action: since they were called for, or since a backward
        pass."""
        before = np.zeros_like(self.active)
        before[:, 1:] = self.active[:, :-1]
        time = self.time[:, None]
        since = np.maximum.accumulate(np.where(self.active & ~before, time, -1), axis=1)
        latest = np.maximum.accumulate(np.where(self.own, time, -1), axis=1)
        latest = np.concatenate([np.full_like(latest[:, :1], -1), latest[:, :-1]], axis=1)
        backward = np.take_along_axis(self.backward[:, :, None], np.maximum(latest, 0), axis=1)
        return np.asarray(self.active & (~self.freed[:, :, None] | (latest < since) | backward))

    @cached_property
    def own_gathered(self) -> Mask:
        """Whether those of the stage that computes are."""
        return np.asarray((self.gathered & self.own).any(2))
