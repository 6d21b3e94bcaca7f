"""What a block costs whose matrices are streamed (`layout.gather=stream`, `layout.streamed_weights.stream_pairs`):
counted in the real code.

A chain of K chunks runs the same operations K times. So the real block is traced with four chunks a chain, or fewer where
it has fewer: the first two, one that stands for all between, beside which gradients of the one before and the weights of the
next one are under way, and the last one. Their size is a prime number of units, as the micro-batch is a prime number of
samples: whatever it divides is known to grow with the chunk, and one trace serves every number of ranks. Where units do not
divide, every step is taken to be as large as its largest chunk, which some rank of the ring always has. Ranks that hold a
chunk together receive each other's pieces of it and of its gradients, so their number is traced too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn

from phalanx.layout.layout_model import Stage
from phalanx.layout.mesh import Axis
from phalanx.layout.streamed_weights.chunk_plan import ChunkPlan
from phalanx.layout.streamed_weights.ring_transport import Transfer, WeightRing
from phalanx.layout.streamed_weights.stream_pairs import Stream, Streamed
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.schedule.timeline import Costs, Timeline
from phalanx.planner.trace.operations import Scale
from phalanx.planner.trace.recorder import Recorder
from phalanx.planner.trace.traced_model import Setting, build_stage

_PRIMES = (2003, 2011, 2017, 2027, 2029, 2039, 2053, 2063, 2069, 2081)
"""Units of a traced chunk."""
_SHOWN = 4
"""Chunks of a traced chain at most."""
_TOGETHER = 4
"""Ranks that hold a traced chunk together at most: pieces of more of them are as large in all, but for one."""
Shown = tuple[int, int]
"""(chunks, ranks that hold one together) of a traced chain."""


@dataclass(frozen=True)
class ChainSize:
    """One chain of a block on one rank."""

    plan: ChunkPlan
    names: tuple[str, ...]
    """Names of its parameters, as in the whole model with block number 0."""

    @property
    def piece(self) -> int:
        """Elements that the first rank keeps: none keeps more."""
        return self.plan.piece_size(0)

    @property
    def chunk(self) -> int:
        """Elements of the largest chunk."""
        return self.plan.largest_chunk

    @property
    def sent(self) -> int:
        """Elements that a rank sends around the ring in one pass, each message as large as the largest."""
        return (self.plan.chunks - 1) * self.chunk

    @property
    def own(self) -> int:
        """Elements that a rank receives before its first product: its own chunk, where others hold parts of that."""
        return self.chunk - self.chunk // self.plan.group


def chain_sizes(setting: Setting) -> tuple[ChainSize, ...]:
    """Return the chains of a block in the order in which they run; none where nothing is streamed."""
    return () if setting.streamed == 1 else _chain_sizes(replace(setting, recompute="none", peer_copies=False))


@cache
def _chain_sizes(setting: Setting) -> tuple[ChainSize, ...]:
    stage = build_stage("block", setting, _silent_stream(setting, setting.streamed))
    found = []
    for name, module in stage.part.named_modules():
        if isinstance(module, Streamed):
            plan = module.pair.plan
            found.append(ChainSize(plan, tuple(f"{name}.{matrix.name}" for matrix in plan.matrices)))
    return tuple(found)


Middle = tuple[bool, int, int, int]
"""Steps of the chunk in the middle of a chain: (of the backward pass, chain, first step, step behind the last)."""


class SilentRing(WeightRing):
    """Sends nothing. Notes which recorded steps belong to the chunk in the middle of a chain."""

    def __init__(self, shards: Axis, *, beside: bool) -> None:
        """Send nothing over `shards`. beside: whether chunks lie beside the allocator's memory."""
        super().__init__(shards)
        self.beside = beside
        self.recorder: Recorder | None = None
        self.middles: list[Middle] = []
        self.order: dict[int, int] = {}
        """Number of each chain, by the identity of its plan."""

    def weights(self, count: int, like: Tensor) -> Tensor:
        """See `WeightRing`."""
        return self._held(super().weights(count, like))

    def gradients(self, count: int, like: Tensor) -> Tensor:
        """See `WeightRing`."""
        return self._held(super().gradients(count, like))

    def chunks(self, plan: ChunkPlan, piece: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """See `WeightRing`."""
        inner = iter(super().chunks(plan, piece))
        del piece
        for step in range(plan.chunks):
            # Nothing here may keep a chunk alive: what lives longest is what is counted.
            held = [next(inner)]
            begin = self._position()
            yield held.pop()
            if step == _SHOWN - 2 and plan.chunks == _SHOWN and begin is not None:
                end = self._position()
                assert end is not None
                self.middles.append((begin[0], self.order[id(plan)], begin[1], end[1]))

    def _position(self) -> tuple[bool, int] | None:
        recorder = self.recorder
        if recorder is None:
            return None
        timeline = recorder.timeline
        return recorder.backward, len(timeline.backward if recorder.backward else timeline.forward)

    def _held(self, tensor: Tensor) -> Tensor:
        if self.beside and self.recorder is not None:
            self.recorder.relabel(tensor, "given")
        return tensor

    def _start(self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]) -> Transfer:
        return Transfer([], [x for _, x in (*sent, *received)])


