"""Context parallelism: ranks of `cp` hold different positions of the same samples, and attention joins them.

ring: keys and values travel from rank to rank while each computes with what it has (Liu et al. 2023). A rank holds an
early and a late run of positions, so that a causal mask leaves all ranks the same work.
all_to_all: for attention ranks exchange positions for heads, each then has some heads of all positions (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.layers import AttentionConfig
from phalanx.config.model import LanguageModel
from phalanx.layout.context_parallel.ring_attention import ring_attention, ring_positions
from phalanx.layout.mesh import Axis
from phalanx.layout.tensor_parallel.autograd_collectives import exchange_parts
from phalanx.nn.attention import (
    AttentionContext,
    AttentionCore,
    AttentionKernel,
    CausalAttention,
    ContextBuilder,
    attend,
    attention_context,
)
from phalanx.nn.positions import Positions, alibi_slopes, rope_tables
from phalanx.torch_compat import common as compat


@dataclass(frozen=True)
class SequenceShare:
    """Which positions of every sample this rank computes."""

    cp: Axis
    tp: Axis
    context: str
    """ring or all_to_all."""

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that hold other positions of the same samples; no gradient."""
        for axis in (self.cp, self.tp):
            if axis.size > 1:
                x = compat.all_reduce(x, axis.group_name)
        return x

    def positions(self, length: int, device: torch.device) -> Positions:
        """Return global positions of this rank's tokens, and of the rows of its residual stream."""
        if self.context == "ring" and self.cp.size > 1:
            tokens_S = ring_positions(self.cp.rank, self.cp.size, length // self.cp.size, device)
        else:
            each = length // self.cp.size
            tokens_S = torch.arange(self.cp.rank * each, (self.cp.rank + 1) * each, device=device)
        return Positions(tokens_S, tokens_S.chunk(self.tp.size)[self.tp.rank])


class ContextModel(Protocol):
    """A model whose attentions get what they have in common from one builder."""

    config: LanguageModel
    attention_context: ContextBuilder

    def modules(self) -> Iterator[nn.Module]:
        """See `nn.Module`."""


class RingContext(NamedTuple):
    """Rotary angles, biases and masks of ring attention, the same in every layer."""

    rope: tuple[Tensor, Tensor] | None
    slopes_H: Tensor | None
    """ALiBi slopes of this rank's heads."""
    document_ids_BS: Tensor | None
    """Document of each token of whole samples."""
    window: int | None = None
    """Positions that a query sees, its own and those before it; None where it sees all."""
    softcap: float | None = None
    """Bound of the scores."""
    sinks_H: Tensor | None = None
    """Logits of this rank's heads that take part in the softmax; every layer fills in its own."""


def split_context(model: ContextModel, share: SequenceShare, attend: AttentionCore = attend) -> None:
    """Let every attention of `model` reach the positions that other ranks hold; and know which heads are its own.

    attend: attention of whole samples by some heads, as the exchange leaves them.
    """
    cp, tp = share.cp, share.tp
    heads = model.config.n_heads // tp.size
    first = tp.rank * heads
    core: AttentionCore
    if cp.size == 1:
        model.attention_context = partial(attention_context, heads=slice(first, first + heads))
        core = attend
    elif share.context == "ring":
        model.attention_context = partial(_ring_context, cp, slice(first, first + heads))
        core = partial(_attend_by_ring, cp)
    else:
        # Ranks of `cp` divide the heads that their place along `tp` has.
        each = heads // cp.size
        mine = slice(first + cp.rank * each, first + (cp.rank + 1) * each)
        model.attention_context = partial(_exchanged_context, cp, mine)
        core = partial(_attend_by_exchange, cp, attend)
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.attend = core


def _ring_context(
    cp: Axis,
    heads: slice,
    config: AttentionConfig,
    positions_S: Tensor,
    dtype: torch.dtype,
    *,
    kernel: AttentionKernel = "sdpa",
    document_ids_BS: Tensor | None = None,
    past: int = 0,
) -> RingContext:
    assert past == 0, "cached generation runs on one rank"
    return RingContext(
        None if config.rope is None else rope_tables(config.rope, positions_S),
        None if config.alibi is None else alibi_slopes(config.alibi, positions_S.device)[heads],
        document_ids_BS,
        config.window_within(len(positions_S) * cp.size),
        config.softcap,
    )


def _attend_by_ring(cp: Axis, query: Tensor, key: Tensor, value: Tensor, context: RingContext) -> Tensor:
    width = value.shape[-1]
    if width < key.shape[-1]:
        # Keys and values travel as one tensor, and fused kernels want one width of both: zeros add nothing.
        value = F.pad(value, (0, key.shape[-1] - width))
    out: Tensor = ring_attention(
        query,
        key,
        value,
        context.slopes_H,
        context.document_ids_BS,
        context.sinks_H,
        context.window,
        context.softcap,
        cp.group_name,
        cp.rank,
        cp.size,
    )[0]
    return out[..., :width]


def _exchanged_context(
    cp: Axis,
    heads: slice,
    config: AttentionConfig,
    positions_S: Tensor,
    dtype: torch.dtype,
    *,
    kernel: AttentionKernel = "sdpa",
    document_ids_BS: Tensor | None = None,
    past: int = 0,
) -> AttentionContext:
    """Return the mask of whole samples for this rank's heads; rotary angles of this rank's positions, which come first."""
    assert past == 0, "cached generation runs on one rank"
    # After the exchange each rank has all positions in order, with some heads.
    whole_S = torch.arange(len(positions_S) * cp.size, device=positions_S.device)
    context = attention_context(config, whole_S, dtype, kernel=kernel, document_ids_BS=document_ids_BS, heads=heads)
    return context._replace(rope=None if config.rope is None else rope_tables(config.rope, positions_S))


def _attend_by_exchange(
    cp: Axis, attend: AttentionCore, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Tensor:
    if context.sinks_H is not None:
        # Those of the heads that this rank gets of all positions; the others' gradients come from the other ranks.
        context = context._replace(sinks_H=context.sinks_H.chunk(cp.size)[cp.rank])
    query, key, value = (exchange_parts(x, cp, split=1, join=2) for x in (query, key, value))
    return exchange_parts(attend(query, key, value, context), cp, split=2, join=1)
