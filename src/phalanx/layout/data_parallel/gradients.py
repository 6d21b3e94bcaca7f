"""Gradients of this rank's parameters: their sums and norms over ranks, and how they are scaled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.layout.mesh import Axis, Mesh
from phalanx.torch_compat import common as compat

SUMMED_ELEMENTS = 2**24
"""Elements whose squares the CPU sums in their own format before the sums are added in float64."""


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's elements of the gradient: the memory itself, not a copy."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def sum_gradients(axis: Axis, parameters: list[nn.Parameter]) -> None:
    """Sum the gradients of `parameters` over the ranks of `axis`, in place and in one exchange."""
    grads = [local_gradient(p) for p in parameters]
    found = [grad for grad in grads if grad is not None and grad.numel()]
    if axis.group is None or not found:
        return
    # One exchange of all: many small ones would each wait for the network's latency.
    flat = torch.cat([grad.flatten() for grad in found])
    dist.all_reduce(flat, group=axis.group)
    parts = flat.split([grad.numel() for grad in found])
    torch._foreach_copy_(found, [part.view_as(grad) for part, grad in zip(parts, found, strict=True)])


def gradient_norm_over_ranks(
    mesh: Mesh,
    parameters: Mapping[str, nn.Parameter],
    split: Collection[str],
    tied: Collection[str] = (),
    branch: Collection[str] = (),
    experts: Collection[str] = (),
) -> Tensor:
    """Return the 2-norm over the gradients of the whole model, equal on every rank: each element counts once.

    Of the ranks that hold the same elements (replicas, tensor-parallel ranks with an unsplit parameter, the two ends of a
    pipeline with a tied embedding, the sub-group of a task head) one counts them. split, tied, branch, experts: names
    of parameters that are split over `tp` or `ep`, are in the tied embedding group, belong to task heads, are split over
    `ep`.
    """
    if mesh.world is None:
        return local_gradient_norm(parameters.values())
    counted = []
    for name, parameter in parameters.items():
        alike = (name in tied and mesh.tie.rank) or (name not in split and mesh.tp.rank)
        copies = mesh.branch if name in branch else mesh.expert_replicas if name in experts else mesh.replicas
        if not alike and copies.rank == 0:
            counted.append(parameter)
    sample = next(iter(parameters.values()))
    norm = local_gradient_norm(counted) if counted else torch.zeros(())
    # In float64 squares do not overflow, and the order in which ranks are added up hardly matters.
    square = norm.to(sample.device, torch.float64).square()
    dist.all_reduce(square, group=mesh.world)
    return square.sqrt().to(sample.dtype)


def local_gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm over this rank's elements of all gradients, 0-dim."""
    grads = [grad for p in parameters if (grad := local_gradient(p)) is not None and grad.numel()]
    if not grads:
        return torch.zeros(())
    # Sharded gradients lie one after another in the memory that a reduction left them in. Each run of them is read at once,
    # in a tenth of the time that a kernel for each tensor takes.
    runs = _join_adjacent(grads)
    if runs[0].device.type == "cpu":
        # On the CPU, norms of many float32 numbers lose digits that products keep.
        parts = [part for run in runs for part in run.split(SUMMED_ELEMENTS)]
        squares = torch.stack([torch.dot(part, part) for part in parts]).double()
    else:
        # Devices sum in many small parts by themselves. Products read each number twice, and take 1.6 times as long
        # (benchmarks/README.md).
        squares = torch.stack([torch.linalg.vector_norm(run) for run in runs]).double().square()
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


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by `factor`, a 0-dim tensor, in place and without waiting for the device."""
    grads = [grad for parameter in parameters if (grad := local_gradient(parameter)) is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
