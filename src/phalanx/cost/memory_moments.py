"""The moments of an optimizer step at which a rank may hold most, and what it holds then, cause by cause.

One arithmetic for a single layout and for a million: every number may be an array. A backward pass frees the activations of
one block after another while gradients take their place; all of that is even, so only its first and last blocks matter.
What FSDP2 holds is read from its code (torch 2.11 to 2.13): a block's parameters are gathered while the one before computes,
and the buffer that gradients were reduced from lives until the next block's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.cost.memory_parts import ModelBytes, PartBytes
from phalanx.cost.memory_stages import Holdings

Amount = Any
"""Bytes: a number or an array."""
Mask = npt.NDArray[np.bool_]

CAUSES = (
    "master parameters",
    "working copy",
    "gradients",
    "optimizer moments",
    "activations",
    "gathered parameters",
    "gather buffers",
    "reduce buffers",
    "one part's pass",
    "pipeline buffers",
    "samples",
)
"""What memory is held for. Gradients are those added up; those of the part that computes belong to its pass."""
MOMENTS = (
    "forward of the head",
    "backward of the head",
    "gradients of the head reduced",
    "backward of the last block",
    "gradients of the last block reduced",
    "backward of the last block but one",
    "gradients of the last block but one reduced",
    "backward of the first block",
    "gradients of the first block reduced",
    "next backward of the head",
    "next backward of the last block",
    "backward of the embedding",
    "gradients of the embedding reduced",
    "gradients of the first part reduced",
    "update",
)


@dataclass(frozen=True)
class Situation:
    """One rank of each layout and everything that decides what it holds. Arrays, but for the two widths."""

    sizes: ModelBytes
    holds: Holdings
    width: int
    """Bytes of a parameter as it is computed with."""
    master: int
    """Bytes of a parameter as it is kept, of its gradient, and of each of its two moments."""
    sharded: Mask
    """Whether FSDP2 has the parameters: more than one data- or context-parallel rank."""
    piped: Mask
    zero: Amount
    reshard: Mask
    """Whether gathered parameters go after the forward pass."""
    replicated: Mask
    """Whether other ranks hold the same shards."""
    accumulation: Amount
    tied: bool
    samples: Amount
    """Bytes of the token ids and targets of a step."""
    peer_copies: bool = False
    """Whether what FSDP2 sends and receives lies beside the allocator's memory."""

    def take(self, which: Any) -> Situation:
        """Those at these positions."""
        arrays = ("sharded", "piped", "zero", "reshard", "replicated", "accumulation", "samples")
        values = {name: getattr(self, name)[which] for name in arrays}
        return replace(self, sizes=self.sizes.take(which), holds=self.holds.take(which), **values)


Held = dict[str, Amount]


def moments(situation: Situation) -> Iterator[tuple[str, Held]]:
    """Bytes by cause at each moment, for layouts of which either all have a pipeline or none."""
    rank = _Rank(situation)
    yield from _piped(rank) if np.all(situation.piped) else _alone(rank)


def peer_buffer_bytes(situation: Situation) -> Amount:
    """Most bytes of the buffers of `layout.peer_copies`, which lie beside the allocator's memory; 0 without peer copies.

    Gathering takes turns between three buffers of a block's size, one that is read, one that is filled and one that peers
    may still read, and one for the ends of the model; what is reduced has one of each size.
    """
    r = _Rank(situation)
    if not situation.peer_copies:
        return 0 * r.shard
    ends = r.embedding.gathered + r.head.gathered
    gathering = situation.width * (3 * r.block.gathered + np.maximum(r.embedding.gathered, r.head.gathered))
    sent = np.where(r.whole, situation.master, situation.width)
    return (r.sharded_many) * (gathering + sent * (r.block.gathered + ends))


