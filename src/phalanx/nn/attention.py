"""Causal self-attention, with interchangeable kernels that give the same numbers.

`sdpa` is torch's scaled_dot_product_attention with a dense bias where ALiBi or document masks ask for one; which of its
kernels runs is the caller's choice (`torch.nn.attention.sdpa_kernel`). `efficient` is the same for its memory-efficient
kernel, which takes as many keys and values as queries. `flex` is FlexAttention, which never builds the bias. Causal
attention without ALiBi, windows or document masks needs no bias in any. `flash4` is FlashAttention-4, for that alone.
Capped scores and sinks are for `flex`; where another kernel is asked for, they are computed as plain products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from phalanx.config.layers import AttentionConfig
from phalanx.kernels.flash4 import flash4_attention
from phalanx.nn.layers import Linear, build_norm, soft_cap
from phalanx.nn.positions import alibi_slopes, rope_tables, rotate
from phalanx.torch_compat import common as compat

AttentionKernel = Literal["sdpa", "efficient", "flex", "flash4"]


class RotaryContext(Protocol):
    """The part of a context that does not depend on how attention is computed."""

    @property
    def rope(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin tables, float32 [S, E/2]."""


class AttentionContext(NamedTuple):
    """What every layer's attention needs and no layer owns; built once a forward pass by `attention_context`."""

    rope: tuple[Tensor, Tensor] | None
    """cos and sin tables, float32 [S, E/2]."""
    bias: Tensor | None
    """Dense additive bias [B or 1, H or 1, S, S] in the activation format, -inf where attention is forbidden."""
    slopes_H: Tensor | None
    """ALiBi slopes for the flex kernel, float32 [H]."""
    block_mask: BlockMask | None
    """Causal (and document) mask; its presence selects the flex kernel."""
    rows_safe: bool = False
    """Whether every query attends to a key in each block of keys it meets; the flex kernel then needs no guard.

    True of causal masks. With document masks a query also meets blocks of earlier documents alone, and an unguarded
    kernel, whose running maximum is still -inf then, gives NaN.
    """
    flash4: bool = False
    """Whether FlashAttention-4 runs; it has no bias and no mask but the causal one."""
    repeated: bool = False
    """Whether each query head gets keys and values of its own, for a kernel that knows no shared ones."""
    softcap: float | None = None
    """Bound of the scores, by a tanh, before biases are added."""
    sinks_H: Tensor | None = None
    """Logits of this layer that take part in the softmax of each head; every layer fills in its own."""


