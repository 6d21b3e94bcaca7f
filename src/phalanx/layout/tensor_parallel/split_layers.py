"""Tensor and sequence parallelism (Megatron: Shoeybi et al. 2019; Korthikanti et al. 2022), from a family's declaration.

Between the matrices of a block each rank holds all features of its part of the positions. A `column` matrix gathers the
positions and gives some features, a `row` matrix takes those, and its sums are scattered back to positions: one gather for
each input of attention or MLP, however many matrices read it, and no value is computed twice.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.logits import log_partition
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplit, TensorSplits
from phalanx.layout.tensor_parallel.autograd_collectives import gather_parts, gather_values, scatter_sum
from phalanx.layout.tensor_parallel.overlapped_products import gather_multiply, multiply_scatter
from phalanx.layout.tensor_parallel.sequence_ranks import SEQUENCE, SequenceRanks
from phalanx.nn.cross_entropy import IGNORED, replace_by_loss_gradient, sum_losses
from phalanx.nn.float8_linear import SequenceExchange
from phalanx.nn.latent_attention import SharedKey
from phalanx.nn.layers import GatedLinear, Linear, Norm
from phalanx.nn.splits import Split, Splits
from phalanx.nn.vocabulary import OutputHead, TokenEmbedding


def split_tensors(model: nn.Module, splits: Splits, tp: Axis) -> TensorSplits:
    """Keep this rank's part of every module that `splits` names, in place; returns which part of which parameter that is.

    `model` is on the meta device still. Parameters that stay whole get gradients that are sums over this rank's
    positions or features alone: the step adds them up over `tp`.
    """
    kept: TensorSplits = {}
    if tp.size == 1:
        return kept
    for name, module in model.named_modules():
        # The first pattern that fits counts, as in the table of a family.
        split = next((split for pattern, split in splits if fnmatchcase(name, pattern)), None)
        # Attention has no parameters of its own; `split_context` tells it which heads are here.
        if split is None or split.kind == "attention":
            continue
        for parameter, part in _split_module(module, split, tp).items():
            kept[f"{name}.{parameter}"] = part
    return kept


def _split_module(module: nn.Module, split: Split, tp: Axis) -> TensorSplits:
    # Classes change rather than methods of instances: blocks whose layers are of equal classes share a compiled program.
    if split.kind in ("column", "part"):
        assert isinstance(module, Linear)
        if split.kind == "column":
            _change_class(module, ColumnLinear, tp)
            module.ranks = SequenceRanks(tp.group_name, tp.size)  # type: ignore[assignment]
        module.output_group = tp.group_name
        names = ["weight"] if module.bias is None else ["weight", "bias"]
        return {name: _keep_part(module, name, 0, split.unit, tp) for name in names}
    if split.kind == "row":
        assert isinstance(module, Linear)
        _change_class(module, GatedRowLinear if isinstance(module, GatedLinear) else RowLinear, tp)
        module.ranks = SequenceRanks(tp.group_name, tp.size)  # type: ignore[assignment]
        module.input_group = tp.group_name
        return {"weight": _keep_part(module, "weight", 1, split.unit, tp)}
    if split.kind == "lookup":
        assert isinstance(module, TokenEmbedding)
        _change_class(module, SplitEmbedding, tp)
        part = _keep_part(module, "weight", 0, 1, tp)
        module.first_row = part.start  # type: ignore[assignment]
        return {"weight": part}
    if split.kind == "gather":
        _change_class(module, GatheredKey, tp)
        return {}
    if split.kind == "heads":
        return {"weight": _keep_part(module, "weight", 0, split.unit, tp)}
    if split.kind == "norm":
        assert isinstance(module, Norm)
        _change_class(module, JointNorm, tp)
        return {"weight": _keep_part(module, "weight", 0, split.unit, tp)}
    assert isinstance(module, OutputHead) and split.kind == "logits"
    _change_class(module.norm, GatheredNorm, tp)
    start = _own_units(module.vocab_size, tp)[0]
    module.loss_kernel = partial(vocabulary_chunk_loss, tp, start)
    module.score_kernel = partial(vocabulary_token_scores, tp, start)
    return {} if module.weight is None else {"weight": _keep_part(module, "weight", 0, 1, tp)}


def _change_class(module: nn.Module, kind: type[nn.Module], tp: Axis) -> None:
    assert issubclass(kind, type(module))
    module.__class__ = kind
    module.tp = tp  # type: ignore[assignment]


def _own_units(count: int, tp: Axis) -> tuple[int, int]:
    """Return the first of this rank's units and how many; the last ranks have fewer where the count does not divide."""
    each = -(-count // tp.size)
    start = min(tp.rank * each, count)
    return start, min(each, count - start)


def _keep_part(module: nn.Module, name: str, dim: int, unit: int, tp: Axis) -> TensorSplit:
    """Cut a parameter down to this rank's units along `dim`."""
    parameter = getattr(module, name)
    whole = parameter.shape[dim]
    assert whole % unit == 0 and parameter.device.type == "meta"
    start, count = _own_units(whole // unit, tp)
    # Contiguous: initial values and FSDP2 count elements row by row.
    setattr(module, name, nn.Parameter(parameter.detach().narrow(dim, 0, count * unit).contiguous()))
    return TensorSplit(dim, start * unit, whole)


def overlap_exchanges(block: nn.Module, smallest: int) -> None:
    """Let the split matrices of `block` exchange beside their products, as `peer_exchange` does.

    smallest: bytes of a sample's part of a sequence below which a gather or a sum is not worth being cut up. To be called
    before products are chosen, which ask how to exchange.
    """
    for module in block.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.ranks = replace(module.ranks, overlapped_bytes=smallest)


class ColumnLinear(Linear):
    """Some output features of all positions."""

    tp: Axis
    ranks: SequenceRanks
    """How they exchange positions."""

    @property
    def exchanges(self) -> tuple[SequenceExchange | None, SequenceExchange | None]:
        """Ranks over which positions of the input are sharded, and none of the result."""
        return self.ranks, None

    def forward(self, x_BsD: Tensor) -> Tensor:
        """[B, S/tp, in] -> [B, S, out/tp]."""
        if not (self.plain and self.ranks.overlaps(x_BsD[0].numel() * x_BsD.itemsize)):
            return super().forward(x_BsD)
        y = gather_multiply(x_BsD, self.weight.to(x_BsD.dtype), self.tp, self.gradient_sum)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def gather_input(self, x_BsD: Tensor) -> Tensor:
        """[B, S/tp, in] -> [B, S, in]; x as it is where the product gathers it in 8 bits."""
        return x_BsD if self.exchanges_narrow else gather_parts(x_BsD, self.tp, SEQUENCE)


class RowLinear(Linear):
    """All output features of some positions, summed over the ranks' input features."""

    tp: Axis
    ranks: SequenceRanks
    """How they exchange positions."""

    @property
    def exchanges(self) -> tuple[SequenceExchange | None, SequenceExchange | None]:
        """None for the input, and ranks over which positions of the result are sharded."""
        return None, self.ranks

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in/tp] -> [B, S/tp, out]."""
        part = x.shape[SEQUENCE] // self.tp.size * self.out_features
        if not (self.plain and self.ranks.overlaps(part * x.itemsize)):
            return super().forward(x)
        weight = self.weight.to(x.dtype)
        return self.add_bias(multiply_scatter(x, weight, self.tp, self.activation_block, self.gradient_sum))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[B, S, in/tp] -> [B, S, out], of this rank's features; `bias` joins after the sum, once."""
        return super().product(x, None)

    def join_output(self, y_BSD: Tensor) -> Tensor:
        """[B, S, out] -> [B, S/tp, out]; y as it is where the product has summed it."""
        return self.add_bias(y_BSD if self.exchanges_narrow else scatter_sum(y_BSD, self.tp, SEQUENCE))

    @property
    def activation_block(self) -> int:
        """Features of a group of gate or up features in x, or 0 where x is multiplied as it comes."""
        return 0

    def add_bias(self, x_BsD: Tensor) -> Tensor:
        """Add the bias to the sums, [B, S/tp, out]."""
        return x_BsD if self.bias is None else x_BsD + self.bias.to(x_BsD.dtype)


class GatedRowLinear(RowLinear, GatedLinear):
    """A row matrix behind gate and up features of its own input features."""

    @property
    def activation_block(self) -> int:
        """Features of a group of gate or up features in x."""
        return self.block


class GatheredNorm(Norm):
    """A norm of this rank's positions that gives all positions."""

    tp: Axis

    def forward(self, x: Tensor) -> Tensor:
        """[B, S/tp, D] -> [B, S, D]."""
        return gather_parts(super().forward(x), self.tp, SEQUENCE)


class GatheredKey(SharedKey):
    """The shared key of all positions, of which each rank computed some."""

    tp: Axis

    def forward(self, key_BSR: Tensor) -> Tensor:
        """[B, S/tp, R] -> [B, S, R]; gradients of the ranks' heads are summed."""
        return gather_parts(key_BSR, self.tp, SEQUENCE)


class JointNorm(Norm):
    """A norm over features of which each rank has some."""

    tp: Axis

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width/tp] -> same shape."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layernorm":
            wide = wide - self._mean(wide)
        normed = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
        return (normed * self.factor().to(wide.dtype)).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean over the features of all ranks, [B, S, 1]."""
        # Each rank's gradient of the mean comes from its own features: gathering sums them up in the backward pass.
        return gather_parts(x.mean(-1, keepdim=True), self.tp, 2).mean(-1, keepdim=True)


class SplitEmbedding(TokenEmbedding):
    """Each rank looks up the tokens it has rows for; positions are scattered as the lookups are summed."""

    tp: Axis
    first_row: int

    def lookup(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S/tp, D]."""
        local_BS = tokens_BS - self.first_row
        mine_BS = (local_BS >= 0) & (local_BS < self.weight.shape[0])
        x_BSD = F.embedding(torch.where(mine_BS, local_BS, 0), self.weight).to(self.dtype)
        # Rows of other ranks add zeros; of the sum each rank keeps its part of the positions (sequence parallelism).
        return scatter_sum(torch.where(mine_BS[..., None], x_BSD, 0.0), self.tp, SEQUENCE)