class _Rank:
    """The amounts that several moments share."""

    def __init__(self, s: Situation) -> None:
        h = s.holds
        self.s, self.h = s, h
        self.layers = h.layers
        self.block = s.sizes.block
        self.embedding = s.sizes.embedding.times(h.embedding)
        self.head = s.sizes.head.times(h.head)
        self.has_head = h.head > 0
        self.root: PartBytes | None = None
        """A table at both ends of a rank, and what FSDP2 keeps with it: gathered for a whole step, reduced last."""
        self.several = s.accumulation > 1
        self.early = s.sharded & (s.zero >= 2) & ~s.piped
        """Gradients are reduced after every micro-batch."""
        self.whole = s.sharded & ~self.early & self.several
        """Gradients are added up before they are shared out."""
        self.dropped = s.sharded & s.reshard & (s.zero == 3)
        """Gathered parameters go after each block's forward pass."""
        shard = self.layers * self.block.shard + self.embedding.shard + self.head.shard
        count = self.layers * self.block.count + self.embedding.count + self.head.count
        self.shard = shard
        self.gathered = self.layers * self.block.gathered + self.embedding.gathered + self.head.gathered
        copied = s.width if s.width < s.master else 0
        self.state: Held = {
            "master parameters": s.master * shard,
            "working copy": copied * count * ~s.sharded,
            "optimizer moments": 2 * s.master * shard,
            "samples": s.samples,
        }
        self.sharded_many = s.sharded & (s.sizes.shards > 1)
        self.sent = 0 if s.peer_copies else s.master
        """Bytes of a parameter's gradient in the buffer it is sent from."""
        self.received = np.where(s.sizes.shards > 1, 0 if s.peer_copies else s.width, 0)
        # With peer copies what arrives is gathered before it is added up; one rank of shards divides a copy.
        self.added = np.where(s.sizes.shards > 1, s.width if s.peer_copies else 0, s.master)

    def held(self, **causes: Amount) -> Held:
        """These and the state; spaces in names are written `_`, `part` is one part's pass."""
        causes["one part's pass"] = causes.pop("part", 0)
        return self.state | {name.replace("_", " "): amount for name, amount in causes.items()}

    def reducing(self, part: PartBytes) -> Held:
        """What FSDP2 makes to reduce one part's gradients."""
        reduced = (self.sent + self.added) * part.gathered + self.s.master * part.shard
        return {"reduce_buffers": self.s.sharded * reduced}


# --- without a pipeline ------------------------------------------------------------------------------------------------


