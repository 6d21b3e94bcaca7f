"""Tensor parallelism (Shoeybi et al. 2019) for modules that are not built of this package's layers: `nn.Linear` and
`nn.Embedding`, as their owner wrote them.

`split_layers` also splits the positions between matrices, which a model has to be written for. Here every rank of `tp` sees
all positions: a column matrix gives some of its features, a row matrix takes them and sums its results over the ranks, and
whatever lies between blocks is computed alike on every rank, gradients included.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import PhalanxError
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplit, TensorSplits
from phalanx.nn.splits import Split
from phalanx.torch_compat import common as compat

PlainSplit = Literal["column", "row", "vocabulary"]
"""How a module is split. column: a Linear that keeps some of its output features. row: a Linear that keeps some of its input
features, behind a column one. vocabulary: an Embedding that keeps some of its rows, or a Linear that does so and gives the
logits of the whole vocabulary on every rank."""


def split_plain_modules(module: nn.Module, splits: Mapping[str, PlainSplit | Split], tp: Axis) -> TensorSplits:
    """Keep this rank's part of every module that `splits` names (patterns as in fnmatch), in place; `module` is on meta.

    A `Split` in place of a word says how many features stay together, such as those of a head: Split("column", 64). Returns
    which part of which parameter this rank keeps. Raises PhalanxError for a pattern that names nothing, for a module that
    cannot be split so, and for features that `tp` does not divide.
    """
    kept: TensorSplits = {}
    modules = dict(module.named_modules())
    unused = set(splits)
    for name, found in modules.items():
        pattern = next((pattern for pattern in splits if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        unused.discard(pattern)
        split = splits[pattern]
        kind, unit = (split.kind, split.unit) if isinstance(split, Split) else (split, 1)
        for parameter, part in _split_one(found, name, kind, unit, tp).items():
            kept[f"{name}.{parameter}"] = part
    if unused:
        raise PhalanxError(f"splits: no module is named {', '.join(sorted(unused))}; patterns are those of fnmatch")
    return kept


def _split_one(module: nn.Module, name: str, kind: str, unit: int, tp: Axis) -> TensorSplits:
    """Split one module as `kind` says."""
    parallel = _PARALLEL.get((kind, nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear))
    if parallel is None or not isinstance(module, (nn.Embedding, nn.Linear)) or type(module) not in _PLAIN:
        raise PhalanxError(
            f"splits: {name} is a {type(module).__name__}, which cannot be split as {kind!r}; column and row are for "
            "nn.Linear, vocabulary is for nn.Embedding and nn.Linear"
        )
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
        raise PhalanxError(
            f"splits: {name} has padding_idx or max_norm, which a split table does not heed; leave it out"
        )
    dim = 1 if kind == "row" else 0
    whole = module.weight.shape[dim]
    if whole % (unit * tp.size):
        together = f" in units of {unit}" if unit > 1 else ""
        raise PhalanxError(
            f"splits: {name} has {whole} features{together}, which layout.tp={tp.size} does not divide; "
            "choose another tp, or leave the module out of splits"
        )
    # Only now: what cannot be split is refused on one rank as well.
    if tp.size == 1:
        return {}
    # A class for all modules of a kind, not methods of each: equal blocks then share one compiled program.
    module.__class__ = parallel
    module.tp = tp  # type: ignore[assignment]
    start, count = tp.rank * (whole // tp.size), whole // tp.size
    # The bias of a row matrix joins behind the sum: every rank keeps it whole.
    names = ["weight"] if dim == 1 or getattr(module, "bias", None) is None else ["weight", "bias"]
    kept: TensorSplits = {}
    for parameter_name in names:
        parameter = getattr(module, parameter_name)
        part = parameter.detach().narrow(dim, start, count).contiguous()
        setattr(module, parameter_name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        kept[parameter_name] = TensorSplit(dim, start, whole)
    return kept


class ColumnParallelLinear(nn.Linear):
    """Some output features, for an input that every rank has whole."""

    tp: Axis

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out/tp]."""
        return super().forward(copy_to_ranks(x, self.tp))


class RowParallelLinear(nn.Linear):
    """All output features, summed over the ranks' input features."""

    tp: Axis

    def forward(self, x: Tensor) -> Tensor:
        """[..., in/tp] -> [..., out]."""
        y = sum_over_ranks(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


class VocabularyParallelEmbedding(nn.Embedding):
    """Each rank looks up the numbers that it has rows for; lookups are summed."""

    tp: Axis

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        local = x - self.tp.rank * self.weight.shape[0]
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return sum_over_ranks(torch.where(mine[..., None], rows, 0.0), self.tp)


class VocabularyParallelLinear(ColumnParallelLinear):
    """Each rank computes the logits of its rows; all ranks then have all logits."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., vocabulary]."""
        return join_ranks(super().forward(x), self.tp)


_PLAIN = (nn.Linear, nn.Embedding)
"""Subclasses compute in ways of their own, which a changed class would lose."""
_PARALLEL: dict[tuple[str, type[nn.Module]], type[nn.Linear] | type[nn.Embedding]] = {
    ("column", nn.Linear): ColumnParallelLinear,
    ("row", nn.Linear): RowParallelLinear,
    ("vocabulary", nn.Linear): VocabularyParallelLinear,
    ("vocabulary", nn.Embedding): VocabularyParallelEmbedding,
}


def copy_to_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`, which every rank has; backward sums the ranks' gradients, each of which comes from other features."""
    result = _CopyToRanks.apply(x, axis.group_name)
    assert isinstance(result, Tensor)
    return result


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of all ranks' `x`; backward hands on the gradient, which is the same on every rank."""
    result = _SumOverRanks.apply(x, axis.group_name)
    assert isinstance(result, Tensor)
    return result


def join_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return all ranks' `x` joined along the last dim; backward keeps this rank's part of the gradient, alike everywhere."""
    result = _JoinRanks.apply(x, axis.group_name, axis.rank, axis.size)
    assert isinstance(result, Tensor)
    return result


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return compat.all_reduce(grads[0], ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return compat.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _JoinRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, size: int) -> Tensor:
        ctx.place = rank, size
        return compat.all_gather(x, group, size).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rank, size = ctx.place
        return grads[0].chunk(size, dim=-1)[rank].contiguous(), None, None, None