@dataclass
class KeyValueCache:
    """Keys and values of the positions seen so far by one layer, [B, K, S, E] each.

    Of latent attention, `keys` are the latents and `values` the shared rotary keys, of one head each.
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, key_BKSE: Tensor, value_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions; returns all keys and values so far."""
        if self.keys is not None and self.values is not None:
            key_BKSE = torch.cat((self.keys, key_BKSE), dim=2)
            value_BKSE = torch.cat((self.values, value_BKSE), dim=2)
        self.keys, self.values = key_BKSE, value_BKSE
        return key_BKSE, value_BKSE

    def repeat(self, samples: int) -> None:
        """Let the one sample held stand for `samples` equal ones."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (x.expand(samples, -1, -1, -1) for x in (self.keys, self.values))

    @property
    def length(self) -> int:
        """Positions held."""
        return 0 if self.keys is None else self.keys.shape[2]


def attention_context(
    config: AttentionConfig,
    positions_S: Tensor,
    dtype: torch.dtype,
    *,
    kernel: AttentionKernel = "sdpa",
    document_ids_BS: Tensor | None = None,
    past: int = 0,
    heads: slice = slice(None),
) -> AttentionContext:
    """Return positions and masks for one forward pass.

    positions_S: int64 [S], the global positions of the queries. document_ids_BS: [B, S], attention stays within equal ids.
    past: number of cached positions before the first query (generation only; the keys are then positions 0 .. past+S-1).
    heads: the query heads that are computed.
    """
    rope = None if config.rope is None else rope_tables(config.rope, positions_S)
    slopes_H = None if config.alibi is None else alibi_slopes(config.alibi, positions_S.device)[heads]
    length = past + len(positions_S)
    window = config.window_within(length)
    if kernel == "flex":
        if document_ids_BS is None:
            mask = causal_block_mask(length, positions_S.device, window)
        else:
            documents_BS, seen = document_ids_BS, length if window is None else window

            def same_document(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                near = (query >= key) & (query - key < seen)
                return near & (documents_BS[batch, query] == documents_BS[batch, key])

            device = str(positions_S.device)
            mask = create_block_mask(same_document, len(documents_BS), None, length, length, device=device)
        # A window too leaves queries without a key in blocks that others of their block meet.
        safe = document_ids_BS is None and window is None
        return AttentionContext(rope, None, slopes_H, mask, rows_safe=safe, softcap=config.softcap)
    masked = slopes_H is not None or document_ids_BS is not None or window is not None or past > 0
    if not masked and not config.changes_softmax:
        return AttentionContext(rope, None, None, None, flash4=kernel == "flash4", repeated=kernel == "efficient")
    keys = torch.arange(length, device=positions_S.device)
    documents = None if document_ids_BS is None else (document_ids_BS, document_ids_BS)
    bias = dense_bias(slopes_H, positions_S, keys, dtype, documents, window)
    return AttentionContext(rope, bias, None, None, repeated=kernel == "efficient", softcap=config.softcap)


class ContextBuilder(Protocol):
    """The signature of `attention_context`."""

    def __call__(
        self,
        config: AttentionConfig,
        positions_S: Tensor,
        dtype: torch.dtype,
        *,
        kernel: AttentionKernel = "sdpa",
        document_ids_BS: Tensor | None = None,
        past: int = 0,
    ) -> RotaryContext:
        """Return positions and masks for one forward pass."""


def dense_bias(
    slopes_H: Tensor | None,
    queries_Q: Tensor,
    keys_S: Tensor,
    dtype: torch.dtype,
    documents: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> Tensor:
    """Return additive bias [B or 1, H or 1, Q, S] for queries and keys at these global positions, -inf where forbidden.

    slopes_H: ALiBi slopes. documents: ids of the queries' and of the keys' documents, [B, Q] and [B, S]. window: keys that
    a query sees, its own position and those before it; None is all.
    """
    distance_QS = keys_S[None, :] - queries_Q[:, None]
    forbidden = (distance_QS > 0)[None, None]
    if window is not None:
        forbidden = forbidden | (distance_QS <= -window)
    if documents is not None:
        forbidden = forbidden | (documents[0][:, None, :, None] != documents[1][:, None, None, :])
    if slopes_H is not None:
        bias = (slopes_H[:, None, None] * distance_QS)[None].to(dtype)
    else:
        # Masked below it takes the shape of the mask, which is often one for all heads.
        bias = torch.zeros((1, 1, 1, 1), dtype=dtype, device=queries_Q.device)
    return bias.masked_fill(forbidden, float("-inf"))


@cache
def causal_block_mask(length: int, device: torch.device, window: int | None = None) -> BlockMask:
    """Return FlexAttention's causal mask of `length` positions, made once for each length, device and window."""

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key if window is None else (query >= key) & (query - key < window)

    return create_block_mask(causal, None, None, length, length, device=str(device))


def attend(query_BHSE: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, context: AttentionContext) -> Tensor:
    """Return softmax(q k^T / sqrt(E) + bias) v by the kernel the context was built for: [B, H, S, E]."""
    if context.block_mask is not None:
        return _flex(query_BHSE, key_BKSE, value_BKSE, context)
    if context.flash4:
        return flash4_attention(query_BHSE, key_BKSE, value_BKSE)
    heads = query_BHSE.shape[1]
    if context.softcap is not None or context.sinks_H is not None:
        return attend_plainly(query_BHSE, key_BKSE, value_BKSE, context)
    # On accelerators only flash attention and cuDNN's kernel take keys and values that several query heads share, both of
    # 16-bit numbers alone, and with a bias only cuDNN's. For others SDPA would write all scores, where the memory-efficient
    # kernel needs no more than keys and values for every head.
    fused = context.bias is None or not compat.is_rocm()
    shares = query_BHSE.device.type == "cpu" or (query_BHSE.dtype in (torch.bfloat16, torch.float16) and fused)
    if context.repeated or not shares:
        if query_BHSE.shape[2] == 1:
            return _attend_one_query(query_BHSE, key_BKSE, value_BKSE, context.bias)
        key_BKSE, value_BKSE = repeat_heads(key_BKSE, heads), repeat_heads(value_BKSE, heads)
    return F.scaled_dot_product_attention(
        query_BHSE,
        key_BKSE,
        value_BKSE,
        attn_mask=context.bias,
        # A single query is the last position, which sees all keys; `is_causal` would align it with the first key.
        is_causal=context.bias is None and query_BHSE.shape[2] > 1,
        enable_gqa=heads != key_BKSE.shape[1],
    )


