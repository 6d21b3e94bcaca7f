"""Ring attention as one operation with its own gradient, opaque to the compiler.

Rank r of n holds runs r and 2n-1-r of the 2n runs a sample is cut into. Of another rank's keys a causal mask then forbids
either the late run (to all queries) or everything to the early queries, never less than half: no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.nn.attention import dense_bias
from phalanx.nn.layers import soft_cap
from phalanx.torch_compat import common as compat


def ring_positions(rank: int, size: int, length: int, device: torch.device) -> Tensor:
    """Return global positions of the `length` tokens that `rank` of `size` holds: an early and a late run."""
    run = torch.arange(length // 2, device=device)
    return torch.cat((run + rank * (length // 2), run + (2 * size - 1 - rank) * (length // 2)))


@torch.library.custom_op("phalanx::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes_H: Tensor | None,
    document_ids_BS: Tensor | None,
    sinks_H: Tensor | None,
    window: int | None,
    softcap: float | None,
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return causal attention of this rank's queries to all ranks' keys.

    query: [B, H, S, E]; key, value: [B, K, S, E], at `ring_positions`. slopes_H: ALiBi slopes. document_ids_BS: of whole
    samples. sinks_H: logits that take part in the softmax of each head. window: positions that a query sees, its own and
    those before it. softcap: bound of the scores. group: name of the process group of `size` ranks. Returns [B, H, S, E]
    in the format of the query and the log-partitions [B, H, S], sinks included.
    """
    ring = Ring(rank, size, compat.process_group(group))
    return attend_along(ring, query, key, value, slopes_H, document_ids_BS, sinks_H, window, softcap)