def _alone(r: _Rank) -> Iterator[tuple[str, Held]]:
    s, block, head, embedding = r.s, r.block, r.head, r.embedding
    sharded, layers, hidden = s.sharded, r.layers, s.sizes.hidden
    kept = embedding.kept + s.sizes.shared + layers * block.kept
    tied = int(s.tied)
    root = tied * (embedding.gathered + head.gathered)
    # What the last reduction of a micro-batch was sent from goes only when the next one begins.
    last_reduced = embedding.gathered + tied * head.gathered
    lasting = r.sent * last_reduced * (r.early & r.several)
    head_gradient = tied * s.width * embedding.count

    def gathered(blocks: Amount, ends: Amount, now: Amount) -> Amount:
        """blocks, ends: still gathered where nothing is dropped; now: gathered where everything is."""
        return sharded * s.width * np.where(r.dropped, now + root, blocks * block.gathered + ends)

    def ahead(part: PartBytes) -> Amount:
        """The buffer of the part that is gathered ahead."""
        return sharded * r.dropped * r.received * part.gathered

    def gradients(blocks: Amount, with_head: Amount, with_embedding: Amount = 0) -> Amount:
        """Gradients added up once this much has been reduced in the last micro-batch."""
        reduced = blocks * block.shard + with_head * head.shard + with_embedding * embedding.shard
        left = r.gathered - blocks * block.gathered - with_head * head.gathered - with_embedding * embedding.gathered
        last = np.where(r.whole, reduced + left, np.where(r.several, r.shard, reduced))
        # Summed over replicas after every micro-batch: each sum is kept until the next one of its part.
        summed = np.where(s.accumulation > 2, r.shard, reduced) * (s.accumulation > 1)
        return s.master * (last + summed * (r.early & s.replicated))

    def own_gradients(part: PartBytes) -> Amount:
        """Gradients in the format they are computed in; added up already where they wait for the last micro-batch."""
        return s.width * part.count * ~r.whole

    both = embedding.gathered + head.gathered
    untied = 1 - tied
    yield (
        "forward of the head",
        r.held(
            gradients=gradients(0, 0),
            activations=kept + hidden,
            gathered_parameters=gathered(layers, both, head.gathered * untied),
            gather_buffers=sharded * r.received * head.gathered * untied * ((s.zero == 3) | ~r.several),
            reduce_buffers=lasting,
            part=head.forward,
        ),
    )
    yield (
        "backward of the head",
        r.held(
            gradients=gradients(0, 0),
            activations=kept + head.kept,
            gathered_parameters=gathered(layers, both, head.gathered * untied),
            gather_buffers=ahead(block),
            reduce_buffers=lasting,
            part=head.backward,
        ),
    )
    yield (
        "gradients of the head reduced",
        r.held(
            gradients=gradients(0, 0),
            activations=kept + hidden,
            gathered_parameters=gathered(layers, embedding.gathered + root, 0),
            gather_buffers=ahead(block),
            part=own_gradients(head) * untied + head_gradient,
            **r.reducing(head.times(untied)),
        ),
    )
    places: list[tuple[str, Amount, Amount]] = [
        ("the last block", layers, head.gathered * untied),
        ("the last block but one", np.maximum(1, layers - 1), np.where(layers > 1, block.gathered, head.gathered)),
        ("the first block", 1, np.where(layers > 1, block.gathered, head.gathered * untied)),
    ]
    for name, left, before in places:
        following = _either(left > 1, block, embedding.times(untied))
        activations = embedding.kept + s.sizes.shared + left * block.kept
        yield (
            f"backward of {name}",
            r.held(
                gradients=gradients(layers - left, untied),
                activations=activations,
                gathered_parameters=gathered(left, embedding.gathered + tied * head.gathered, block.gathered),
                gather_buffers=ahead(following),
                reduce_buffers=sharded * (r.early | ~r.several | r.whole) * r.sent * before,
                part=block.backward + head_gradient,
            ),
        )
        yield (
            f"gradients of {name} reduced",
            r.held(
                gradients=gradients(layers - left, untied),
                activations=activations - block.kept + hidden,
                gathered_parameters=gathered(left - 1, embedding.gathered + tied * head.gathered, 0),
                gather_buffers=ahead(following),
                part=own_gradients(block) + head_gradient,
                **r.reducing(block),
            ),
        )
    yield (
        "backward of the embedding",
        r.held(
            gradients=gradients(layers, untied),
            activations=embedding.kept,
            gathered_parameters=gathered(0, embedding.gathered + tied * head.gathered, embedding.gathered * untied),
            reduce_buffers=sharded * r.sent * block.gathered,
            part=embedding.backward + head_gradient,
        ),
    )
    end = embedding.plus(head.times(tied))
    yield (
        "gradients of the embedding reduced",
        r.held(gradients=gradients(layers, untied), part=own_gradients(end), **r.reducing(end)),
    )
    yield "update", r.held(gradients=s.master * r.shard)


def _either(condition: Mask, one: PartBytes, other: PartBytes) -> PartBytes:
    values = {f.name: np.where(condition, getattr(one, f.name), getattr(other, f.name)) for f in fields(PartBytes)}
    return PartBytes(**values)


# --- in a pipeline -----------------------------------------------------------------------------------------------------


