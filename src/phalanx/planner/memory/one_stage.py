"""What a rank without a pipeline holds when it may hold most, as counts: its table is forward, backward, again and again.

All micro-batches are alike, so the last one says all, with what those before have left. A backward pass frees activations of
one block after another while gradients take their place; all of that is even, so only the first and the last units of
blocks that are gathered together matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from phalanx.planner.memory.replay import COLUMN, COUNTS, PeakCandidates

Row = Mapping[str, float]
"""Counts by name, those that are 0 left out."""


@dataclass(frozen=True)
class OneStage:
    """A step of a rank that holds all of the model, as far as it decides what is held."""

    n_layers: int
    gather_blocks: int
    """Blocks that are gathered together."""
    gathers_ahead: int
    """Units that are gathered while one computes."""
    tied: bool
    """Whether both ends of the model share a table: FSDP2's root module then gathers it for a whole step."""
    several: bool
    """Whether a step has several micro-batches."""
    whole: bool
    """Whether gradients are added up whole until the last micro-batch; else they are reduced after each."""
    dropped: bool
    """Whether gathered parameters go after each block's forward pass."""
    gathered_again: bool
    """Whether each micro-batch gathers the parameters, as ZeRO-3 does."""


@cache
def one_stage_candidates(step: OneStage) -> PeakCandidates:
    """Return the counts at the moments of a step that may be its peak."""
    named = list(_rows(step))
    counts = np.zeros((len(named), len(COUNTS)))
    for row, (_, values) in zip(counts, named, strict=True):
        for name, count in values.items():
            row[COLUMN[name]] = count
    return PeakCandidates(counts, np.zeros(len(named), np.int64), [name for name, _ in named])


def _rows(p: OneStage) -> Iterator[tuple[str, Row]]:
    layers, tied, untied = p.n_layers, float(p.tied), float(not p.tied)
    unit, tail = min(p.gather_blocks, layers), (layers - 1) % p.gather_blocks + 1
    state = {"layers": layers, "embedding": 1, "head": 1}
    kept = {"embeddings_kept": 1, "stages_kept": 1}
    # What the last reduction of a micro-batch was sent from goes only when the next one begins.
    reduces_each = p.several and not p.whole
    lasting = {"sent_embedding": 1, "sent_head": tied} if reduces_each else {}
    first_gather = p.dropped or not p.several

    def gathered(stay: Row, now: Row) -> dict[str, float]:
        """stay: gathered where nothing is dropped; now: gathered where everything is, beside a shared table."""
        if not p.dropped:
            return {f"gathered_{name}": count for name, count in stay.items()}
        root = {"embedding": tied, "head": tied}
        return {f"gathered_{name}": now.get(name, 0) + root.get(name, 0) for name in {**now, **root}}

    def gradients(blocks: float, head: float, streamed: float = 0) -> dict[str, float]:
        """Gradients added up once this much has been reduced in the last micro-batch.

        streamed: further blocks whose streamed matrices have theirs.
        """
        if p.whole:
            left = {"whole_blocks": layers - blocks, "whole_embedding": 1, "whole_head": 1 - head}
            return {**left, "shared_blocks": blocks, "shared_head": head}
        if p.several:
            return {"shared_blocks": layers, "shared_embedding": 1, "shared_head": 1}
        return {"shared_blocks": blocks, "shared_head": head, "streamed_gradients": streamed}

    def arriving(of: Row) -> dict[str, float]:
        return {f"arriving_{name}": count for name, count in of.items()} if p.dropped else {}

    before = gradients(0, 0)
    yield (
        "forward of the embedding",
        {
            **(state | before | lasting),
            **({"summed_embedding": 1} if reduces_each else {}),
            **gathered({"blocks": layers * p.several, "embedding": 1, "head": 1}, {"embedding": untied}),
            "arrived_embedding": first_gather,
            "embedding_forward": 1,
        },
    )
    yield (
        "forward of the last block",
        {
            **(state | before | kept | lasting),
            "blocks_kept": layers - 1,
            "results": 1,
            **gathered({"blocks": layers, "embedding": 1, "head": p.several}, {"blocks": tail}),
            "arrived_blocks": tail * first_gather,
            "arriving_head": untied * first_gather,
            "block_forward": 1,
        },
    )
    ends = gathered({"blocks": layers, "embedding": 1, "head": 1}, {"head": untied})
    yield (
        "forward of the head",
        {
            **(state | before | kept | lasting | ends),
            "blocks_kept": layers,
            "results": 1,
            "arrived_head": untied * (p.gathered_again or not p.several),
            "head_forward": 1,
        },
    )
    yield (
        "backward of the head",
        {
            **(state | before | kept | lasting | ends | arriving({"blocks": tail})),
            "blocks_kept": layers,
            "heads_kept": 1,
            "head_backward": 1,
        },
    )
    yield (
        "gradients of the head reduced",
        {
            **(state | before | kept | arriving({"blocks": tail})),
            **gathered({"blocks": layers, "embedding": 1, "head": tied}, {}),
            "blocks_kept": layers,
            "results": 1,
            "own_head": untied,
            "tied_gradient": tied,
            "head_reduced": untied,
        },
    )

    def unit_rows(name: str, left: int, size: int, sent: Row) -> Iterator[tuple[str, Row]]:
        """left: blocks that are not done, those of this unit among them. size: blocks of the unit. sent: what was reduced
        before it."""
        units = min(p.gathers_ahead, -(-(left - size) // unit))
        ahead = arriving({"blocks": units * unit} if left > size else {"embedding": untied})

        def backward(done: int) -> Row:
            """Of the block that comes after so many of the unit."""
            return {
                **(state | kept | ahead),
                **gradients(layers - left, untied, done),
                **gathered({"blocks": left, "embedding": 1, "head": tied}, {"blocks": size}),
                **{f"sent_{part}": count for part, count in sent.items()},
                "coming": not p.several,
                "blocks_kept": left - done,
                "block_backward": 1,
                "tied_gradient": tied,
                "own_blocks": done,
            }

        yield f"backward of {name}", backward(0)
        if p.gather_blocks > 1:
            yield f"backward of all that is gathered with {name}", backward(size - 1)
        yield (
            f"gradients of {name} reduced",
            {
                **(state | kept | ahead),
                **gradients(layers - left, untied),
                **gathered({"blocks": left - size, "embedding": 1, "head": tied}, {}),
                "blocks_kept": left - size,
                "results": 1,
                "own_blocks": size,
                "tied_gradient": tied,
                "blocks_reduced": size,
            },
        )

    yield from unit_rows("the last block", layers, tail, {"head": untied})
    if layers > tail:
        yield from unit_rows("the last block but one", layers - tail, unit, {"blocks": tail})
        yield from unit_rows("the first block", unit, unit, {"blocks": unit if layers > unit + tail else tail})
    yield (
        "backward of the embedding",
        {
            **(state | gradients(layers, untied)),
            **gathered({"embedding": 1, "head": tied}, {"embedding": untied}),
            "embeddings_kept": 1,
            "sent_blocks": unit,
            "embedding_backward": 1,
            "tied_gradient": tied,
        },
    )
    end = {"own_embedding": 1, "own_head": tied, "embedding_reduced": 1, "head_reduced": tied}
    yield "gradients of the embedding reduced", {**(state | gradients(layers, untied)), **end}
    yield "update", {**state, "shared_blocks": layers, "shared_embedding": 1, "shared_head": 1}
