"""What the ranks of a pipeline hold when they may hold most: counts, from a replay of the schedule's table.

`replay` knows the state before each action; here is what every moment of an action adds to it, and which of all these rows
may be the most. What they weigh is `weights`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from phalanx.layout.spec import SCHEDULES
from phalanx.planner.memory.ranks import ranks_that_may_be_worst
from phalanx.planner.memory.replay import COLUMN, COUNTS, Counts, Mask, PeakCandidates, Pipeline, Replay
from phalanx.planner.schedule.schedule_table import IntArray


@cache
def pipeline_candidates(pipeline: Pipeline) -> tuple[PeakCandidates, PeakCandidates]:
    """Return those of all ranks of a pipeline together.

    Where parameters are kept from a stage's first action to its last, and where they go after each block's forward pass.
    """
    p = pipeline
    ranks = np.asarray(ranks_that_may_be_worst(p.schedule, p.pp, p.stages_per_rank, p.n_layers, p.costs, p.leading))
    kept, freed = (np.zeros(len(ranks), bool), np.ones(len(ranks), bool))
    # Both cases in one replay: the table is the same.
    ranks, frees = np.tile(ranks, 2), np.concatenate([kept, freed])
    found, case = _peak_candidates(p, ranks, frees)
    return found.take(~frees[case]), found.take(frees[case])


@cache
def candidates_of_each_rank(pipeline: Pipeline, freed: bool) -> list[PeakCandidates]:
    """Return the peak candidates of every rank by itself."""
    ranks = np.arange(pipeline.pp)
    found, case = _peak_candidates(pipeline, ranks, np.full(len(ranks), freed))
    return [found.take(case == rank) for rank in ranks]


def cut_to_rounds(schedule: IntArray, pp: IntArray, microbatches: IntArray) -> IntArray:
    """Micro-batches, cut down to a number of rounds beyond which all repeats itself."""
    # GPipe keeps all micro-batches in flight.
    rounds = np.where(schedule == SCHEDULES.index("gpipe"), 1, np.maximum(1, microbatches // pp))
    return np.asarray(microbatches // rounds * np.minimum(rounds, _ROUNDS))


_ROUNDS = 3
"""A pipeline fills in the first, goes on evenly in the second and drains in the last."""
_COMPARED = 8
"""Rows of each case and moment that all others are compared with: enough to leave a tenth or less."""


def _peak_candidates(p: Pipeline, ranks: IntArray, freed: Mask) -> tuple[PeakCandidates, IntArray]:
    """Return the rows that may hold most, and the case of each: its position in `ranks` and `freed`."""
    moments = _Moments(p, ranks, freed).all()
    counts = np.concatenate([rows for rows, _ in moments.values()])
    case = np.concatenate([case for _, case in moments.values()])
    moment = np.repeat(np.arange(len(moments)), [len(rows) for rows, _ in moments.values()])
    # Counts are made comparable, so that more of any of them never takes less memory: a part of a whole gradient is no more
    # than the whole, a received input no more than the block that keeps it, and inputs and messages are of one size.
    comparable = counts.copy()
    for name in ("blocks", "leading", "embedding", "head"):
        comparable[:, COLUMN[f"shared_{name}"]] += counts[:, COLUMN[f"whole_{name}"]]
    received, messages = (counts[:, COLUMN[name]] for name in ("received", "messages"))
    comparable[:, COLUMN["blocks_kept"]] -= received
    comparable[:, COLUMN["blocks_present"]] -= counts[:, COLUMN["received_present"]]
    comparable[:, COLUMN["messages"]] = 0
    for name in ("sent", "sent_lately"):
        comparable[:, COLUMN[name]] += received + messages
    most = _largest(comparable, moment * len(ranks) + case)
    names = list(moments)
    found = PeakCandidates(
        counts[most].astype(np.float64), ranks[case[most]], [names[place] for place in moment[most].tolist()]
    )
    return found, case[most]


def _largest(rows: Counts, case: IntArray) -> IntArray:
    """Return the positions of rows that no larger row of their case exceeds or equals in every column."""
    # Columns in which all rows are alike decide nothing.
    rows = rows[:, (rows != rows[0]).any(axis=0)]
    order = np.lexsort((-rows.sum(axis=1), case))
    rows, case = rows[order], case[order]
    found = []
    for _ in range(_COMPARED):
        if not len(order):
            break
        # The row of largest sum of each case: no other row of it is as large in every column.
        first = np.append(True, case[1:] != case[:-1])
        found.append(order[first])
        more = (rows > rows[first][np.cumsum(first) - 1]).any(axis=1)
        order, rows, case = order[more], rows[more], case[more]
    return np.concatenate([*found, order])


_BY_KIND = {"blocks_kept": "leading_kept"} | {f"{of}_blocks": f"{of}_leading" for of in ("whole", "shared", "gathered")}
"""Names of counts of blocks, and of the same counts of leading blocks."""


class _Moments(Replay):
    """What each moment of an action adds to the counts before it."""

    def all(self) -> dict[str, tuple[Counts, Counts]]:
        """Return rows of counts by the name of their moment, with the case of each row."""
        return self.of_forward_passes() | self.of_backward_passes() | self.of_reductions()

    def of_forward_passes(self) -> dict[str, tuple[Counts, Counts]]:
        """Return the rows of every forward pass: of embedding, first block, those in between, last one, head."""
        f, whole, freed = self.forward, self.own_gathered, self.freed
        kept: dict[str, Counts | int] = {
            "embeddings_kept": self.is_first,
            "stages_kept": 1,
            "received": self.gets,
            "gathered_head": self.is_last,
        }
        # As each block gives up its parameters the next ones arrive.
        ahead = np.minimum(self.pipeline.gathers_ahead, self.units - 1)
        stays = whole & ~freed
        after = np.where(stays, self.layers, 0)
        start = stays & self.is_first
        return {
            "forward of the embedding": self.rows(
                f & self.is_first,
                gathered_embedding=1,
                gathered_blocks=np.where(whole, self.layers, 0),
                arrived_embedding=~whole,
                arriving_blocks=np.where(whole, 0, self.unit),
                embedding_forward=1,
            ),
            "forward of the first block": self.rows(
                f & whole & freed, **kept, gathered_blocks=self.layers, **self._count_block_pass("forward", 0)
            ),
            "forward of a block in between": self.rows(
                f & ~whole & (self.units > 1),
                **kept,
                blocks_kept=(self.units - ahead) * self.unit - 1,
                **self._count_present((self.units - ahead) * self.unit - 1, 1),
                gathered_blocks=self.unit,
                arrived_blocks=self.unit,
                arriving_blocks=np.minimum(ahead * self.unit, self.layers - self.unit),
                **self._count_block_pass("forward", (self.units - ahead) * self.unit - 1),
            ),
            "forward of the last block": self.rows(
                f,
                **kept,
                blocks_kept=self.layers - 1,
                **self._count_present(self.layers - 1, 1),
                gathered_blocks=np.where(stays, self.layers, self.tail),
                gathered_embedding=start,
                arrived_blocks=np.where(whole, 0, self.tail),
                **self._count_block_pass("forward", self.layers - 1),
            ),
            "forward of the head": self.rows(
                f & self.is_last,
                **kept,
                blocks_kept=self.layers,
                **self._count_present(self.layers, 1),
                results=1,
                gathered_blocks=after,
                gathered_embedding=start,
                # Of several micro-batches the first, which has least else, gathers the head for all of them.
                arrived_head=self.pipeline.microbatches == 1,
                head_forward=1,
            ),
        }

    def of_backward_passes(self) -> dict[str, tuple[Counts, Counts]]:
        """Return the rows of every pass back through a stage: of the head, of its blocks, and of the embedding."""
        b, whole, layers, unit = self.backward, self.own_gathered, self.layers, self.unit
        ahead = np.minimum(self.pipeline.gathers_ahead, self.units)
        head_done = -1 * (self.is_last & ~self.split)
        of_head = {
            "backward of the head": self.rows(
                b & self.is_last,
                **self._gathered_ends(),
                gathered_blocks=np.where(whole, layers, 0),
                arriving_blocks=np.where(whole, 0, np.minimum(ahead * unit, layers)),
                head_backward=1,
            ),
        }
        of_embedding = {
            "backward of the embedding": self.rows(
                b & self.is_first,
                heads_kept=head_done,
                **self._gradients_after(layers, embedding=True),
                blocks_kept=-layers,
                **self._present_backward(0),
                gathered_blocks=layers,
                gathered_head=self.is_last,
                gathered_embedding=1,
                embedding_backward=1,
            ),
        }
        return of_head | self._of_blocks_backward() | self._of_second_block_backward() | of_embedding

    def _of_blocks_backward(self) -> dict[str, tuple[Counts, Counts]]:
        """Return the rows of passes back through the last block, those in between, and the first one of each kind."""
        b, whole, layers, unit, leading = self.backward, self.own_gathered, self.layers, self.unit, self.leading
        # Blocks of the units that hold leading blocks alone.
        begun = leading // self.pipeline.gather_blocks * self.pipeline.gather_blocks
        # Gradients of inputs alone free nothing on their way: what those of weights are made from comes to what is kept.
        frees, split = ~self.split, self.split
        held = self._gathered_ends()
        head_done = -1 * (self.is_last & frees)
        return {
            "backward of the last block": self.rows(
                b,
                **held,
                heads_kept=head_done,
                **self._gradients_after(np.zeros_like(layers)),
                waiting=1 * split,
                **self._present_backward(layers),
                gathered_blocks=np.where(whole, layers, self.tail),
                arriving_blocks=np.where(whole, 0, np.minimum(self.pipeline.gathers_ahead * unit, layers - self.tail)),
                **self._count_block_pass("backward", layers - 1),
            ),
            "backward of a block in between": self.rows(
                b & ~whole & (self.units > 1),
                **held,
                heads_kept=head_done,
                **self._gradients_after(layers - unit - 1),
                waiting=(layers - unit) * split,
                blocks_kept=(unit + 1 - layers) * frees,
                **self._present_backward(unit + 1),
                gathered_blocks=layers - unit,
                arriving_blocks=unit,
                **self._count_block_pass("backward", unit),
            ),
            "backward of the first block behind others": self.rows(
                b & (leading > 0) & (leading < layers),
                **held,
                heads_kept=head_done,
                **self._gradients_after(layers - leading - 1),
                waiting=(layers - leading) * split,
                blocks_kept=(1 + leading - layers) * frees,
                **self._present_backward(leading + 1),
                gathered_blocks=np.where(whole, layers, layers - begun),
                arriving_blocks=np.where(whole, 0, np.minimum(begun, unit)),
                **self._count_block_pass("backward", leading),
            ),
            "backward of the first block": self.rows(
                b,
                **held,
                heads_kept=head_done,
                **self._gradients_after(layers - 1),
                waiting=layers * split,
                blocks_kept=(1 - layers) * frees,
                **self._present_backward(np.ones_like(layers)),
                gathered_blocks=layers,
                arriving_embedding=~whole & self.is_first,
                **self._count_block_pass("backward", 0),
            ),
        }

    def _of_second_block_backward(self) -> dict[str, tuple[Counts, Counts]]:
        """Return the rows of passes back through the second block, until which offloaded activations stay as many.

        Of those that are freed block by block the passes in between are of no interest.
        """
        layers = self.layers
        if not self.pipeline.offloads:
            return {}
        return {
            "backward of the second block": self.rows(
                self.backward & (layers > 1),
                **self._gathered_ends(),
                heads_kept=-1 * self.is_last,
                **self._gradients_after(layers - 2),
                blocks_kept=2 - layers,
                **self._present_backward(2 * np.ones_like(layers)),
                # The gradient that the stage has received, which the last block's pass counts as its own.
                messages=self.gives,
                gathered_blocks=layers,
                **self._count_block_pass("backward", np.ones_like(layers)),
            )
        }

    def _gathered_ends(self) -> dict[str, Counts]:
        """Return the counts of an embedding and a head that stay gathered while a stage's blocks go back."""
        return {"gathered_head": self.is_last, "gathered_embedding": self.own_gathered & self.is_first}

    def _gradients_after(self, blocks: IntArray, *, embedding: bool = False) -> dict[str, Counts]:
        """Return the gradients of a stage's first micro-batch after the backward passes of its head and so many blocks."""
        new, frees = self.backward & ~self.own_whole, ~self.split
        return {
            "whole_blocks": np.where(new & frees, blocks, 0),
            "whole_head": new & self.is_last,
            "whole_embedding": new & self.is_first & embedding,
            "pending": new & frees,
        }

    def of_reductions(self) -> dict[str, tuple[Counts, Counts]]:
        """Return the rows after a stage's last backward pass, when gradients of embedding, blocks and head are reduced."""
        last = self.backward & (self.time == self._over_stages(self.own, self.last_release))
        gone: dict[str, Counts | int] = {
            "embeddings_kept": -1 * self.is_first,
            "heads_kept": -1 * self.is_last,
            "blocks_kept": -self.layers,
            **self._present_backward(0),
            "stages_kept": -1,
            "waiting": -self.layers * self.weight,
            "received": -1 * self.gets,
            "handed_on": -1 * (self.gives & (not self.several)),
        }
        # Until here those of a first micro-batch that is the last one too were no part of what is whole.
        new = ~self.own_whole
        blocks, start, head = new * self.layers, new & self.is_first, new & self.is_last
        shared_start: dict[str, Counts | int] = {
            "whole_embedding": start - 1 * self.is_first,
            "shared_embedding": 1 * self.is_first,
            "whole_head": head,
        }
        return {
            "gradients of the embedding reduced": self.rows(
                last & self.is_first,
                **gone,
                whole_blocks=blocks,
                whole_embedding=start,
                whole_head=head,
                gathered_blocks=self.layers,
                gathered_head=self.is_last,
                embedding_reduced=1,
                embedding_given_up=1,
            ),
            "gradients of the first part reduced": self.rows(
                last,
                **gone,
                **shared_start,
                whole_blocks=blocks,
                gathered_blocks=self.layers - self.unit,
                gathered_head=self.is_last,
                blocks_reduced=self.unit,
                blocks_given_up=self.unit,
            ),
            "gradients of the head reduced": self.rows(
                last & self.is_last,
                **gone,
                **shared_start,
                whole_blocks=blocks - self.layers,
                shared_blocks=self.layers,
                head_reduced=1,
                head_given_up=1,
            ),
            "update": self._update(),
        }

    def _update(self) -> tuple[Counts, Counts]:
        rows = np.zeros((len(self.freed), len(COUNTS)), np.int32)
        stages = self.stages
        leading = stages.leading.sum(1)
        blocks = stages.layers.sum(1) - leading
        whole = {"layers": blocks, "leading": leading, "embedding": stages.first.any(1), "head": stages.last.any(1)}
        for name, count in whole.items():
            rows[:, COLUMN[name]] = count
            rows[:, COLUMN["shared_" + ("blocks" if name == "layers" else name)]] = count
            rows[:, COLUMN["updated_" + ("blocks" if name == "layers" else name)]] = count
        rows[:, COLUMN["updates"]] = 1
        return rows, np.arange(len(rows))

    def _count_present(self, left: Counts | int, count: int) -> dict[str, Counts]:
        """Return the counts of blocks of the stage whose activations are on the device: the last `count` of its first `left`
        blocks, or all of these."""
        if not self.pipeline.offloads:
            return {}
        present = np.minimum(left, count) * np.ones_like(self.layers)
        behind = left - present
        leading = np.clip(self.leading - behind, 0, present)
        received = self.gets & (present > 0) & (behind == 0)
        return {"blocks_present": present - leading, "leading_present": leading, "received_present": received}

    def _present_backward(self, left: Counts | int) -> dict[str, Counts]:
        """Return what changes as a stage goes back, and has `left` blocks to go: the first of these computes, and what the
        next one keeps arrives."""
        before, now = self._count_present(self.layers, 1), self._count_present(left, 2)
        return {name: now[name] * 1 - before[name] for name in now}

    def _count_block_pass(self, direction: str, block: Counts | int) -> dict[str, Counts]:
        """Return the counts of one block's pass: of a leading block where `block`, its place in the stage, is one."""
        leads = block < self.leading
        return {f"block_{direction}": ~leads, f"leading_{direction}": leads}

    def rows(self, where: Mask, **more: Counts | int) -> tuple[Counts, Counts]:
        """Return the counts before the actions in `where`, with `more` of each, and their cases.

        Counts of blocks are given for all of a stage together; here leading blocks are told apart from the others.
        """
        place = np.flatnonzero(where)
        found = self.before.reshape(-1, len(COUNTS))[place]
        leading = self.leading.reshape(-1)[place]
        others = self.layers.reshape(-1)[place] - leading
        for name, count in more.items():
            change = count.reshape(-1)[place] if isinstance(count, np.ndarray) else np.full(len(place), count)
            found[:, COLUMN[name]] += change
            if name not in _BY_KIND:
                continue
            # A forward pass comes to the first blocks first; backward passes, which give up what is kept, come to them last.
            last = np.sign(change) * np.maximum(np.abs(change) - others, 0)
            moved = np.where(change > 0, np.minimum(leading, change), last) if name == "blocks_kept" else last
            found[:, COLUMN[name]] -= moved
            found[:, COLUMN[_BY_KIND[name]]] += moved
        return found, place // where.shape[1]
