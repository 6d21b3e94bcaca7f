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

from phalanx.layout.offloaded_activations import leaves_device
from phalanx.layout.spec import LayoutTable
from phalanx.planner.distinct_rows import distinct_rows
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
    pending: FloatArray
    """Bytes more in the first micro-batch's, of gradients that others find."""
    count: FloatArray
    """Parameters, before data parallelism shares them out; streamed ones are no part of it."""
    shard: FloatArray
    """Parameters one of the shards holds, whole rows: padding counts."""
    gathered: FloatArray
    """Parameters in a buffer that holds all shards: padding counts."""
    streamed: FloatArray
    """Parameters in `shard` that are never gathered, and whose gradients go home after every micro-batch."""
    trained_count: FloatArray
    """Those in `count` that are trained: they alone have gradients and optimizer state."""
    trained_shard: FloatArray
    """Those in `shard` that are trained."""
    trained_gathered: FloatArray
    """Those in `gathered` that are trained."""
    matrices: FloatArray
    """Those in `trained_shard` that an optimizer may treat as matrices."""
    quantised: FloatArray
    """Those in `count` that are multiplied in 8 bits."""
    quantised_shard: FloatArray
    """Those in `shard` that are."""
    quantised_gathered: FloatArray
    """Those in `gathered` that are."""

    def plus(self, other: PartBytes) -> PartBytes:
        """Return the bytes of both together, where both are held at once."""
        return PartBytes(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def unpadded(self, shards: FloatArray) -> PartBytes:
        """Return the same bytes and elements if parameters could be sharded evenly."""
        shard = self.count / shards + self.streamed
        trained = self.trained_count / shards + self.streamed
        return replace(
            self,
            shard=shard,
            gathered=self.count,
            trained_shard=trained,
            trained_gathered=self.trained_count,
            matrices=self.matrices * trained / np.maximum(self.trained_shard, 1),
            quantised_shard=self.quantised / shards,
            quantised_gathered=self.quantised,
        )


@dataclass(frozen=True)
class ModelBytes:
    """All parts, for each candidate."""

    embedding: PartBytes
    block: PartBytes
    """Without the parameters in `experts`."""
    experts: PartBytes
    """Parameters of a block's experts under expert parallelism, sharded on their own; `gathered` is 0 where no other
    rank has them. Of its passes `forward` is what a block's backward pass holds when the experts' gradients are made, and
    `backward` the most that it holds from then on; these gradients and what is kept not counted."""
    beside_experts: FloatArray
    """The most that a block's backward pass holds while its experts compute again, what is kept not counted; 0 where they do
    not."""
    leading: PartBytes
    """One of the first blocks of the model, where these are others; else such a block as all."""
    head: PartBytes
    shared: FloatArray
    """Bytes that the blocks of a stage read together and each micro-batch builds once."""
    hidden: FloatArray
    """Bytes of the activations between blocks."""
    block_input: FloatArray
    """The part of a block's kept bytes that is its input."""
    shards: FloatArray
    """Ranks over which parameters are sharded."""
    expert_shards: FloatArray
    """Ranks over which the experts of a rank are."""
    ring: FloatArray
    """Parameters in the buffers that streamed chunks and their gradients take turns in, with peer copies."""
    leaving: FloatArray
    """The part of a block's kept bytes that lies in host memory meanwhile; 0 where activations stay on the device."""
    leading_leaving: FloatArray
    """The same of a leading block."""
    input_leaving: FloatArray
    """The block's input among these bytes."""
    waiting: FloatArray
    """Bytes that a block keeps besides from the gradients of its input to those of its weights, where they come apart."""

    def unpadded(self) -> ModelBytes:
        """Return the same bytes and elements if parameters could be sharded evenly."""
        parts = {name: getattr(self, name).unpadded(self.shards) for name in ("embedding", "block", "leading", "head")}
        spread, experts = self.experts.gathered > 0, self.experts.unpadded(self.expert_shards)
        experts = replace(
            experts,
            gathered=experts.count * spread,
            trained_gathered=experts.trained_count * spread,
            matrices=experts.trained_shard,
        )
        return replace(self, **parts, experts=experts)

    def take(self, which: Any) -> ModelBytes:
        """Return those at these positions."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, PartBytes):
                values[field.name] = PartBytes(**{f.name: getattr(value, f.name)[which] for f in fields(value)})
            else:
                values[field.name] = value[which]
        return ModelBytes(**values)


_TRACED = (
    *("tp", "cp", "ep", "expert_tp", "ep_chunks", "ep_node", "context", "recompute"),
    *("microbatch", "streamed", "splits_backward", "lone_experts"),
)
"""What the costs of parts depend on."""
_PARTS: tuple[PartName, ...] = ("embedding", "block", "head")


def model_bytes(
    model: TracedModel, candidates: LayoutTable, *, attention: Kernel, compiled: bool, peer_copies: bool = False
) -> ModelBytes:
    """Return the parts of the model on a rank of each candidate.

    attention, compiled: see `TracedModel.setting_of`. peer_copies: see `memory_model.memory`.
    """
    parts = _RankParts(model, candidates, attention, compiled, peer_copies)
    block = parts.measure_part("block")
    return ModelBytes(
        embedding=parts.measure_part("embedding"),
        block=block,
        experts=parts.measure_experts(),
        beside_experts=parts.column(_beside_experts),
        leading=parts.measure_part("leading") if model.config.leading_layers else block,
        head=parts.measure_part("head"),
        shared=parts.column(lambda c: sum(kept.bytes for kept in c["block"].shared)),
        hidden=parts.column(lambda c: c["block"].costs.output_bytes),
        block_input=parts.column(lambda c: sum(kept.bytes for kept in c["block"].costs.kept if kept.name == "input")),
        shards=candidates.shards.astype(np.float64),
        expert_shards=candidates.expert_shards.astype(np.float64),
        ring=parts.column(lambda c: 4 * max((chain.chunk for chain in c["block"].chains), default=0)),
        leaving=parts.measure_leaving("block"),
        leading_leaving=parts.measure_leaving("leading" if model.config.leading_layers else "block"),
        input_leaving=parts.measure_leaving("block", input_alone=True),
        waiting=parts.measure_waiting(),
    )


class _RankParts:
    """The traced parts of many candidates, and how many of their parameters a rank of each holds."""

    def __init__(
        self, model: TracedModel, candidates: LayoutTable, attention: Kernel, compiled: bool, peer_copies: bool
    ) -> None:
        self.candidates, self.tied = candidates, model.tied()
        first, self.trace_of = distinct_rows([getattr(candidates, name) for name in _TRACED])
        """Position in `settings` and `costs` of each candidate."""
        self.settings: list[tuple[Setting, int]] = []
        """Settings that are traced, and samples of their micro-batches."""
        for position in first:
            layout = candidates.row(int(position))
            setting = model.setting_of(layout, attention=attention, compiled=compiled)
            # Copies matter to a trace where chunks travel; elsewhere equal settings are to share theirs.
            streams_by_copies = peer_copies and setting.streamed > 1
            self.settings.append((replace(setting, peer_copies=streams_by_copies), layout.microbatch))
        self.costs = [_costs(*one) for one in self.settings]
        # A shared table is there once where one rank has both ends of the model.
        self.shared_table = (candidates.pp == 1) & bool(self.tied)
        # What shards hold depends on fewer fields than what is traced: it is counted once for each distinct row of them.
        shapes = [
            candidates.tp,
            candidates.ep,
            candidates.expert_tp,
            candidates.streamed,
            candidates.shards,
            candidates.expert_shards,
        ]
        self.counted, self.count_of = distinct_rows([*shapes, self.shared_table.astype(np.int64)])
        """Candidates whose parameters are counted, and the position among them of each one's equal."""

    def column(self, of: Callable[[dict[PartName, PartCosts]], int]) -> FloatArray:
        """Return what `of` says of the parts of each candidate, [candidates]."""
        return np.asarray([of(each) for each in self.costs], np.float64)[self.trace_of]

    def measure_part(self, name: PartName) -> PartBytes:
        """Return the bytes and elements of a part, its experts aside."""
        shards = self.candidates.shards
        count, shard, streamed, trained_count, trained_shard, matrices, *narrow = self._count_parameters(
            name, experts=False
        )
        return PartBytes(
            kept=self.column(lambda c: c[name].costs.kept_bytes),
            forward=self.column(lambda c: c[name].costs.forward_peak),
            backward=self.column(lambda c: c[name].costs.backward_peak - c[name].costs.kept_bytes),
            pending=self.column(lambda c: c[name].costs.pending_bytes),
            count=count,
            shard=shard + streamed,
            gathered=shard * shards,
            streamed=streamed,
            matrices=matrices + streamed,
            trained_count=trained_count,
            trained_shard=trained_shard + streamed,
            trained_gathered=trained_shard * shards,
            quantised=narrow[0],
            quantised_shard=narrow[1],
            quantised_gathered=narrow[1] * shards,
        )

    def measure_experts(self) -> PartBytes:
        """Return the bytes and elements of a block's experts that expert parallelism shards."""
        nothing = np.zeros(len(self.candidates))
        count, shard, _, trained_count, trained_shard, matrices, *_ = self._count_parameters("block", experts=True)
        # Experts that one rank alone has are never gathered.
        gathered_of = self.candidates.expert_shards * ~self.candidates.lone_experts
        return PartBytes(
            kept=nothing,
            forward=self.column(lambda c: _behind_experts(c["block"])[0]),
            backward=self.column(lambda c: _behind_experts(c["block"])[1]),
            pending=nothing,
            count=count,
            shard=shard,
            gathered=shard * gathered_of,
            streamed=nothing,
            trained_count=trained_count,
            trained_shard=trained_shard,
            trained_gathered=trained_shard * gathered_of,
            matrices=matrices,
            quantised=nothing,
            quantised_shard=nothing,
            quantised_gathered=nothing,
        )

    def measure_leaving(self, name: PartName, *, input_alone: bool = False) -> FloatArray:
        """Return the kept bytes of a part that layouts with offloaded activations copy to host memory, [candidates].

        input_alone: of the part's input.
        """
        found = []
        for (setting, _), costs in zip(self.settings, self.costs, strict=True):
            # Uncompiled, selective recompute keeps results in a cache of its own, which hooks of saved tensors do not see.
            hidden = setting.recompute == "selective" and not setting.compile
            kept = [one for one in costs[name].costs.kept if one.name == "input" or not (hidden or input_alone)]
            found.append(sum(one.bytes for one in kept if leaves_device(one.bytes)))
        return np.where(self.candidates.offload_activations, np.asarray(found, np.float64)[self.trace_of], 0.0)

    def measure_waiting(self) -> FloatArray:
        """Return the bytes that a block keeps from the gradients of its input to those of its weights, [candidates].

        Those of the weights are computed from gradients of the results of matrices and norms, which are kept until then. 0
        where both are computed together, as streamed blocks do.
        """
        found = []
        for (setting, _), parts in zip(self.settings, self.costs, strict=True):
            costs, results = parts["block"].costs, 0
            # Operations are listed when they are asked for, which takes a while: most settings do without.
            if not (setting.joint_gradients or parts["block"].chains):
                written = (op.bytes_written for op in costs.operations if op.kind == "matmul" and op.phase == "forward")
                results = sum(written) + 2 * costs.output_bytes
            found.append(results)
        return np.asarray(found, np.float64)[self.trace_of]

    def _count_parameters(self, name: PartName, *, experts: bool) -> tuple[FloatArray, ...]:
        """Return elements of a part on a rank of each candidate, [candidates] each.

        Before and after sharding, streamed, trained before and after, of trained matrices after, multiplied in 8 bits before
        and after. experts: count the experts that expert parallelism shards; else all but these.
        """
        candidates = self.candidates
        shards_of = candidates.expert_shards if experts else candidates.shards
        found: list[tuple[int, ...]] = []
        for place in self.counted:
            part, shards = self.costs[self.trace_of[place]][name], int(shards_of[place])
            # A head that lies on one rank with the embedding reads the embedding's table.
            elsewhere: Collection[str] = self.tied.values() if self.shared_table[place] else ()
            head = any(parameter.name.startswith("head.") for parameter in part.parameters)
            mine = [
                p for p in part.parameters if p.expert == experts and not (p.streamed or (head and p.name in elsewhere))
            ]
            # Chunks of streamed matrices are uneven: counted is the rank that has most.
            streamed = sum(chain.piece for chain in part.chains)
            trained = [p for p in mine if not p.frozen]
            every, of_trained, narrow = (
                [sum(p.count for p in some), sum(p.sharded_count(shards) for p in some)]
                for some in (mine, trained, [p for p in mine if p.quantised])
            )
            matrices = sum(p.sharded_count(shards) for p in trained if p.matrix)
            found.append((*every, streamed, *of_trained, matrices, *narrow))
        return tuple(np.asarray(x, np.float64)[self.count_of] for x in zip(*found, strict=True))


@cache
def _costs(setting: Setting, microbatch: int) -> dict[PartName, PartCosts]:
    leading: tuple[PartName, ...] = ("leading",) if setting.model.leading_layers else ()
    return {name: part_costs(name, setting, microbatch) for name in (*_PARTS, *leading)}


def _beside_experts(parts: dict[PartName, PartCosts]) -> int:
    """Return the most bytes of a block's backward pass while its experts compute again, what is kept not counted."""
    costs = parts["block"].costs
    return costs.beside_experts - costs.kept_bytes if costs.beside_experts else 0


def _behind_experts(block: PartCosts) -> tuple[int, int]:
    """Return the bytes of a block's backward pass when its experts have their gradients, and the most from then on.

    Activations that are kept for the backward pass are not counted.
    """
    kept = block.costs.kept_bytes
    at_once, later = block.costs.behind_experts
    return at_once - kept, later - kept