def _attend_one_query(query_BH1E: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, bias: Tensor | None) -> Tensor:
    """Return attention of a single position as plain products, [B, H, 1, E]: generation has one query at a time.

    The memory-efficient kernel wants rows of queries that begin at multiples of 16 bytes. A dim of size 1 may have any
    stride, and the compiler gives it 1, which the kernel refuses. The scores of one query are few.
    """
    B, H, _, E = query_BH1E.shape
    K, S = key_BKSE.shape[1:3]
    scores_BKGS = query_BH1E.reshape(B, K, H // K, E) @ key_BKSE.transpose(2, 3) / math.sqrt(E)
    if bias is not None:
        # One bias for all heads is broadcast; a bias for each head is grouped like the queries.
        scores_BKGS = scores_BKGS + (bias if bias.shape[1] == 1 else bias.reshape(-1, K, H // K, S))
    weights = torch.softmax(scores_BKGS, -1, dtype=torch.promote_types(query_BH1E.dtype, torch.float32))
    return (weights.to(value_BKSE.dtype) @ value_BKSE).reshape(B, H, 1, value_BKSE.shape[-1])


def attend_plainly(query_BHQE: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, context: AttentionContext) -> Tensor:
    """Return attention as separate products, [B, H, Q, E], with capped scores and sinks; all scores exist at once."""
    assert context.bias is not None
    kv_heads, wide = key_BKSE.shape[1], torch.promote_types(query_BHQE.dtype, torch.float32)
    grouped = query_BHQE.unflatten(1, (kv_heads, -1))
    scores_BHQS = (grouped @ key_BKSE.unsqueeze(2).mT).flatten(1, 2).to(wide) / math.sqrt(query_BHQE.shape[-1])
    if context.softcap is not None:
        scores_BHQS = soft_cap(scores_BHQS, context.softcap)
    scores_BHQS = scores_BHQS + context.bias
    log_z_BHQ = torch.logsumexp(scores_BHQS, -1)
    weights = (scores_BHQS - log_z_BHQ[..., None]).exp().to(value_BKSE.dtype).unflatten(1, (kv_heads, -1))
    out = (weights @ value_BKSE.unsqueeze(2)).flatten(1, 2)
    return out if context.sinks_H is None else join_sinks(out, log_z_BHQ, context.sinks_H)


def join_sinks(out_BHQE: Tensor, log_z_BHQ: Tensor, sinks_H: Tensor) -> Tensor:
    """Return attention whose softmax has a further logit for each head, without a value.

    out_BHQE: attention without them. log_z_BHQ: logs of its softmax's denominators.
    """
    # The denominator grows by exp(sink): a query's weights shrink by the same factor.
    kept = torch.sigmoid(log_z_BHQ - sinks_H.to(log_z_BHQ.dtype)[:, None])
    return out_BHQE * kept[..., None].to(out_BHQE.dtype)


def repeat_heads(x_BKSE: Tensor, heads: int) -> Tensor:
    """Return keys or values [B, K, S, E] for each query head, [B, heads, S, E]; gradients of a group are summed."""
    kv_heads = x_BKSE.shape[1]
    if kv_heads == heads:
        return x_BKSE
    return x_BKSE.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2)


def attend_whole(query_BHSE: Tensor, key_BHSE: Tensor, value_BHSE: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v over all tokens, [B, H, S, E]: nothing is masked."""
    return F.scaled_dot_product_attention(query_BHSE, key_BHSE, value_BHSE)


AttentionCore = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""The signature of `attend`; each core comes with its own kind of context."""


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def _flex(query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
    slopes_H, softcap = context.slopes_H, context.softcap

    def change(score: Tensor, _batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        if softcap is not None:
            score = soft_cap(score, softcap)
        return score if slopes_H is None else score + slopes_H[head] * (key_index - query_index)

    # Inside a compiled block the call is traced; outside it, an uncompiled call would build the whole score matrix.
    eager = torch.compiler.is_compiling() or query.device.type == "cpu"
    run = cast(Callable[..., Tensor], flex_attention) if eager else _compiled_flex()
    result = run(
        query,
        key,
        value,
        score_mod=None if slopes_H is None and softcap is None else change,
        block_mask=context.block_mask,
        kernel_options={"ROWS_GUARANTEED_SAFE": context.rows_safe},
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=context.sinks_H is not None,
    )
    if context.sinks_H is not None:
        out, log_z_BHQ = result
        return join_sinks(out, log_z_BHQ, context.sinks_H)
    assert isinstance(result, Tensor)
    return result


class AttentionSinks(nn.Module):
    """A learned logit for each query head, which takes part in its softmax and has no value (gpt-oss)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def join(self, context: RotaryContext) -> RotaryContext:
        """Return `context` with these logits."""
        joined: RotaryContext = cast(Any, context)._replace(sinks_H=self.weight)
        return joined


class CausalAttention(nn.Module):
    """What kinds of causal self-attention share: the core between projections, its sinks and its scale."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        # An attribute, so that context parallelism and the planner can put their own attention in its place.
        self.attend: AttentionCore = attend
        self.query_factor = query_factor(config.scale, config.head_size)
        self.sinks = AttentionSinks(config.heads) if config.sinks else None

    def _scaled(self, query: Tensor) -> Tensor:
        """Return queries with which the 1 / sqrt(E) of kernels becomes the scale that the model asks for."""
        return query if self.query_factor == 1.0 else query * self.query_factor

    def _mix(self, query_BHSE: Tensor, key_BKSE: Tensor, value_BKSV: Tensor, context: RotaryContext) -> Tensor:
        """Return attention between the projections, [B, H, S, V]."""
        if self.sinks is not None:
            context = self.sinks.join(context)
        return self.attend(query_BHSE, key_BKSE, value_BKSV, context)


class Attention(CausalAttention):
    """Causal self-attention with grouped keys and values (Ainslie et al. 2023).

    `qkv.weight` has its rows grouped by key/value head: the G query heads of the group, then its key, then its value. A
    contiguous part of the rows is therefore a whole number of groups, which is what tensor parallelism splits.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.head_size = config.head_size
        self.group = config.group
        self.clip = config.clip
        width = config.heads * config.head_size
        self.qkv = Linear(config.width, width + 2 * config.kv_heads * config.head_size, bias=config.qkv_bias)
        self.output = Linear(width, config.width, bias=config.bias)
        self.query_norm = self.key_norm = None
        if config.query_norm is not None and config.key_norm is not None:
            self.query_norm, self.key_norm = build_norm(config.query_norm), build_norm(config.key_norm)
        self.joint_norm = config.joint_norm

    def forward(self, x_BSD: Tensor, context: RotaryContext, cache: KeyValueCache | None = None) -> Tensor:
        """Map [B, S, D] -> [B, S, D]. With `cache`, keys and values of earlier positions are attended to as well."""
        query, key, value = self._project(x_BSD)
        # Before keys are cached: a rotation depends on the key's own position alone, so it is done once.
        if context.rope is not None:
            query, key = rotate(query, *context.rope), rotate(key, *context.rope)
        query = self._scaled(query)
        # Views: kernels take strided heads, and a copy would cost as much memory as the projection.
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if cache is not None:
            key, value = cache.append(key, value)
        mixed = self._mix(query, key, value, context)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, H, E], keys and values [B, S, K, E]."""
        qkv = self.qkv(x_BSD)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        grouped = qkv.unflatten(-1, (-1, self.group + 2, self.head_size))
        query = grouped[..., : self.group, :].flatten(2, 3)
        key, value = grouped[..., self.group, :], grouped[..., self.group + 1, :]
        if self.query_norm is not None and self.key_norm is not None:
            if self.joint_norm:
                # All heads together.
                query = self.query_norm(query.flatten(2)).view(query.shape)
                key = self.key_norm(key.flatten(2)).view(key.shape)
            else:
                query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value


def query_factor(scale: float | None, size: int) -> float:
    """Return the factor of queries of `size` features that turns the 1 / sqrt(size) of every kernel into `scale`."""
    # Queries are scaled rather than products: any kernel then takes any scale.
    return 1.0 if scale is None else scale * math.sqrt(size)