def attend_along(
    ring: Ring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes_H: Tensor | None,
    document_ids_BS: Tensor | None,
    sinks_H: Tensor | None,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Run `ring_attention` step by step."""
    mask = _Mask(slopes_H, document_ids_BS, window, softcap)
    total: Part | None = None
    # Keys and values come round; the next ones arrive while these are computed with.
    for source, travelling in ring.tour(torch.stack((key, value))):
        for task in _list_tasks(ring, source, query, mask):
            part = attend_part(
                query[:, :, task.queries],
                travelling[0, :, :, task.keys],
                travelling[1, :, :, task.keys],
                causal=task.causal,
                bias=task.bias,
                softcap=softcap,
            )
            total = join_parts(total, part, task.queries)
    assert total is not None
    if sinks_H is not None:
        # A part of the softmax without a value: with its share in the log-partitions, the backward pass needs no other rule.
        sinks = sinks_H.to(total.log_z.dtype)[:, None].expand_as(total.log_z)
        total = join_parts(total, Part(torch.zeros_like(total.out), sinks))
    # Contiguous, as the compiler was told: kernels leave their results in the order of their inputs' dims.
    return total.out.to(query.dtype).contiguous(), total.log_z.contiguous()


RING_ATTENTION = torch.ops.phalanx.ring_attention.default
"""The operation itself, as recompute policies see it."""


@ring_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=wide)


@torch.library.custom_op("phalanx::ring_attention_gradients", mutates_args=())
def _ring_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_z: Tensor,
    slopes_H: Tensor | None,
    document_ids_BS: Tensor | None,
    window: int | None,
    softcap: float | None,
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value."""
    ring = Ring(rank, size, compat.process_group(group))
    return gradients_along(ring, grad_out, query, key, value, out, log_z, slopes_H, document_ids_BS, window, softcap)


def gradients_along(
    ring: Ring,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_z: Tensor,
    slopes_H: Tensor | None,
    document_ids_BS: Tensor | None,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward pass: gradients of keys and values travel one step behind them, and so reach home."""
    mask = _Mask(slopes_H, document_ids_BS, window, softcap)
    wide = torch.promote_types(query.dtype, torch.float32)
    # Added up over the ranks' parts: bfloat16 sums would round once a rank.
    grad_query = query.new_zeros(query.shape, dtype=wide)
    grads: Tensor | None = None
    for source, travelling in ring.tour(torch.stack((key, value))):
        mine = travelling.new_zeros(travelling.shape, dtype=wide)
        for task in _list_tasks(ring, source, query, mask):
            queries, keys = task.queries, task.keys
            grad_q, grad_k, grad_v = part_gradients(
                grad_out[:, :, queries],
                query[:, :, queries],
                travelling[0, :, :, keys],
                travelling[1, :, :, keys],
                Part(out[:, :, queries], log_z[:, :, queries]),
                causal=task.causal,
                bias=task.bias,
                softcap=softcap,
            )
            grad_query[:, :, queries] += grad_q
            mine[0, :, :, keys] += grad_k
            mine[1, :, :, keys] += grad_v
        # They follow the keys one step behind; the last `pass_on` below brings them to the keys' owner.
        grads = mine if grads is None else ring.pass_on(grads) + mine
    assert grads is not None
    grad_key, grad_value = ring.pass_on(grads).to(query.dtype).unbind(0)
    return grad_query.to(query.dtype), grad_key.clone(), grad_value.clone()


@_ring_gradients.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, window, softcap, group, rank, size = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.place = window, softcap, group, rank, size
    # Log-partitions serve the backward pass; nothing is differentiated through them.
    ctx.mark_non_differentiable(output[1])


def _ring_backward(ctx: Any, grad_out: Tensor, _grad_log_z: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, slopes_H, document_ids_BS, sinks_H, out, log_z = ctx.saved_tensors
    grads = _ring_gradients(grad_out.contiguous(), query, key, value, out, log_z, slopes_H, document_ids_BS, *ctx.place)
    grad_sinks = None
    if sinks_H is not None:
        # A sink has a weight in the softmax, and 0 for its value. These are the parts of this rank's queries, [H].
        weights_BHS = (sinks_H.to(log_z.dtype)[:, None] - log_z).exp()
        inner_BHS = (grad_out.to(log_z.dtype) * out.to(log_z.dtype)).sum(-1)
        grad_sinks = -(weights_BHS * inner_BHS).sum((0, 2)).to(sinks_H.dtype)
    return (*grads, None, None, grad_sinks, None, None, None, None, None)


ring_attention.register_autograd(_ring_backward, setup_context=_save_tensors)

RING_GRADIENTS = torch.ops.phalanx.ring_attention_gradients.default
"""The backward pass as an operation, as cost models see it."""


class _Mask(NamedTuple):
    """What changes scores besides the causal mask."""

    slopes_H: Tensor | None
    document_ids_BS: Tensor | None
    window: int | None
    softcap: float | None


class _Task(NamedTuple):
    """A pair of slices of queries and keys with something to compute, and its mask."""

    queries: slice
    keys: slice
    causal: bool = False
    bias: Tensor | None = None


_ALL = slice(None)


def _list_tasks(ring: Ring, source: int, query: Tensor, mask: _Mask) -> list[_Task]:
    """Return what this rank's queries have to do with the keys of `source`."""
    rank, size, length = ring.rank, ring.size, query.shape[2]
    document_ids_BS = mask.document_ids_BS
    # A bias keeps fused kernels away, which know neither biases nor caps.
    if any(change is not None for change in mask):
        queries_Q, keys_S = (ring_positions(r, size, length, query.device) for r in (rank, source))
        documents = None
        if document_ids_BS is not None:
            documents = document_ids_BS[:, queries_Q], document_ids_BS[:, keys_S]
        wide = torch.promote_types(query.dtype, torch.float32)
        return [_Task(_ALL, _ALL, bias=dense_bias(mask.slopes_H, queries_Q, keys_S, wide, documents, mask.window))]
    if source == rank:
        return [_Task(_ALL, _ALL, causal=True)]
    # Its early run lies before all of ours, its late run behind.
    if source < rank:
        return [_Task(_ALL, slice(0, length // 2))]
    # Only our late queries come after its keys, and after all of them.
    return [_Task(slice(length // 2, length), _ALL)]


class Ring:
    """Sends to the next rank and receives from the one before."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """group: None where `start` does not communicate."""
        self.group = group
        self.rank = rank
        self.size = size

    def tour(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's tensor with its rank, this rank's first; the next one comes in while the caller computes."""
        present = own
        for step in range(self.size):
            waiting = self.start(present) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, present
            if waiting is not None:
                works, present = waiting
                for work in works:
                    work.wait()

    def pass_on(self, x: Tensor) -> Tensor:
        """Send `x` to the next rank and return what the rank before sends."""
        works, received = self.start(x)
        for work in works:
            work.wait()
        return received

    def start(self, x: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Send `x` and receive what will be complete once the works are waited for."""
        received = torch.empty_like(x)
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ]
        # Together: a send alone would wait, on NCCL, for a receive that its neighbour posts after its own send.
        return dist.batch_isend_irecv(operations), received


class Part(NamedTuple):
    """Attention to a part of the keys."""

    out: Tensor
    """[B, H, Q, E], in at least float32 once joined."""
    log_z: Tensor
    """Log of the softmax's denominator, at least float32 [B, H, Q]; -inf for a query with no key in the part."""


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, bias: Tensor | None, softcap: float | None = None
) -> Part:
    """Return attention to these keys alone. causal: queries and keys stand at the same ascending positions.

    bias: [B or 1, H or 1, Q, S], -inf where forbidden; with it `causal` must be False. softcap: bound of the scores, for
    calls with a bias.
    """
    # Fused kernels give the log-partition as well; biases, windows and caps they do not take are written out below.
    if bias is None and compat.has_attention_kernel(query):
        return Part(*compat.attention_kernel(query, key, value, causal))
    key, value = _repeat_groups(key, query), _repeat_groups(value, query)
    scores = _mask_scores(_compute_products(query, key, softcap), causal, bias)
    log_z = torch.logsumexp(scores, dim=-1)
    # A query that may see no key of this part has log_z = -inf; 0 in its place gives weights of 0 and not NaN.
    probability = (scores - log_z.masked_fill(log_z == -torch.inf, 0.0)[..., None]).exp()
    return Part((probability @ value.to(scores.dtype)), log_z)


def join_parts(total: Part | None, part: Part, queries: slice = slice(None)) -> Part:
    """Join attention to a part of the keys to `total`, attention to others.

    part: of these queries; of all of them where there is no `total` yet. Both may be changed in place.
    """
    wide = torch.promote_types(part.out.dtype, torch.float32)
    if total is None:
        return Part(part.out.to(wide), part.log_z)
    out, before = total.out[:, :, queries], total.log_z[:, :, queries]
    log_z = torch.logaddexp(before, part.log_z)
    # Where a query has no key so far, -inf minus -inf would be NaN.
    safe = log_z.masked_fill(log_z == -torch.inf, 0.0)
    old, new = ((z - safe).exp()[..., None] for z in (before, part.log_z))
    out.mul_(old).addcmul_(part.out.to(wide), new)
    before.copy_(log_z)
    return total


def part_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    joint: Part,
    *,
    causal: bool,
    bias: Tensor | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values that come from this part of the keys.

    joint: the result over all keys of these queries, `out` in the format of the queries.
    """
    if bias is None and compat.has_attention_kernel(query):
        return compat.attention_kernel_gradients(grad_out, query, key, value, joint.out, joint.log_z, causal)
    whole_key, whole_value = _repeat_groups(key, query), _repeat_groups(value, query)
    # Weights of the softmax over all keys, from its log-partition: no part needs the others' scores.
    products = _compute_products(query, whole_key, softcap)
    scores = _mask_scores(products, causal, bias)
    wide = scores.dtype
    grad_out = grad_out.to(wide)
    probability = (scores - joint.log_z[..., None]).exp()
    grad_value = probability.mT @ grad_out
    # The part of the softmax's gradient that all keys share, from the joint result (D of FlashAttention).
    inner = (grad_out * joint.out.to(wide)).sum(-1, keepdim=True)
    grad_scores = probability * (grad_out @ whole_value.to(wide).mT - inner) * query.shape[-1] ** -0.5
    if softcap is not None:
        # The derivative of cap * tanh(x / cap).
        grad_scores = grad_scores * (1.0 - (products / softcap).square())
    grad_query = grad_scores @ whole_key.to(wide)
    grad_key = grad_scores.mT @ query.to(wide)
    return grad_query, _sum_groups(grad_key, key), _sum_groups(grad_value, key)


def _compute_products(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """Return scaled and capped products of queries and keys, [B, H, Q, S]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    products: Tensor = query.to(wide) @ key.to(wide).mT * query.shape[-1] ** -0.5
    return products if softcap is None else soft_cap(products, softcap)


def _mask_scores(scores: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    """Return scores with the bias or the causal mask."""
    if bias is not None:
        return scores + bias.to(scores.dtype)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -torch.inf)
    return scores


def _repeat_groups(x_BKSE: Tensor, query: Tensor) -> Tensor:
    """Return keys or values repeated for every query head of their group."""
    repeated: Tensor = x_BKSE.repeat_interleave(query.shape[1] // x_BKSE.shape[1], dim=1)
    return repeated


def _sum_groups(grad_BHSE: Tensor, like_BKSE: Tensor) -> Tensor:
    """Sum gradients of repeated heads over each group: the adjoint of `_repeat_groups`."""
    folded: Tensor = grad_BHSE.unflatten(1, (like_BKSE.shape[1], -1)).sum(2)
    return folded
