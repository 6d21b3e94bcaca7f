"""Bytes and elements of a model's parts for many layouts at a time: what `planner.trace.part_costs` traces, as arrays.

Parts are traced once for each tensor- and context-parallel degree, kind of recompute and micro-batch among the candidates;
what shards hold is counted once for each tensor-parallel and shard degree. Layouts then look both up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.layout.spec import Ints, LayoutTable
from phalanx.planner.trace.part_costs import PartCosts, part_costs
from phalanx.planner.trace.traced_model import Kernel, PartName, Setting, TracedModel

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PartBytes:
    """One part of the model on one rank; every field is an array with one entry for each candidate."""

    kept: FloatArray
    """Bytes held from its forward to its backward pass, for each micro-batch."""
    forward: FloatArray
    """Most bytes it makes in its forward pass, what is kept among them."""
    backward: FloatArray
    """Most bytes in its backward pass beside what is kept: incoming gradient, temporaries, gradients of parameters."""
    coming: FloatArray
    """Bytes more in the first micro-batch's, of gradients that others find."""
    count: FloatArray
    """Parameters, before data parallelism shares them out; streamed ones are no part of it."""
    shard: FloatArray
    """Parameters one of the shards holds, whole rows: padding counts."""
    gathered: FloatArray
    """Parameters in a buffer that holds all shards: padding counts."""
    streamed: FloatArray
    """Parameters in `shard` that are never gathered, and whose gradients go home after every micro-batch."""

    def times(self, factor: Any) -> PartBytes:
        """This many of it."""
        return PartBytes(**{field.name: getattr(self, field.name) * factor for field in fields(self)})

    def plus(self, other: PartBytes) -> PartBytes:
        """Both together, where both are held at once."""
        return PartBytes(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def unpadded(self, shards: FloatArray) -> PartBytes:
        """The same if parameters could be shared out evenly."""
        return replace(self, shard=self.count / shards + self.streamed, gathered=self.count)


@dataclass(frozen=True)
class ModelBytes:
    """All parts, for each candidate."""

    embedding: PartBytes
    block: PartBytes
    head: PartBytes
    shared: FloatArray
    """Bytes that the blocks of a stage read together and each micro-batch builds once."""
    hidden: FloatArray
    """Bytes of the activations between blocks."""
    block_input: FloatArray
    """The part of a block's kept bytes that is its input."""
    shards: FloatArray
    """Ranks over which parameters are shared out."""
    ring: FloatArray
    """Parameters in the buffers that streamed chunks and their gradients take turns in, with peer copies."""
    waiting: FloatArray
    """Bytes that a block keeps besides from the gradients of its input to those of its weights, where they come apart."""

    def unpadded(self) -> ModelBytes:
        """The same if parameters could be shared out evenly."""
        parts = {name: getattr(self, name).unpadded(self.shards) for name in ("embedding", "block", "head")}
        return replace(self, **parts)

    def take(self, which: Any) -> ModelBytes:
        """Those at these positions."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, PartBytes):
                values[field.name] = PartBytes(**{f.name: getattr(value, f.name)[which] for f in fields(value)})
            else:
                values[field.name] = value[which]
        return ModelBytes(**values)


_TRACED = ("tp", "cp", "context", "recompute", "microbatch", "streamed", "splits_backward")
"""What the costs of parts depend on."""
_SIZES = ("kept", "forward", "backward", "coming")
_PARTS: tuple[PartName, ...] = ("embedding", "block", "head")


def model_bytes(
    model: TracedModel, candidates: LayoutTable, *, attention: Kernel, compiled: bool, peer_copies: bool = False
) -> ModelBytes:
    """Return the parts of the model on a rank of each candidate.

    attention, compiled: see `TracedModel.setting_of`. peer_copies: see `memory_model.memory`.
    """
    first, inverse = distinct([getattr(candidates, name) for name in _TRACED])

    def setting_at(position: int) -> tuple[Setting, int]:
        """The setting of a candidate, and samples of its micro-batch."""
        layout = candidates.row(position)
        setting = model.setting_of(layout, attention=attention, compiled=compiled)
        return replace(setting, peer_copies=peer_copies and setting.streamed > 1), layout.microbatch

    settings = [setting_at(int(position)) for position in first]
    costs = [_costs(*one) for one in settings]
    tied = model.tied()
    shards = candidates.shards
    # A shared table is there once where one rank has both ends of the model.
    shared_table = (candidates.pp == 1) & bool(tied)
    first_shard, shard_inverse = distinct([candidates.tp, shards, shared_table.astype(np.int64), candidates.streamed])
    of_rank = {(int(candidates.tp[p]), int(candidates.streamed[p])): costs[inverse[p]] for p in first_shard}

    def part(name: PartName) -> PartBytes:
        parameters = [
            _shared_out(
                of_rank[int(candidates.tp[p]), int(candidates.streamed[p])][name],
                int(shards[p]),
                tied.values() if shared_table[p] else (),
            )
            for p in first_shard
        ]
        sizes = {size: _column(lambda c, s=size: _part_size(c[name], s), costs)[inverse] for size in _SIZES}  # type: ignore[misc]
        count, shard, streamed = (np.asarray(x, np.float64)[shard_inverse] for x in zip(*parameters, strict=True))
        return PartBytes(**sizes, count=count, shard=shard + streamed, gathered=shard * shards, streamed=streamed)

    return ModelBytes(
        embedding=part("embedding"),
        block=part("block"),
        head=part("head"),
        shared=_column(lambda c: sum(kept.bytes for kept in c["block"].shared), costs)[inverse],
        hidden=_column(lambda c: c["block"].costs.output_bytes, costs)[inverse],
        block_input=_column(lambda c: _input(c["block"]), costs)[inverse],
        shards=shards.astype(np.float64),
        ring=_column(lambda c: 4 * max((chain.chunk for chain in c["block"].chains), default=0), costs)[inverse],
        waiting=_column(lambda c: _waiting(c["block"]), costs)[inverse],
    )


@cache
def _costs(setting: Setting, microbatch: int) -> dict[PartName, PartCosts]:
    return {name: part_costs(name, setting, microbatch) for name in _PARTS}


def _part_size(part: PartCosts, name: str) -> int:
    costs = part.costs
    sizes = {
        "kept": costs.kept_bytes,
        "forward": costs.forward_peak,
        "backward": costs.backward_peak - costs.kept_bytes,
        "coming": costs.coming_bytes,
    }
    return sizes[name]


def _input(part: PartCosts) -> int:
    return sum(kept.bytes for kept in part.costs.kept if kept.name == "input")


def _shared_out(part: PartCosts, shards: int, elsewhere: Collection[str]) -> tuple[int, int, int]:
    """Elements of a part before and after sharding, but for a head's parameters that are held `elsewhere`; and streamed ones
    of the rank that has most."""
    head = any(parameter.name.startswith("head.") for parameter in part.parameters)
    mine = [p for p in part.parameters if not (p.streamed or (head and p.name in elsewhere))]
    streamed = sum(chain.piece for chain in part.chains)
    return sum(p.count for p in mine), sum(p.sharded_count(shards) for p in mine), streamed


def _waiting(block: PartCosts) -> int:
    """Gradients of the results of matrices and norms, which those of the weights are made from; 0 of streamed blocks, whose
    gradients never come apart."""
    if block.chains:
        return 0
    results = (op.bytes_written for op in block.costs.operations if op.kind == "matmul" and op.phase == "forward")
    return sum(results) + 2 * block.costs.output_bytes


def _column(of: Callable[[dict[PartName, PartCosts]], int], costs: list[dict[PartName, PartCosts]]) -> FloatArray:
    return np.asarray([of(each) for each in costs], np.float64)


def distinct(columns: list[Ints]) -> tuple[Ints, Ints]:
    """Positions of the first of each different row, and for every row which of those it is like."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse
