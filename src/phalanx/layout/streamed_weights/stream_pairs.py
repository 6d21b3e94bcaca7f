"""Hybrid-STOP's projection pair as a layout for any transformer (Wang et al. 2024, arXiv 2404.14712).

Attention and MLP are pairs y = act(x A) B: A keeps some output features, B the matching input features, and since what
stands between acts on each head or feature alone, y = sum over k of act(x A_k) B_k. Tensor parallelism is that sum over the
ranks of `tp`. Streaming is the same sum over the ranks of `dp_shard`, one chunk after another in time: no rank ever holds
more than two chunks of a pair, the one it computes with and the next one on its way.

    layout.gather=layer    a rank gathers its whole tensor-parallel part of a block (FSDP2)
    layout.gather=stream   it sees that part chunk by chunk

Which modules are pairs follows from what a family declares for tensor parallelism: a module of a block whose children are
`column` matrices and one `row` matrix is one. Everything else (norms, q/k norms, biases behind the sum, embedding, head)
is sharded as always.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplit, TensorSplits
from phalanx.layout.streamed_weights.chunk_plan import ChunkPlan, Matrix, chunk_count
from phalanx.layout.streamed_weights.projection_pair import ProjectionPair
from phalanx.layout.streamed_weights.ring_transport import WeightRing
from phalanx.layout.tensor_parallel.autograd_collectives import gather_parts, scatter_sum
from phalanx.layout.tensor_parallel.split_layers import SEQUENCE, split_tensors
from phalanx.nn.layers import Linear
from phalanx.nn.splits import Split, Splits


class Stream:
    """Ranks, ring and modules of a rank's streamed pairs. Every rank of `shards` runs the same pairs in the same order."""

    def __init__(self, shards: Axis, replicas: Axis, cp: Axis, ring: WeightRing | None = None) -> None:
        """Stream over `shards`, ranks that share each pair, those of `cp` next to each other.

        replicas: ranks with the same pieces.
        """
        assert shards.size > 1 and shards.size % cp.size == 0
        self.shards = shards
        self.replicas = replicas
        self.places = shards.size // cp.size
        """Chunks there can be at most: ranks of `cp` attend together, so they must have the same heads at the same time."""
        self.ring = ring or WeightRing(shards)
        self._modules: list[Streamed] = []

    def finish(self) -> None:
        """Complete the gradients after the last micro-batch of a step: all arrive, and replicas add theirs up, once."""
        self.ring.finish()
        if self.replicas.group is None:
            return
        grads = [p.grad for module in self._modules for p in module.matrices() if p.grad is not None and p.numel()]
        # All are started before any is waited for: the exchanges of small pieces then overlap.
        works = [dist.all_reduce(grad, group=self.replicas.group, async_op=True) for grad in grads]
        for work in works:
            assert work is not None
            work.wait()

    def add(self, module: Streamed) -> None:
        """Take care of a module's gradients."""
        self._modules.append(module)
        self.ring.expect(module.pair.plan)


class Streamed(nn.Module):
    """Mixed into the class of a module whose matrices are streamed."""

    pair: ProjectionPair
    tp: Axis
    row: str
    """Name of the matrix that ends the pair."""

    def forward(self, x_BsD: Tensor, *arguments: Any) -> Tensor:
        """[B, S/tp, D] -> [B, S/tp, D]: positions are gathered and scattered once, however many chunks there are."""
        y_BSD = self.pair(self, gather_parts(x_BsD, self.tp, SEQUENCE), arguments)
        y_BsD = scatter_sum(y_BSD, self.tp, SEQUENCE)
        bias = cast(Linear, self.get_submodule(self.row)).bias
        # Once, behind all sums: not in every chunk, and not on every rank.
        return y_BsD if bias is None else y_BsD + bias.to(y_BsD.dtype)

    def matrices(self) -> list[nn.Parameter]:
        """Return this rank's pieces."""
        return [self.get_parameter(matrix.name) for matrix in self.pair.plan.matrices]


@dataclass(frozen=True)
class _Member:
    """One matrix of a pair, as declared."""

    name: str
    """Name of the `Linear` within the pair's module."""
    linear: Linear
    split: Split

    @property
    def units(self) -> int:
        return self.linear.weight.shape[0 if self.split.kind == "column" else 1] // self.split.unit

    def matrices(self) -> list[Matrix]:
        """Return its parameters that are streamed."""
        weight = self.linear.weight
        if self.split.kind == "row":
            return [Matrix(f"{self.name}.weight", 1, self.split.unit, weight.shape[0])]
        found = [Matrix(f"{self.name}.weight", 0, self.split.unit, weight.shape[1])]
        return found if self.linear.bias is None else [*found, Matrix(f"{self.name}.bias", 0, self.split.unit, 1)]