def vocabulary_chunk_loss(
    tp: Axis, start: int, logits_NV: Tensor, targets_N: Tensor, z_loss: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Compute what `nn.cross_entropy.chunk_loss` does, for logits of the vocabulary's rows from `start` on.

    Ranks exchange two numbers a token: the log-partition of their part and the target's logit.
    """
    kept_N = targets_N != IGNORED
    log_z_N = log_partition(logits_NV)
    picked_N, local_N = _pick_own(logits_NV, targets_N, start)
    # The log-partition of the whole vocabulary from those of its parts.
    parts = gather_values(torch.stack((log_z_N, picked_N.to(log_z_N.dtype))), tp)
    log_z_N, picked_N = torch.logsumexp(parts[:, 0], dim=0), parts[:, 1].sum(dim=0)
    total = sum_losses(log_z_N, picked_N, kept_N, z_loss)
    if with_grad:
        replace_by_loss_gradient(logits_NV, log_z_N, local_N, kept_N, z_loss)
    return total, logits_NV


def vocabulary_token_scores(tp: Axis, start: int, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Compute what `nn.cross_entropy.token_scores` does, for logits of the vocabulary's rows from `start` on.

    Ranks exchange four numbers a token: those of `vocabulary_chunk_loss`, their largest logit and its token.
    """
    # Float64 holds numbers of tokens exactly, which travel in one message with the scores.
    wide = logits_NV.double()
    picked_N, _ = _pick_own(wide, targets_N, start)
    largest_N, token_N = wide.max(-1)
    mine = torch.stack((torch.logsumexp(wide, dim=-1), picked_N, largest_N, (token_N + start).double()))
    parts = gather_values(mine, tp)
    nats_N = torch.logsumexp(parts[:, 0], dim=0) - parts[:, 1].sum(dim=0)
    likeliest_N = parts[:, 3].gather(0, parts[:, 2].argmax(0, keepdim=True)).squeeze(0)
    return torch.stack((nats_N, likeliest_N))


def _pick_own(logits_NV: Tensor, targets_N: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return the targets' logits, 0 for those of other ranks, and their columns here, which may be beyond the columns."""
    local_N = targets_N - start
    mine_N = (local_N >= 0) & (local_N < logits_NV.shape[1]) & (targets_N != IGNORED)
    # Indices of other ranks' rows would be out of bounds: they read row 0, and count for nothing.
    safe_N = torch.where(mine_N, local_N, 0)
    return torch.where(mine_N, logits_NV.gather(1, safe_N[:, None]).squeeze(1), 0.0), local_N