def _piped(r: _Rank) -> Iterator[tuple[str, Held]]:
    s, h, block, head, embedding = r.s, r.h, r.block, r.head, r.embedding
    sizes, sharded = s.sizes, s.sharded
    # Received activations are where they were received: a block that keeps its input keeps no second copy.
    kept = (
        h.blocks_kept * block.kept
        + h.embeddings_kept * embedding.kept
        + h.stages_kept * sizes.shared
        + h.handed_on * sizes.hidden
        - h.received * sizes.block_input
    )
    kept = kept + h.waiting * sizes.waiting
    # Each receiving direction keeps the buffer that others are made like; the last stage's losses keep what it received.
    count = s.accumulation
    received = h.not_first + h.not_last + h.received + h.head * (count - h.heads_kept)
    sent = h.keeps_sent * (count * (h.not_last + h.not_first) - h.received)
    buffers = (received + sent) * sizes.hidden
    state = r.state | {"pipeline buffers": buffers}
    unsharded = np.where(r.whole, r.gathered, r.shard)
    before = s.master * unsharded * (h.again > 0)

    def held(**causes: Amount) -> Held:
        return state | r.held(**causes)

    def gathered(now: Amount) -> Amount:
        """now: where parameters go after the forward pass."""
        return sharded * s.width * np.where(r.dropped, now, r.gathered)

    all_heads = kept + (h.heads_kept - 1) * head.kept * r.has_head
    ahead = sharded * r.dropped * r.received * block.gathered
    yield (
        "forward of the head",
        held(
            gradients=before,
            activations=all_heads + sizes.hidden * r.has_head,
            gathered_parameters=gathered(head.gathered + (h.layers - h.stage_layers) * block.gathered),
            gather_buffers=sharded * r.received * head.gathered * r.dropped,
            part=head.forward,
        ),
    )
    yield (
        "backward of the head",
        held(
            gradients=before,
            activations=all_heads + head.kept,
            gathered_parameters=gathered(head.gathered + (h.layers - h.stage_layers) * block.gathered),
            gather_buffers=ahead,
            part=head.backward,
        ),
    )
    after_head = kept + np.maximum(0, h.heads_kept - 1) * head.kept
    started = np.where(h.again > 0, before, s.master * r.head.count)
    yield (
        "backward of the last block",
        held(
            gradients=started,
            activations=after_head,
            gathered_parameters=gathered((1 + h.layers - h.stage_layers) * block.gathered + head.gathered),
            gather_buffers=ahead,
            part=block.backward,
        ),
    )
    # The stage whose backward pass comes first has all its gradients by its first block.
    mine = (h.stage_layers - 1) * np.where(r.whole, block.gathered, block.shard) + head.gathered
    yield (
        "backward of the first block",
        held(
            gradients=np.where(h.again > 0, before, s.master * mine),
            activations=after_head - (h.stage_layers - 1) * block.kept,
            gathered_parameters=gathered(r.gathered),
            part=block.backward,
        ),
    )
    # Where as much is never held again, the next micro-batch of that stage finds its gradients whole.
    fewer = kept * np.maximum(0, h.stages_kept - 1) / h.stages_kept
    whole = s.master * np.where(r.whole, h.stage_layers * block.gathered, h.stage_layers * block.shard) + s.master * (
        np.where(r.whole, head.gathered + embedding.gathered, head.shard + embedding.shard)
    )
    next_gradients = np.where(h.again > 0, before, whole)
    fewer_heads = fewer + np.maximum(0, h.heads_kept - 2) * head.kept * r.has_head
    yield (
        "next backward of the head",
        held(
            gradients=next_gradients,
            activations=fewer_heads + head.kept * (h.heads_kept > 1),
            gathered_parameters=gathered(r.gathered),
            gather_buffers=ahead,
            part=head.backward * (h.heads_kept > 1),
        ),
    )
    yield (
        "next backward of the last block",
        held(
            gradients=next_gradients,
            activations=fewer_heads,
            gathered_parameters=gathered(r.gathered),
            gather_buffers=ahead,
            part=block.backward,
        ),
    )
    largest = _largest(block, embedding, head)
    yield (
        "gradients of the first part reduced",
        held(
            gradients=s.master * unsharded,
            gathered_parameters=gathered(r.gathered),
            part=s.width * largest.count * ~r.whole * sharded,
            **r.reducing(largest),
        ),
    )
    yield "update", held(gradients=s.master * r.shard)


def _largest(*parts: PartBytes) -> PartBytes:
    largest: Callable[..., Amount] = np.maximum.reduce
    return PartBytes(
        **{f.name: largest([np.asarray(getattr(part, f.name)) for part in parts]) for f in fields(PartBytes)}
    )
