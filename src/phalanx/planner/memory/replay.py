"""The state of a pipeline rank before each action of its schedule, read off the table that runs, as counts.

A rank's stages compute in turn, each at its own place in the step: while one computes, another keeps parameters that an
earlier backward pass has gathered, and a third has reduced its gradients already. What one of each count takes is in
`weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.layout.stage_assignment import count_leading, stage_layer_counts
from phalanx.planner.schedule.schedule_table import IntArray, Pass, ScheduleTable, schedule_table

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[Any]
"""Whole numbers, or truth values that count as such."""

COUNTS = (
    "layers",
    "leading",
    "embedding",
    "head",
    "blocks_kept",
    "leading_kept",
    "blocks_present",
    "leading_present",
    "embeddings_kept",
    "heads_kept",
    "stages_kept",
    "waiting",
    "received",
    "received_present",
    "handed_on",
    "results",
    "messages",
    "sent_lately",
    "sent",
    "later_sent",
    "whole_blocks",
    "whole_embedding",
    "whole_head",
    "whole_leading",
    "shared_blocks",
    "shared_embedding",
    "shared_head",
    "shared_leading",
    "pending",
    "gathered_blocks",
    "gathered_leading",
    "gathered_embedding",
    "gathered_head",
    "arrived_blocks",
    "arrived_embedding",
    "arrived_head",
    "arriving_blocks",
    "arriving_embedding",
    "arriving_head",
    "sent_blocks",
    "sent_embedding",
    "sent_head",
    "summed_embedding",
    "own_blocks",
    "own_embedding",
    "own_head",
    "tied_gradient",
    "streamed_gradients",
    "embedding_forward",
    "block_forward",
    "head_forward",
    "leading_forward",
    "embedding_backward",
    "block_backward",
    "experts_reduced",
    "head_backward",
    "leading_backward",
    "embedding_reduced",
    "blocks_reduced",
    "head_reduced",
    "blocks_given_up",
    "embedding_given_up",
    "head_given_up",
    "updated_blocks",
    "updated_leading",
    "updated_embedding",
    "updated_head",
    "updates",
)
"""What is counted, in the order of the columns; `weights` says of each what one takes.

- layers, embedding, head: of the model on this rank. leading, here and below: first blocks of the model that are of another
  kind; they are no part of what is counted as layers or blocks, but for what arrives, is sent or reduced.
- .._kept: activations of parts from forward to backward pass, each micro-batch counted. waiting: blocks whose gradients of
  weights are still to come after those of their input.
- .._present: of what offloaded activations leave to host memory, that which is on the device: the blocks' activations, and
  received inputs among them. 0 where nothing leaves.
- received: inputs from other ranks that are kept. handed_on: results that went to another rank and are kept until their
  backward pass. results: of the last block, on their way into the head.
- messages: buffers besides, of the size of what stages exchange. sent: messages that the transport holds; sent_lately: where
  it lets go after a round of them; later_sent: of each micro-batch beyond those of the table.
- whole_..: gradients before they are sharded. shared_..: afterwards. pending: see `PartBytes`. own_..: in the format
  they are computed in, not yet reduced. tied_gradient: that of a shared table, made by the head. streamed_gradients: of
  matrices that are never gathered.
- gathered_..: parameters. arrived_..: in the buffer that they came in as well. arriving_..: on their way.
- sent_blocks, sent_embedding, sent_head: gradients in the buffer that they were reduced from. summed_embedding: reduced.
- updated_..: parts that are updated: what state comes from host memory for that, and of matrices that are updated whole a
  direction and an update of each; updates: such an update.
- .._forward, .._backward, .._reduced: what is being done; experts_reduced: their reduction, and what is left of the backward
  pass of their block. .._given_up: whole gradients that a reduction has no need of any more.
