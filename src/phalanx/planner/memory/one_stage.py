"""What a rank without a pipeline holds at the moments that may be its peak: all of the model goes by, again and again.

See `memory_moments`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.planner.memory.parts import PartBytes
from phalanx.planner.memory.state import Amount, Held, Rank


def moments_alone(rank: Rank) -> Iterator[tuple[str, Held]]:
    """Bytes by cause at each moment."""
    moments = _Alone(rank)
    yield from moments.of_the_start()
    yield from moments.of_the_head()
    yield from moments.of_the_blocks()
    yield from moments.of_the_end()


class _Alone:
    """The amounts that change from moment to moment."""

    def __init__(self, r: Rank) -> None:
        self.r = r
        self.tied = int(r.s.tied)
        self.untied = 1 - self.tied
        self.kept = r.embedding.kept + r.s.sizes.shared + r.layers * r.block.kept
        self.root = self.tied * (r.embedding.gathered + r.head.gathered)
        """A table at both ends is gathered for a whole step."""
        self.head_gradient = self.tied * r.s.width * r.embedding.count
        self.table = r.embedding.gathered + self.tied * r.head.gathered
        # What the last reduction of a micro-batch was sent from goes only when the next one begins.
        self.lasting = r.sent * self.table * (r.early & r.several)

    def of_the_start(self) -> Iterator[tuple[str, Held]]:
        """The embedding and the last block forward, with what the micro-batch before leaves."""
        r, s, embedding, block = self.r, self.r.s, self.r.embedding, self.r.block
        ends = embedding.gathered + r.head.gathered
        yield (
            "forward of the embedding",
            r.held(
                gradients=self.gradients(0, 0) * r.several,
                gathered_parameters=self.gathered(r.layers * r.several, ends, embedding.gathered * self.untied),
                gather_buffers=s.sharded * r.received * embedding.gathered * (r.dropped | ~r.several),
                reduce_buffers=self.lasting + s.master * embedding.shard * (r.early & r.several),
                part=embedding.forward,
            ),
        )
        yield (
            "forward of the last block",
            r.held(
                gradients=self.gradients(0, 0) * r.several,
                activations=embedding.kept + s.sizes.shared + (r.layers - 1) * block.kept + s.sizes.hidden,
                gathered_parameters=self.gathered(
                    r.layers, ends * r.several + embedding.gathered, r.tail * block.gathered
                ),
                gather_buffers=s.sharded
                * (r.received * r.tail * block.gathered + r.arriving * r.head.gathered * self.untied)
                * (r.dropped | ~r.several),
                reduce_buffers=self.lasting,
                part=block.forward,
            ),
        )

    def of_the_head(self) -> Iterator[tuple[str, Held]]:
        """The head forward, backward, and its gradients on their way to other ranks."""
        r, s, head = self.r, self.r.s, self.r.head
        gradients = self.own_gradients(head) * self.untied
        hidden, own = s.sizes.hidden, head.gathered * self.untied
        both = r.embedding.gathered + head.gathered
        yield (
            "forward of the head",
            r.held(
                gradients=self.gradients(0, 0),
                activations=self.kept + hidden,
                gathered_parameters=self.gathered(r.layers, both, own),
                gather_buffers=s.sharded * r.received * own * ((s.zero == 3) | ~r.several),
                reduce_buffers=self.lasting,
                part=head.forward,
            ),
        )
        yield (
            "backward of the head",
            r.held(
                gradients=self.gradients(0, 0),
                activations=self.kept + head.kept,
                gathered_parameters=self.gathered(r.layers, both, own),
                gather_buffers=self.ahead(r.tail * r.block.gathered),
                reduce_buffers=self.lasting,
                part=head.backward,
            ),
        )
        yield (
            "gradients of the head reduced",
            r.held(
                gradients=self.gradients(0, 0),
                activations=self.kept + hidden,
                gathered_parameters=self.gathered(r.layers, r.embedding.gathered + self.root, 0),
                gather_buffers=self.ahead(r.tail * r.block.gathered),
                part=gradients + self.head_gradient,
                **r.reducing(head, gradients, self.untied),
            ),
        )

    def of_the_blocks(self) -> Iterator[tuple[str, Held]]:
        """The last two units of blocks and the first backward; what lies between is even."""
        r, layers, unit, tail = self.r, self.r.layers, self.r.unit, self.r.tail
        head, block = r.head.gathered, r.block.gathered
        yield from self._of_a_unit("the last block", layers, tail, head * self.untied)
        several = layers > tail
        left = np.where(several, layers - tail, layers)
        yield from self._of_a_unit("the last block but one", left, unit, np.where(several, tail * block, head))
        before = np.where(several, np.where(layers > unit + tail, unit, tail) * block, head * self.untied)
        yield from self._of_a_unit("the first block", unit, unit, before)

    def _of_a_unit(self, name: str, left: Amount, size: Amount, before: Amount) -> Iterator[tuple[str, Held]]:
        """left: blocks that are not done, those of this unit among them. size: blocks of the unit. before: parameters that
        were reduced before it."""
        r, s, block = self.r, self.r.s, self.r.block
        units = np.minimum(s.gathers_ahead, np.ceil((left - size) / r.unit))
        following = np.where(left > size, units * r.unit * block.gathered, r.embedding.gathered * self.untied)
        activations = r.embedding.kept + s.sizes.shared + left * block.kept
        own = self.own_gradients(block)

        def backward(done: Amount) -> Held:
            """Of the block that comes after so many of the unit."""
            return r.held(
                gradients=self.gradients(r.layers - left, self.untied, done) + block.coming * ~r.several,
                activations=activations - done * block.kept,
                gathered_parameters=self.gathered(left, self.table, size * block.gathered),
                gather_buffers=self.ahead(following),
                reduce_buffers=s.sharded * (r.early | ~r.several | r.whole) * r.sent * before,
                part=block.backward + self.head_gradient + done * own,
            )

        yield f"backward of {name}", backward(0)
        if s.gather_blocks > 1:
            yield f"backward of all that is gathered with {name}", backward(size - 1)
        yield (
            f"gradients of {name} reduced",
            r.held(
                gradients=self.gradients(r.layers - left, self.untied),
                activations=activations - size * block.kept + s.sizes.hidden,
                gathered_parameters=self.gathered(left - size, self.table, 0),
                gather_buffers=self.ahead(following),
                part=size * own + self.head_gradient,
                **r.reducing(block, size * own, size),
            ),
        )

    def of_the_end(self) -> Iterator[tuple[str, Held]]:
        """The embedding, and the update."""
        r, s, embedding = self.r, self.r.s, self.r.embedding
        yield (
            "backward of the embedding",
            r.held(
                gradients=self.gradients(r.layers, self.untied),
                activations=embedding.kept,
                gathered_parameters=self.gathered(0, self.table, embedding.gathered * self.untied),
                reduce_buffers=s.sharded * r.sent * r.unit * r.block.gathered,
                part=embedding.backward + self.head_gradient,
            ),
        )
        end = embedding.plus(r.head.times(self.tied))
        own = self.own_gradients(end)
        yield (
            "gradients of the embedding reduced",
            r.held(gradients=self.gradients(r.layers, self.untied), part=own, **r.reducing(end, own)),
        )
        yield "update", r.held(gradients=s.master * r.shard)

    def gathered(self, blocks: Amount, ends: Amount, now: Amount) -> Amount:
        """blocks, ends: still gathered where nothing is dropped; now: gathered where everything is."""
        r = self.r
        kept = blocks * r.block.gathered + ends
        return r.s.sharded * r.s.width * np.where(r.dropped, now + self.root, kept)

    def ahead(self, parameters: Amount) -> Amount:
        """Of what is gathered ahead."""
        return self.r.s.sharded * self.r.dropped * self.r.arriving * parameters

    def gradients(self, blocks: Amount, with_head: Amount, streamed: Amount = 0) -> Amount:
        """Gradients added up once this much has been reduced in the last micro-batch.

        streamed: further blocks whose streamed matrices have theirs.
        """
        r, s = self.r, self.r.s
        block, head = r.block, r.head
        reduced = blocks * block.shard + with_head * head.shard + streamed * block.streamed
        left = r.gathered - blocks * block.gathered - with_head * head.gathered
        return s.master * np.where(r.whole, reduced + left, np.where(r.several, r.shard, reduced))

    def own_gradients(self, part: PartBytes) -> Amount:
        """Gradients in the format they are computed in; added up already where they wait for the last micro-batch."""
        return self.r.s.width * part.count * ~self.r.whole
