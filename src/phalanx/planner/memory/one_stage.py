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
    offloads: bool = False
    """Whether activations of all blocks but the last are in host memory while they do not compute."""
    leading: int = 0
    """Leading blocks of the model. Of their passes only that of the first block behind them is among the moments."""


@cache
def one_stage_candidates(step: OneStage) -> PeakCandidates:
    """Return the counts at the moments of a step that may be its peak."""
    named = list(StepMoments(step).rows())
    counts = np.zeros((len(named), len(COUNTS)))
    for row, (_, values) in zip(counts, named, strict=True):
        for name, count in values.items():
            row[COLUMN[name]] = count
        # Leading blocks are of another size: their share of each count moves to a column of its own.
        for blocks, (name, moved) in leading_counts(step, values).items():
            row[COLUMN[blocks]] -= moved
            row[COLUMN[name]] += moved
    return PeakCandidates(counts, np.zeros(len(named), np.int64), [name for name, _ in named])


def leading_counts(step: OneStage, row: Row) -> dict[str, tuple[str, float]]:
    """Return the names of counts of blocks with those of the same counts of leading blocks, and how many blocks lead."""
    leading, others = step.leading, step.n_layers - step.leading
    kept, whole, shared = (row.get(name, 0) for name in ("blocks_kept", "whole_blocks", "shared_blocks"))
    # What is dropped after each pass is gathered for the blocks that are looked at.
    gathered = 0 if step.dropped else row.get("gathered_blocks", 0)
    present = row.get("blocks_present", 0)
    return {
        "layers": ("leading", leading),
        # Present are the last ones of those kept.
        "blocks_present": ("leading_present", min(present, max(0, leading - (kept - present)))),
        "blocks_kept": ("leading_kept", min(leading, kept)),
        "whole_blocks": ("whole_leading", min(leading, whole)),
        "shared_blocks": ("shared_leading", max(0, shared - others)),
        "gathered_blocks": ("gathered_leading", min(leading, gathered)),
        "updated_blocks": ("updated_leading", max(0, row.get("updated_blocks", 0) - others)),
    }