"""
COLUMN = {name: place for place, name in enumerate(COUNTS)}

_GATHERED = 3
"""Stages of a rank that PyTorch keeps gathered, where parameters go after a forward pass: those that compute next."""


@dataclass(frozen=True)
class PeakCandidates:
    """What ranks hold at the moments of a step that may be its peak, a row each."""

    counts: npt.NDArray[np.float64]
    """[rows, COUNTS]."""
    rank: IntArray
    """[rows]."""
    moment: list[str]
    """[rows]."""

    def take(self, which: Mask) -> PeakCandidates:
        """Return the rows where `which` is true."""
        return PeakCandidates(self.counts[which], self.rank[which], list(compress(self.moment, which)))


@dataclass(frozen=True)
class Pipeline:
    """A pipeline as far as it decides what is held."""

    schedule: str
    pp: int
    stages_per_rank: int
    microbatches: int
    n_layers: int
    costs: tuple[float, float]
    """What the embedding and the head cost beside one block, see `layout.stage_assignment.split_layers`."""
    gather_blocks: int
    """Blocks that are gathered together."""
    gathers_ahead: int
    """Units that are gathered while one computes."""
    leading: int = 0
    """Leading blocks of the model: dense ones of a mixture of experts."""
    offloads: bool = False
    """Whether activations of all blocks of a stage but the last are in host memory while they do not compute."""


@dataclass(frozen=True)
class Stages:
    """The stages of each rank, ascending; arrays of [ranks, stages of a rank]."""

    index: IntArray
    layers: IntArray
    leading: IntArray
    """Leading blocks among `layers`."""
    first: Mask
    last: Mask
    gets: Mask
    """Whether activations come from another rank."""
    gives: Mask
    """Whether they go to another rank."""

    @classmethod
    def of(cls, table: ScheduleTable, pipeline: Pipeline) -> Stages:
        """Return the stages of all ranks."""
        index = table.stages_of_rank
        layers = stage_layer_counts(pipeline.n_layers, table.n_stages, *pipeline.costs)
        held, leading = (np.asarray(each)[index] for each in (layers, count_leading(layers, pipeline.leading)))
        first, last = index == 0, index == table.n_stages - 1
        ranks = table.rank_of_stage
        before, after = (ranks[np.clip(index + step, 0, table.n_stages - 1)] for step in (-1, 1))
        # In a schedule that goes there and back, two neighbouring stages lie on one rank.
        return cls(
            index, held, leading, first, last, ~first & (before != ranks[index]), ~last & (after != ranks[index])
        )

    def take(self, ranks: IntArray) -> Stages:
        """Return the stages of these ranks."""
        return Stages(**{field.name: getattr(self, field.name)[ranks] for field in fields(self)})


class Replay:
    """Counts before each action of some ranks.

    A case is a rank whose parameters go after a forward pass, or stay. Arrays of [cases, actions], or of [cases, actions,
    stages of a rank].
    """

    def __init__(self, pipeline: Pipeline, ranks: IntArray, freed: Mask) -> None:
        p = pipeline
        table = schedule_table(p.schedule, p.pp, p.stages_per_rank, p.microbatches)
        self.stages, self.pipeline = Stages.of(table, p).take(ranks), p
        self.freed = freed[:, None]
        self.several = p.stages_per_rank > 1
        """Whether PyTorch's runtime for several stages a rank runs the schedule: it gathers stages before they compute, and
        waits at the end of a step for all it has sent."""
        self.microbatch = table.microbatch[ranks]
        self.own = table.stage[ranks][:, :, None] == self.stages.index[:, None, :]
        """Whether an action is of a stage."""
        self.layers = self._over_stages(self.own, self.stages.layers)
        """Blocks of the stage that computes."""
        self.leading = self._over_stages(self.own, self.stages.leading)
        """Leading blocks of the stage that computes."""
        self.is_first, self.is_last, self.gets, self.gives = (
            self._over_stages(self.own, mask) > 0
            for mask in (self.stages.first, self.stages.last, self.stages.gets, self.stages.gives)
        )
        kind = table.kind[ranks]
        self.forward = kind == Pass.FORWARD
        # Nobody needs the gradients of the first stage's input: PyTorch computes all of its backward pass when those of its
        # weights are due, and nothing before.
        self.split = (kind == Pass.INPUT) & ~self.is_first
        """Gradients of inputs alone."""
        self.weight = (kind == Pass.WEIGHT) & ~self.is_first
        """Gradients of weights alone."""
        self.backward = (kind == Pass.BACKWARD) | self.split | ((kind == Pass.WEIGHT) & self.is_first)
        """Passes back through a stage, all of it or the gradients of inputs alone."""
        self.releases = (self.backward & ~self.split) | self.weight
        """Where a stage has computed all of a micro-batch and gives up its activations."""
        self.time = np.arange(self.forward.shape[1])
        self.units = -(-self.layers // pipeline.gather_blocks)
        self.unit = np.minimum(pipeline.gather_blocks, self.layers)
        self.tail = (self.layers - 1) % pipeline.gather_blocks + 1
        """Blocks of the last unit."""

    def _over_stages(self, each: Counts, amounts: Counts) -> IntArray:
        """Return the sum over a rank's stages. each: of every action and stage. amounts: of every stage."""
        return np.asarray(np.einsum("cas,cs->ca", each.astype(np.int32), amounts.astype(np.int32)))

    @cached_property
    def before(self) -> IntArray:
        """Counts before each action, [cases, actions, COUNTS]; gathered ones of the stages that do not compute."""
        stages, over = self.stages, self._over_stages
        others = stages.layers - stages.leading
        flight = self._sum_before((self.forward * 1 - self.releases)[:, :, None] * self.own)
        waiting = self._sum_before((self.split * 1 - self.weight)[:, :, None] * self.own)
        elsewhere = self.gathered & ~self.own
        late = 2 * self.done.sum(2) >= len(self.time) / 2
        links = (stages.gets.sum(1) + stages.gives.sum(1))[:, None]
        # One stage a rank: the step does not wait for what was sent, and a result stays until its backward pass.
        sent = self._sum_before((self.gives & self.forward) * 1 + (self.gets & self.backward)) * self.several
        values: dict[str, Counts | int] = {
            "layers": others.sum(1)[:, None],
            "leading": stages.leading.sum(1)[:, None],
            "embedding": np.asarray(stages.first.any(1))[:, None],
            "head": np.asarray(stages.last.any(1))[:, None],
            "blocks_kept": over(flight, others),
            "leading_kept": over(flight, stages.leading),
            "embeddings_kept": over(flight, stages.first),
            "heads_kept": over(flight, stages.last),
            "stages_kept": flight.sum(2),
            "waiting": over(waiting, stages.layers),
            "received": over(flight, stages.gets),
            **self._present_in(flight),
            "handed_on": over(flight, stages.gives) * (not self.several),
            # Each direction of a stage keeps the buffer that others are made like.
            "messages": links,
            "sent": sent,
            "sent_lately": self._sent_lately(sent, self.pipeline.pp * links[:, 0]) if self.several else 0,
            "later_sent": late * links * self.several,
            "whole_blocks": over(self.whole, others),
            "whole_leading": over(self.whole, stages.leading),
            "whole_embedding": over(self.whole, stages.first),
            "whole_head": over(self.whole, stages.last),
            "shared_blocks": over(self.shared, others),
            "shared_leading": over(self.shared, stages.leading),
            "shared_embedding": over(self.shared, stages.first),
            "shared_head": over(self.shared, stages.last),
            "gathered_blocks": over(elsewhere, others),
            "gathered_leading": over(elsewhere, stages.leading),
            "gathered_embedding": over(elsewhere, stages.first),
            "gathered_head": over(self.active & ~self.own, stages.last),
        }
        rows = np.zeros((*self.forward.shape, len(COUNTS)), np.int32)
        for name, value in values.items():
            rows[:, :, COLUMN[name]] = value
        return rows

    def _present_in(self, flight: IntArray) -> dict[str, Counts]:
        """Return what is on the device of micro-batches in flight, where activations are offloaded: the last blocks' own."""
        if not self.pipeline.offloads:
            return {}
        stages, over = self.stages, self._over_stages
        leads = stages.leading == stages.layers
        found = {
            "blocks_present": ~leads,
            "leading_present": leads,
            "received_present": stages.gets & (stages.layers == 1),
        }
        return {name: over(flight, count) for name, count in found.items()}

    @staticmethod
    def _sum_before(change: IntArray) -> IntArray:
        """Return the sum of changes at the actions before each one."""
        return np.asarray(np.cumsum(change, axis=1) - change)

    def _sent_lately(self, sent: IntArray, most: IntArray) -> IntArray:
        """Messages and results before each action, where of messages the latest `most` are held and results until their
        backward pass. sent: messages before each action."""
        found = []
        stage = self.own.argmax(2)
        for case, before in enumerate(sent):
            results = np.flatnonzero(self.forward[case] & self.gives[case])
            back = np.flatnonzero(self.releases[case])
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
        """Micro-batches whose gradients of weights each stage has computed before an action."""
        return self._sum_before((self.own & self.releases[:, :, None]).astype(np.int32))

    @cached_property
    def last_release(self) -> IntArray:
        """When each stage computes its last gradients, [cases, stages of a rank]."""
        return np.asarray(np.where(self.own & self.releases[:, :, None], self.time[:, None], 0).max(1))

    @cached_property
    def whole(self) -> Mask:
        """Whether a stage has gradients of whole parameters before an action."""
        return np.asarray((self.done > 0) & ~self.shared)

    @cached_property
    def shared(self) -> Mask:
        """Whether its gradients have been reduced and scattered."""
        return np.asarray(self.time[:, None] > self.last_release[:, None])

    @cached_property
    def own_whole(self) -> Mask:
        """Whether the stage that computes has such gradients already."""
        return np.asarray((self.whole & self.own).any(2))

    @cached_property
    def active(self) -> Mask:
        """Whether PyTorch has gathered a stage and not given it up again; its head stays so long."""
        if not self.several:
            return np.ones_like(self.own)
        never = len(self.time)
        # When each stage computes next, from each action on.
        following = np.where(self.own, self.time[:, None], never)
        following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
        # How many other stages of the rank come before it.
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
        # When a stage was called for last, and when it computed last.
        since = np.maximum.accumulate(np.where(self.active & ~before, time, -1), axis=1)
        latest = np.maximum.accumulate(np.where(self.own, time, -1), axis=1)
        latest = np.concatenate([np.full_like(latest[:, :1], -1), latest[:, :-1]], axis=1)
        backward = np.take_along_axis(~self.forward[:, :, None], np.maximum(latest, 0), axis=1)
        if not self.several:
            # Nothing is gathered ahead of the first forward pass.
            return np.asarray(~self.freed[:, :, None] | ((latest >= 0) & backward))
        return np.asarray(self.active & (~self.freed[:, :, None] | (latest < since) | backward))

    @cached_property
    def own_gathered(self) -> Mask:
        """Whether those of the stage that computes are."""
        return np.asarray((self.gathered & self.own).any(2))
