"""Attention of some queries to some keys, with what is needed to join it to attention to other keys.

Softmax over all keys follows from softmax over parts of them and each part's log-partition (Milakov & Gimelshein 2018), and
gradients of a part follow from the joint result (Dao et al. 2022, appendix B.2).

Shapes: B samples, H query heads, K key/value heads (K divides H), Q queries, S keys, E head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.torch_compat import common as compat


class Part(NamedTuple):
    """Attention to a part of the keys."""

    out: Tensor
    """[B, H, Q, E], in at least float32 once joined."""
    log_z: Tensor
    """Log of the softmax's denominator, at least float32 [B, H, Q]; -inf for a query with no key in the part."""


def attend_part(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, bias: Tensor | None) -> Part:
    """Return attention to these keys alone. causal: queries and keys stand at the same ascending positions.

    bias: [B or 1, H or 1, Q, S], -inf where forbidden; with it `causal` must be False.
    """
    if bias is None and compat.has_attention_kernel(query):
        return Part(*compat.attention_kernel(query, key, value, causal))
    key, value = _repeat_groups(key, query), _repeat_groups(value, query)
    scores = _compute_scores(query, key, causal, bias)
    log_z = torch.logsumexp(scores, dim=-1)
    probability = (scores - log_z.masked_fill(log_z == -torch.inf, 0.0)[..., None]).exp()
    return Part((probability @ value.to(scores.dtype)), log_z)


def join(total: Part | None, part: Part, queries: slice = slice(None)) -> Part:
    """Join attention to a part of the keys to `total`, attention to others.

    part: of these queries; of all of them where there is no `total` yet. Both may be changed in place.
    """
    wide = torch.promote_types(part.out.dtype, torch.float32)
    if total is None:
        return Part(part.out.to(wide), part.log_z)
    out, before = total.out[:, :, queries], total.log_z[:, :, queries]
    log_z = torch.logaddexp(before, part.log_z)
    safe = log_z.masked_fill(log_z == -torch.inf, 0.0)
    old, new = ((z - safe).exp()[..., None] for z in (before, part.log_z))
    out.mul_(old).addcmul_(part.out.to(wide), new)
    before.copy_(log_z)
    return total


def part_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, joint: Part, *, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values that come from this part of the keys.

    joint: the result over all keys of these queries, `out` in the format of the queries.
    """
    if bias is None and compat.has_attention_kernel(query):
        return compat.attention_kernel_gradients(grad_out, query, key, value, joint.out, joint.log_z, causal)
    whole_key, whole_value = _repeat_groups(key, query), _repeat_groups(value, query)
    scores = _compute_scores(query, whole_key, causal, bias)
    wide = scores.dtype
    grad_out = grad_out.to(wide)
    probability = (scores - joint.log_z[..., None]).exp()
    grad_value = probability.mT @ grad_out
    inner = (grad_out * joint.out.to(wide)).sum(-1, keepdim=True)
    grad_scores = probability * (grad_out @ whole_value.to(wide).mT - inner) * query.shape[-1] ** -0.5
    grad_query = grad_scores @ whole_key.to(wide)
    grad_key = grad_scores.mT @ query.to(wide)
    return grad_query, _sum_groups(grad_key, key), _sum_groups(grad_value, key)


def _compute_scores(query: Tensor, key: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores: Tensor = query.to(wide) @ key.to(wide).mT * query.shape[-1] ** -0.5
    if bias is not None:
        return scores + bias.to(wide)
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