def stream_matrices(
    model: nn.Module, splits: Splits, tp: Axis, stream: Stream | None, *, chunks: int | None = None
) -> TensorSplits:
    """Do as `split_tensors`, but keep of pairs this rank's piece over `tp` and the shards; `stream` None streams nothing.

    `model` is on the meta device still. chunks: of each pair, at most; the rest of the shards then join in groups that hold
    a chunk together. Returns which part of which parameter this rank keeps.
    """
    if stream is None:
        return split_tensors(model, splits, tp)
    kept: TensorSplits = {}
    taken: Splits = []
    if isinstance(head := getattr(model, "head", None), nn.Module):
        # The last gradients of the micro-batch before have arrived by now, and the head needs the room they take.
        head.register_forward_pre_hook(lambda *_: stream.ring.finish())
    for name, members in find_projection_pairs(model, splits):
        for parameter, part in _stream_pair(model.get_submodule(name), members, tp, stream, chunks).items():
            kept[f"{name}.{parameter}"] = part
        # A kind that is split by others leaves its module alone here.
        taken += [(f"{name}.{member.name}", Split("attention")) for member in members]
    return kept | split_tensors(model, [*taken, *splits], tp)


def find_projection_pairs(model: nn.Module, splits: Splits) -> Iterable[tuple[str, list[_Member]]]:
    """Yield modules inside blocks whose children are column matrices and, behind them, one row matrix of as many units."""
    for name, module in model.named_modules():
        if not name.startswith("blocks."):
            continue
        members = []
        for child, linear in module.named_children():
            split = next((split for pattern, split in splits if fnmatchcase(f"{name}.{child}", pattern)), None)
            if split is not None and split.kind in ("column", "row"):
                assert isinstance(linear, Linear)
                members.append(_Member(child, linear, split))
        kinds = sorted(member.split.kind for member in members)
        if len(kinds) > 1 and kinds.count("row") == 1 and len({member.units for member in members}) == 1:
            yield name, members


def _stream_pair(
    module: nn.Module, members: list[_Member], tp: Axis, stream: Stream, chunks: int | None
) -> TensorSplits:
    """Keep this rank's piece of the module's matrices, in place."""
    units, uneven = divmod(members[0].units, tp.size)
    assert not uneven, "tensor parallelism splits pairs evenly"
    shards, at_most = stream.shards, min(units, chunks or units)
    matrices = tuple(matrix for member in members for matrix in member.matrices())
    plan = ChunkPlan(matrices, units, shards.size, chunk_count(at_most, stream.places))
    kept: TensorSplits = {}
    for matrix in matrices:
        rows = plan.piece(matrix, shards.rank)
        start = tp.rank * units * matrix.unit + rows.start
        kept[matrix.name] = TensorSplit(matrix.dim, start, units * matrix.unit * tp.size)
        path, _, name = matrix.name.rpartition(".")
        linear = module.get_submodule(path)
        parameter = linear.get_parameter(name)
        assert parameter.device.type == "meta"
        part = parameter.detach().narrow(matrix.dim, start, len(rows)).contiguous()
        setattr(linear, name, nn.Parameter(part))
    # A bias behind the sum would be added once a chunk, and once a rank of `tp`.
    (row,) = (member for member in members if member.split.kind == "row")
    late = () if row.linear.bias is None else (f"{row.name}.bias",)
    kind: Any = type(module)
    # A class for all modules of a kind, as `layout.prepare_blocks` does for blocks.
    module.__class__ = _streamed_class(kind)
    assert isinstance(module, Streamed)
    module.pair = ProjectionPair(kind.forward, plan, stream.ring, late)
    module.tp, module.row = tp, row.name
    stream.add(module)
    return kept


@cache
def _streamed_class(kind: Any) -> Any:
    return type(f"Streamed{kind.__name__}", (Streamed, kind), {})


def streamed_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return parameters that are streamed, and therefore nobody else's to shard."""
    return {p for child in module.modules() if isinstance(child, Streamed) for p in child.matrices()}
