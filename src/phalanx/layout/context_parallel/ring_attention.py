"""Ring attention as one operation with its own gradient, opaque to the compiler.

Rank r of n holds runs r and 2n-1-r of the 2n runs a sample is cut into. Of another rank's keys a causal mask then forbids
either the late run (to all queries) or everything to the early queries, never less than half: no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout.context_parallel.partial_attention import Part, attend_part, join, part_gradients
from phalanx.nn.attention import dense_bias
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
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return causal attention of this rank's queries to all ranks' keys.

    query: [B, H, S, E]; key, value: [B, K, S, E], at `ring_positions`. slopes_H: ALiBi slopes. document_ids_BS: of whole
    samples. group: name of the process group of `size` ranks. Returns [B, H, S, E] in the format of the query and the
    log-partitions [B, H, S].
    """
    return attend_along(Ring(rank, size, compat.process_group(group)), query, key, value, slopes_H, document_ids_BS)


def attend_along(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, slopes_H: Tensor | None, document_ids_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `ring_attention` step by step."""
    total: Part | None = None
    for source, travelling in ring.tour(torch.stack((key, value))):
        for task in _list_tasks(ring, source, query, slopes_H, document_ids_BS):
            part = attend_part(
                query[:, :, task.queries],
                travelling[0, :, :, task.keys],
                travelling[1, :, :, task.keys],
                causal=task.causal,
                bias=task.bias,
            )
            total = join(total, part, task.queries)
    assert total is not None
    # Contiguous, as the compiler was told: kernels leave their results in the order of their inputs' dims.
    return total.out.to(query.dtype).contiguous(), total.log_z.contiguous()


RING_ATTENTION = torch.ops.phalanx.ring_attention.default
"""The operation itself, as recompute policies see it."""


@ring_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes_H: Tensor | None,
    document_ids_BS: Tensor | None,
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor]:
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
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value."""
    ring = Ring(rank, size, compat.process_group(group))
    return gradients_along(ring, grad_out, query, key, value, out, log_z, slopes_H, document_ids_BS)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward pass: gradients of keys and values travel one step behind them, and so reach home."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query = query.new_zeros(query.shape, dtype=wide)
    grads: Tensor | None = None
    for source, travelling in ring.tour(torch.stack((key, value))):
        mine = travelling.new_zeros(travelling.shape, dtype=wide)
        for task in _list_tasks(ring, source, query, slopes_H, document_ids_BS):
            queries, keys = task.queries, task.keys
            grad_q, grad_k, grad_v = part_gradients(
                grad_out[:, :, queries],
                query[:, :, queries],
                travelling[0, :, :, keys],
                travelling[1, :, :, keys],
                Part(out[:, :, queries], log_z[:, :, queries]),
                causal=task.causal,
                bias=task.bias,
            )
            grad_query[:, :, queries] += grad_q
            mine[0, :, :, keys] += grad_k
            mine[1, :, :, keys] += grad_v
        grads = mine if grads is None else ring.pass_on(grads) + mine
    assert grads is not None
    grad_key, grad_value = ring.pass_on(grads).to(query.dtype).unbind(0)
    return grad_query.to(query.dtype), grad_key.clone(), grad_value.clone()


@_ring_gradients.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_z: Tensor,
    slopes_H: Tensor | None,
    document_ids_BS: Tensor | None,
    group: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, group, rank, size = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.place = group, rank, size
    ctx.mark_non_differentiable(output[1])


def _ring_backward(ctx: Any, grad_out: Tensor, _grad_log_z: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, slopes_H, document_ids_BS, out, log_z = ctx.saved_tensors
    grads = _ring_gradients(grad_out.contiguous(), query, key, value, out, log_z, slopes_H, document_ids_BS, *ctx.place)
    return (*grads, None, None, None, None, None)


ring_attention.register_autograd(_ring_backward, setup_context=_save_tensors)

RING_GRADIENTS = torch.ops.phalanx.ring_attention_gradients.default
"""The backward pass as an operation, as cost models see it."""


class _Task:
    """A pair of slices of queries and keys with something to compute, and its mask."""

    def __init__(self, queries: slice, keys: slice, *, causal: bool = False, bias: Tensor | None = None) -> None:
        self.queries = queries
        self.keys = keys
        self.causal = causal
        self.bias = bias


_ALL = slice(None)


def _list_tasks(
    ring: Ring, source: int, query: Tensor, slopes_H: Tensor | None, document_ids_BS: Tensor | None
) -> list[_Task]:
    """Return what this rank's queries have to do with the keys of `source`."""
    rank, size, length = ring.rank, ring.size, query.shape[2]
    if slopes_H is not None or document_ids_BS is not None:
        queries_Q, keys_S = (ring_positions(r, size, length, query.device) for r in (rank, source))
        documents = None
        if document_ids_BS is not None:
            documents = document_ids_BS[:, queries_Q], document_ids_BS[:, keys_S]
        wide = torch.promote_types(query.dtype, torch.float32)
        return [_Task(_ALL, _ALL, bias=dense_bias(slopes_H, queries_Q, keys_S, wide, documents))]
    if source == rank:
        return [_Task(_ALL, _ALL, causal=True)]
    if source < rank:
        return [_Task(_ALL, slice(0, length // 2))]
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
        return dist.batch_isend_irecv(operations), received