class StepMoments:
    """The moments of one optimizer step of a rank that has the whole model, in their order, and what each adds."""

    def __init__(self, step: OneStage) -> None:
        self.step = step
        self.layers = step.n_layers
        self.tied, self.untied = float(step.tied), float(not step.tied)
        self.unit = min(step.gather_blocks, self.layers)
        self.tail = (self.layers - 1) % step.gather_blocks + 1
        """Blocks of the last unit."""
        self.state: dict[str, float] = {"layers": self.layers, "embedding": 1, "head": 1}
        self.kept: dict[str, float] = {"embeddings_kept": 1, "stages_kept": 1}
        self.reduces_each = step.several and not step.whole
        # What the last reduction of a micro-batch was sent from goes only when the next one begins.
        self.lasting: dict[str, float] = {"sent_embedding": 1, "sent_head": self.tied} if self.reduces_each else {}
        self.first_gather = step.dropped or not step.several

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the name and the counts of every moment."""
        yield from self.forward_rows()
        yield from self.head_backward_rows()
        yield from self.unit_rows("the last block", self.layers, self.tail, {"head": self.untied})
        # With a single unit its own rows are all there is.
        if self.layers > self.tail:
            yield from self.unit_rows(
                "the last block but one", self.layers - self.tail, self.unit, {"blocks": self.tail}
            )
            first = min(self.unit + self.step.leading, self.layers - self.tail)
            second = first + self.unit
            if self.step.offloads and second < self.layers - self.tail:
                # Offloaded activations are as many until here, while gradients have grown.
                yield from self.unit_rows("the second block", second, self.unit, {"blocks": self.unit})
            yield from self.unit_rows(
                "the first block",
                first,
                self.unit,
                {"blocks": self.unit if self.layers > first + self.tail else self.tail},
            )
        yield from self.embedding_backward_rows()

    def forward_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the moments of the forward pass."""
        before = self.gradients(0, 0)
        yield (
            "forward of the embedding",
            {
                **(self.state | before | self.lasting),
                **({"summed_embedding": 1} if self.reduces_each else {}),
                **self.gathered(
                    {"blocks": self.layers * self.step.several, "embedding": 1, "head": 1}, {"embedding": self.untied}
                ),
                "arrived_embedding": self.first_gather,
                "embedding_forward": 1,
            },
        )
        yield (
            "forward of the last block",
            {
                **(self.state | before | self.kept | self.lasting),
                "blocks_kept": self.layers - 1,
                **self.present(self.layers - 1, 1),
                "results": 1,
                **self.gathered(
                    {"blocks": self.layers, "embedding": 1, "head": self.step.several}, {"blocks": self.tail}
                ),
                "arrived_blocks": self.tail * self.first_gather,
                "arriving_head": self.untied * self.first_gather,
                "block_forward": 1,
            },
        )
        ends = self.head_gathered()
        yield (
            "forward of the head",
            {
                **(self.state | before | self.kept | self.lasting | ends),
                "blocks_kept": self.layers,
                **self.present(self.layers, 1),
                "results": 1,
                "arrived_head": self.untied * (self.step.gathered_again or not self.step.several),
                "head_forward": 1,
            },
        )

    def head_backward_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the moments of the head's backward pass."""
        before, ends = self.gradients(0, 0), self.head_gathered()
        yield (
            "backward of the head",
            {
                **(self.state | before | self.kept | self.lasting | ends | self.arriving({"blocks": self.tail})),
                "blocks_kept": self.layers,
                **self.present(self.layers, 1),
                "heads_kept": 1,
                "head_backward": 1,
            },
        )
        yield (
            "gradients of the head reduced",
            {
                **(self.state | before | self.kept | self.arriving({"blocks": self.tail})),
                **self.gathered({"blocks": self.layers, "embedding": 1, "head": self.tied}, {}),
                "blocks_kept": self.layers,
                **self.present(self.layers, 1),
                "results": 1,
                "own_head": self.untied,
                "tied_gradient": self.tied,
                "head_reduced": self.untied,
            },
        )

    def unit_rows(self, name: str, left: int, size: int, sent: Row) -> Iterator[tuple[str, Row]]:
        """Yield the moments of the backward pass of one unit of blocks that are gathered together.

        left: blocks that are not done, those of this unit among them. size: blocks of the unit. sent: what was reduced
        before it.
        """
        units = min(self.step.gathers_ahead, -(-(left - size) // self.unit))
        ahead = self.arriving({"blocks": units * self.unit} if left > size else {"embedding": self.untied})

        def backward(done: int) -> Row:
            """Return the counts at the block that comes after `done` blocks of the unit."""
            return {
                **(self.state | self.kept | ahead),
                **self.gradients(self.layers - left, self.untied, done),
                **self.gathered({"blocks": left, "embedding": 1, "head": self.tied}, {"blocks": size}),
                **{f"sent_{part}": count for part, count in sent.items()},
                "pending": not self.step.several,
                "blocks_kept": left - done,
                **self.present(left - done, 2),
                "block_backward": 1,
                "tied_gradient": self.tied,
                "own_blocks": done,
            }

        def experts_reduced(done: int) -> Row:
            """Return the counts as the experts of that block are reduced, for which what was sent before is given up."""
            counts = {count: value for count, value in backward(done).items() if not count.startswith("sent_")}
            return {**counts, "block_backward": 0, "experts_reduced": 1}

        yield f"backward of {name}", backward(0)
        yield f"experts of {name} reduced", experts_reduced(0)
        # Gradients of a unit stay whole until all its blocks are done.
        if self.step.gather_blocks > 1:
            yield f"backward of all that is gathered with {name}", backward(size - 1)
            yield f"experts of all that is gathered with {name} reduced", experts_reduced(size - 1)
        yield (
            f"gradients of {name} reduced",
            {
                **(self.state | self.kept | ahead),
                **self.gradients(self.layers - left, self.untied),
                **self.gathered({"blocks": left - size, "embedding": 1, "head": self.tied}, {}),
                "blocks_kept": left - size,
                **self.present(left - size, 1),
                "results": 1,
                "own_blocks": size,
                "tied_gradient": self.tied,
                "blocks_reduced": size,
            },
        )

    def embedding_backward_rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the moments after the blocks' backward passes: the embedding's, and the update."""
        yield (
            "backward of the embedding",
            {
                **(self.state | self.gradients(self.layers, self.untied)),
                **self.gathered({"embedding": 1, "head": self.tied}, {"embedding": self.untied}),
                "embeddings_kept": 1,
                "sent_blocks": self.unit,
                "embedding_backward": 1,
                "tied_gradient": self.tied,
            },
        )
        end = {"own_embedding": 1, "own_head": self.tied, "embedding_reduced": 1, "head_reduced": self.tied}
        yield "gradients of the embedding reduced", {**(self.state | self.gradients(self.layers, self.untied)), **end}
        updated = {"updated_blocks": self.layers, "updated_embedding": 1, "updated_head": 1, "updates": 1}
        yield "update", {**self.state, **updated, "shared_blocks": self.layers, "shared_embedding": 1, "shared_head": 1}

    def present(self, left: int, most: int) -> dict[str, float]:
        """Return the count of blocks whose activations are on the device, where they are offloaded.

        left: blocks that keep activations. most: of them on the device.
        """
        return {"blocks_present": min(left, most)} if self.step.offloads else {}

    def head_gathered(self) -> dict[str, float]:
        """Return what is gathered while the head computes."""
        return self.gathered({"blocks": self.layers, "embedding": 1, "head": 1}, {"head": self.untied})

    def gathered(self, stay: Row, now: Row) -> dict[str, float]:
        """Return the counts of gathered parameters.

        stay: what is gathered where nothing is dropped. now: what is gathered where everything is, beside a shared table.
        """
        if not self.step.dropped:
            return {f"gathered_{name}": count for name, count in stay.items()}
        # A shared table belongs to the root module, which stays gathered.
        root = {"embedding": self.tied, "head": self.tied}
        return {f"gathered_{name}": now.get(name, 0) + root.get(name, 0) for name in {**now, **root}}

    def gradients(self, blocks: float, head: float, streamed: float = 0) -> dict[str, float]:
        """Return the counts of gradients once this much has been reduced in the last micro-batch.

        streamed: further blocks whose streamed matrices have theirs.
        """
        if self.step.whole:
            left = {"whole_blocks": self.layers - blocks, "whole_embedding": 1, "whole_head": 1 - head}
            return {**left, "shared_blocks": blocks, "shared_head": head}
        if self.step.several:
            return {"shared_blocks": self.layers, "shared_embedding": 1, "shared_head": 1}
        return {"shared_blocks": blocks, "shared_head": head, "streamed_gradients": streamed}

    def arriving(self, of: Row) -> dict[str, float]:
        """Return the counts of parameters on their way, where they were dropped."""
        return {f"arriving_{name}": count for name, count in of.items()} if self.step.dropped else {}
