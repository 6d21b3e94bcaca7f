"""The norm of a model's gradients, whatever ranks hold them, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.layout.apply import Applied
from phalanx.layout.execute import local_gradient
from phalanx.torch_compat import common as compat

SUMMED_ELEMENTS = 2**24
"""Elements whose squares are summed in their own format before the sums are added in float64."""


def local_gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm over this rank's elements of all gradients, 0-dim."""
    grads = [grad for p in parameters if (grad := local_gradient(p)) is not None and grad.numel()]
    if not grads:
        return torch.zeros(())
    # Sharded gradients lie one after another in the memory that a reduction left them in. Each run of them is read at once,
    # in a tenth of the time that a kernel for each tensor takes.
    parts = [part for run in _join_adjacent(grads) for part in run.split(SUMMED_ELEMENTS)]
    if parts[0].device.type == "cpu":
        # On the CPU, norms of many float32 numbers lose digits that products keep.
        squares = torch.stack([torch.dot(part, part) for part in parts]).double()
    else:
        # Products read each number twice, and take 1.6 times as long (benchmarks/README.md).
        squares = torch.stack([torch.linalg.vector_norm(part) for part in parts]).double().square()
    return squares.sum().sqrt().to(grads[0].dtype)


def _join_adjacent(grads: list[Tensor]) -> list[Tensor]:
    """Return the elements of `grads` as few flat tensors: those that lie side by side in one memory are joined."""
    # By storage and offset, not by address: a dry run's gradients have none.
    placed = sorted(
        ((compat.storage_key(grad), grad.storage_offset(), number) for number, grad in enumerate(grads)),
        key=lambda place: place[:2],
    )
    runs: list[list[Tensor]] = []
    end_of_run = None
    for storage, offset, number in placed:
        grad = grads[number]
        if grad.is_contiguous() and end_of_run == (storage, offset, grad.dtype):
            runs[-1].append(grad)
        else:
            runs.append([grad])
        end_of_run = (storage, offset + grad.numel(), grad.dtype) if grad.is_contiguous() else None
    # Only contiguous tensors are joined; a strided one is a run of its own.
    return [
        run[0].as_strided((sum(grad.numel() for grad in run),), (1,)) if run[0].is_contiguous() else run[0].flatten()
        for run in runs
    ]


def global_gradient_norm(applied: Applied) -> Tensor:
    """Return the 2-norm over the gradients of the whole model, equal on every rank: each element counts once.

    Of the ranks that hold the same elements (replicas, tensor-parallel ranks with an unsplit parameter, the two ends of a
    pipeline with tied embeddings, the ranks of a task head) one counts them.
    """
    mesh = applied.mesh
    if mesh.world is None:
        return local_gradient_norm(applied.parameters.values())
    counted = []
    for name, parameter in applied.parameters.items():
        alike = (name in applied.tied and mesh.tie.rank) or (name not in applied.splits and mesh.tp.rank)
        copy = mesh.branch.rank if name in applied.branch else mesh.replicas.rank
        if not alike and copy == 0:
            counted.append(parameter)
    sample = next(iter(applied.parameters.values()))
    norm = local_gradient_norm(counted) if counted else torch.zeros(())
    square = norm.to(sample.device, torch.float64).square()
    dist.all_reduce(square, group=mesh.world)
    return square.sqrt().to(sample.dtype)


def clip_or_skip(loss: Tensor, norm: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Return what to divide gradients by, so that their norm is at most `limit`, and whether to skip the update (1 or 0).

    An update is skipped where loss or norm is not finite. loss, norm: 0-dim; the results are 0-dim float32 tensors.
    """
    # Computed on the device throughout: asking for a value here would make the host wait for the whole step.
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = ~torch.isfinite(norm.double() + loss)
    return torch.where(skip, 1.0, divisor).float(), skip.float()