def _silent_stream(setting: Setting, ranks: int) -> Stream:
    shards = Axis("dp_shard", 0, ranks, None, tuple(range(ranks)), "dp_shard")
    cp = Axis("cp", 0, setting.cp, None, tuple(range(setting.cp)), "cp")
    return Stream(shards, Axis("dp_replicate"), cp, SilentRing(shards, beside=setting.peer_copies))


@cache
def traced_setting(setting: Setting) -> tuple[Setting, tuple[Shown, ...]]:
    """Return the setting that is traced for all settings with as many chunks to show, and that number for each chain."""
    plans = [chain.plan for chain in chain_sizes(setting)]
    shown = tuple((min(plan.chunks, _SHOWN), min(plan.group, _TOGETHER)) for plan in plans)
    return replace(setting, compile=False, streamed=2 * setting.cp), shown


def traced_stage(setting: Setting, shown: tuple[Shown, ...], samples: int) -> tuple[Stage, SilentRing, tuple[int, ...]]:
    """Return (a block to trace, with chains as `shown`; its ring; units that a rank holds of a chunk of each chain)."""
    stream = _silent_stream(setting, setting.streamed)
    stage, ring = build_stage("block", setting, stream), stream.ring
    assert isinstance(ring, SilentRing)
    sizes = {setting.length, samples, *(size for parameter in stage.parameters() for size in parameter.shape)}
    # Every chain gets a size of its own, so that chains are told apart by what divides a count.
    primes = iter(prime for prime in _PRIMES if all(size % prime for size in sizes))
    units: list[int] = []
    for module in stage.part.modules():
        if isinstance(module, Streamed):
            chunks, group = shown[len(units)]
            units.append(next(primes))
            plan = module.pair.plan
            ranks = chunks * group
            module.pair.plan = ChunkPlan(plan.matrices, ranks * units[-1], ranks, chunks)
            ring.order[id(module.pair.plan)] = len(units) - 1
            for matrix in plan.matrices:
                path, _, name = matrix.name.rpartition(".")
                owner, rows = module.get_submodule(path), units[-1] * matrix.unit
                dims = owner.get_parameter(name).dim()
                shape = (matrix.width, rows) if matrix.dim == 1 else (rows, matrix.width)[:dims]
                # Rows are a multiple of a prime that divides no real size: what grows with the chunk can be told in the
                # trace.
                piece = torch.empty(shape, dtype=PRECISIONS[setting.precision].main_dtype, device="meta")
                setattr(owner, name, nn.Parameter(piece))
    return stage, ring, tuple(units)


@dataclass(frozen=True)
class PieceScale(Scale):
    """From the units of a chunk that a rank held in the trace to those of a chunk that `group` ranks hold together."""

    group: int = 1

    def __call__(self, count: int) -> int:
        """See `Scale`; rounded up."""
        return count if count % self.traced else -(-(count // self.traced * self.wanted) // self.group)


@dataclass(frozen=True)
class ChunkScale(Scale):
    """From the micro-batch and the chunks that were traced to those that are asked for."""

    chunks: tuple[Scale, ...] = ()
    known: dict[int, int] = field(default_factory=dict, compare=False)
    """Results so far: most sizes of a block occur many times."""

    def __call__(self, count: int) -> int:
        """See `Scale`."""
        if count not in self.known:
            result = super().__call__(count)
            for scale in self.chunks:
                result = scale(result)
            self.known[count] = result
        return self.known[count]


def streamed_costs(
    timeline: Timeline, middles: Sequence[Middle], units: Sequence[int], chains: Sequence[ChainSize], scale: Scale
) -> Costs:
    """Return the costs of a traced block whose chains are `chains`. middles, units: of what was traced."""
    wanted = tuple(
        PieceScale(traced, len(chain.plan.units_of(0)), min(chain.plan.group, _TOGETHER))
        for traced, chain in zip(units, chains, strict=True)
    )
    times: list[int] = []
    for backward, steps in enumerate((timeline.forward, timeline.backward)):
        each = [1] * len(steps)
        for of_backward, chain, begin, end in middles:
            if of_backward is bool(backward):
                # The traced middle stands for all chunks between the second and the last.
                each[begin:end] = [chains[chain].plan.chunks - _SHOWN + 1] * (end - begin)
        times += each
    return timeline.costs(ChunkScale(scale.traced, scale.wanted, wanted), times)
