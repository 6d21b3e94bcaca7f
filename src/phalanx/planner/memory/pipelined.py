"""What a pipeline rank holds at the moments that may be its peak: several micro-batches in flight, gradients added up whole.

Of schedules with one stage a rank, or with backward passes that are split; ranks whose stages take turns are replayed
(`memory_turns`). See `memory_moments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import numpy as np

from phalanx.planner.memory.parts import PartBytes
from phalanx.planner.memory.state import Amount, Held, Rank


def moments_piped(rank: Rank) -> Iterator[tuple[str, Held]]:
    """Bytes by cause at each moment."""
    moments = _Piped(rank)
    yield from moments.of_the_head()
    yield from moments.of_the_blocks()
    yield from moments.of_the_next()
    yield from moments.of_the_end()


class _Piped:
    """The amounts that change from moment to moment."""

    def __init__(self, r: Rank) -> None:
        s, h = r.s, r.h
        self.r, self.s, self.h = r, s, h
        self.kept = _kept(r)
        self.state: Held = r.state | {"pipeline buffers": _buffers(r)}
        self.unsharded = np.where(r.whole, r.gathered + r.streamed, r.shard)
        stage = h.stage_layers * np.where(r.whole, r.block.gathered + r.block.streamed, r.block.shard)
        self.last_stage = stage + np.where(r.whole, r.head.gathered, r.head.shard)
        """Parameters of the stage whose gradients come first, as these are held."""
        self.before = s.master * self.unsharded * (h.again > 0)
        """Gradients of micro-batches before this one."""
        units = np.minimum(s.gathers_ahead, np.maximum(1, np.ceil(h.stage_layers / r.unit) - 1))
        self.ahead = s.sharded * r.dropped * r.arriving * units * r.unit * r.block.gathered
        """Of the blocks that are gathered ahead."""

    def held(self, **causes: Amount) -> Held:
        """These and what is held all the time."""
        return self.state | self.r.held(**causes)

    def gathered(self, now: Amount) -> Amount:
        """now: where parameters go after the forward pass."""
        return self.s.sharded * self.s.width * np.where(self.r.dropped, now, self.r.gathered)

    def of_the_head(self) -> Iterator[tuple[str, Held]]:
        """The head of the first micro-batches, forward and backward."""
        r, h, head = self.r, self.h, self.r.head
        others = self.kept + (h.heads_kept - 1) * head.kept * r.has_head
        gathered = self.gathered(head.gathered)
        yield (
            "forward of the head",
            self.held(
                gradients=self.before,
                activations=others + self.s.sizes.hidden * r.has_head,
                gathered_parameters=gathered,
                # In the first micro-batch of several, which has least else, it is gathered for all.
                gather_buffers=self.s.sharded * r.received * head.gathered * ~r.several,
                part=head.forward,
            ),
        )
        yield (
            "backward of the head",
            self.held(
                gradients=self.before,
                activations=others + head.kept,
                gathered_parameters=gathered,
                gather_buffers=self.ahead,
                part=head.backward,
            ),
        )

    def of_the_blocks(self) -> Iterator[tuple[str, Held]]:
        """The last and the first block of a stage backward."""
        r, s, h, block, head = self.r, self.s, self.h, self.r.block, self.r.head
        # Where gradients of weights come later, all stays for them, and what they are made from comes to it.
        after_head = self.kept + np.maximum(0, h.heads_kept - (1 - h.split)) * head.kept
        waiting = h.split * s.sizes.waiting
        yield (
            "backward of the last block",
            self.held(
                gradients=np.where(h.again > 0, self.before, s.master * head.count + block.coming),
                activations=after_head + waiting,
                gathered_parameters=self.gathered(r.unit * block.gathered + head.gathered),
                gather_buffers=self.ahead,
                part=block.backward,
            ),
        )
        # The stage whose backward pass comes first has all its gradients by its first block.
        mine = (h.stage_layers - 1) * np.where(r.whole, block.gathered + block.streamed, block.shard) + head.gathered
        yield (
            "backward of the first block",
            self.held(
                gradients=np.where(h.again > 0, self.before, s.master * mine + block.coming),
                activations=after_head - (h.stage_layers - 1) * block.kept * (1 - h.split) + h.stage_layers * waiting,
                gathered_parameters=self.gathered(r.gathered),
                part=block.backward,
            ),
        )

    def of_the_next(self) -> Iterator[tuple[str, Held]]:
        """The next micro-batch, if there is one: where as much is never held again, it finds the gradients of its stage
        whole."""
        r, s, h, block, head = self.r, self.s, self.h, self.r.block, self.r.head
        fewer = self.kept * np.maximum(0, h.stages_kept - 1) / h.stages_kept
        fewer = fewer + np.maximum(0, h.heads_kept - 2) * head.kept * r.has_head
        # A rank with several stages has the embedding in another one, which comes last.
        start = np.where(r.whole, r.embedding.gathered, r.embedding.shard)
        gradients = np.where(h.again > 0, self.before, s.master * (self.last_stage + start))
        several_heads = r.several & (h.heads_kept > 1)
        # The backward pass before has left all parameters gathered.
        found = {"gradients": gradients * r.several, "gathered_parameters": self.gathered(r.gathered)}
        activations = (fewer + head.kept * (h.heads_kept > 1)) * r.several
        yield (
            "next backward of the head",
            self.held(**found, activations=activations, part=head.backward * several_heads),
        )
        yield (
            "next backward of the last block",
            self.held(**found, activations=fewer * r.several, part=block.backward * r.several),
        )

    def of_the_end(self) -> Iterator[tuple[str, Held]]:
        """Gradients are reduced part by part, then comes the update."""
        r, s = self.r, self.s
        largest = _largest(r.block.times(r.unit), r.embedding, r.head)
        # Where nothing is shared out, the gradients are gone by the time their copy is divided.
        gone = largest.gathered * (r.whole & (s.sizes.shards == 1))
        own = s.width * largest.count * ~r.whole * s.sharded
        reducing = {"part": own, **r.reducing(largest, own)}
        yield (
            "gradients of the first part reduced",
            self.held(
                gradients=s.master * (self.unsharded - gone),
                # The part that is reduced has just given up its own.
                gathered_parameters=self.gathered(r.gathered) - s.sharded * s.width * largest.gathered,
                **reducing,
            ),
        )
        yield "update", self.held(gradients=s.master * r.shard)


def _kept(r: Rank) -> Amount:
    """Activations of all micro-batches in flight.

    Received ones are where they were received: a block that keeps its input keeps no second copy.
    """
    h, sizes = r.h, r.s.sizes
    kept = h.blocks_kept * r.block.kept + h.embeddings_kept * r.embedding.kept + h.stages_kept * sizes.shared
    handed_on = h.handed_on * (1 - h.waits_at_end)
    return kept + handed_on * sizes.hidden - h.received * sizes.block_input + h.waiting * sizes.waiting


def _buffers(r: Rank) -> Amount:
    """What is received and sent.

    Each receiving direction keeps the buffer that others are made like. With several stages a rank the step waits at its
    end for all it sent. Where the transport lets go before that, results stay until their backward pass, and gradients
    until the neighbour had a round of micro-batches to take them in.
    """
    h, count = r.h, r.s.accumulation
    received = h.gets + h.gives + h.received
    sent = count * (h.gives + h.gets) - h.received
    if not r.s.sends_last:
        sent = np.minimum(sent, h.handed_on + r.s.ranks * h.gets)
    return (received + h.waits_at_end * sent) * r.s.sizes.hidden


def _largest(*parts: PartBytes) -> PartBytes:
    largest: Callable[..., Amount] = np.maximum.reduce
    return PartBytes(
        **{f.name: largest([np.asarray(getattr(part, f.name)) for part in parts]) for f in fields(PartBytes)}
    )
