"""AdamW over the parameters of a model, with weight decay where the run file wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.config.schema import Optimizer
from phalanx.layout.apply import ParallelModel
from phalanx.layout.execute import local_gradient
from phalanx.nn.kinds import ParameterKind
from phalanx.torch_compat import common as compat
from phalanx.train.adamw import AdamW


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: Optimizer,
    kind: Callable[[str], ParameterKind],
    copies: Mapping[Tensor, Tensor] | None = None,
) -> AdamW:
    """AdamW (Loshchilov & Hutter 2019) over parameters by name, in groups: first those with weight decay.

    Fused, on every device type. kind: of the parameter with this name, as its family says. copies: see `AdamW`.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        decay = 0.0 if kind(name) in config.no_decay else config.weight_decay
        # One kernel takes either plain tensors (streamed matrices) or sharded ones.
        group = groups.setdefault((decay, isinstance(parameter, DTensor)), {"params": [], "weight_decay": decay})
        group["params"].append(parameter)
    optimizer = AdamW(
        sorted(groups.values(), key=lambda group: -group["weight_decay"]),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    optimizer.copies = copies or {}
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` in every group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = value


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm over this rank's elements of all gradients, a 0-dim tensor.

    Sharded gradients lie one after another in the memory that a reduction left them in: each run of them is read at once,
    in a tenth of the time that a kernel for each tensor takes.
    """
    grads = [grad for p in parameters if (grad := local_gradient(p)) is not None and grad.numel()]
    if not grads:
        return torch.zeros(())
    parts = [part for run in _runs(grads) for part in run.split(_RUN)]
    return _squares(parts).sum().sqrt().to(grads[0].dtype)


def _squares(parts: list[Tensor]) -> Tensor:
    """Sums of squares of each part, float64 [parts]."""
    if parts[0].device.type == "cpu":
        # Norms of many float32 numbers lose digits there that products keep.
        return torch.stack([torch.dot(part, part) for part in parts]).double()
    # Products read each number twice, and take 1.6 times as long (benchmarks/README.md).
    return torch.stack([torch.linalg.vector_norm(part) for part in parts]).double().square()


_RUN = 2**24
"""Elements summed in their own format before sums go on in float64."""


def _runs(grads: list[Tensor]) -> list[Tensor]:
    """The elements of `grads` as few flat tensors: those that lie side by side in one memory are joined."""
    # Told by storage and offset, not by address: a dry run's gradients have none.
    placed = sorted(
        ((compat.storage_key(grad), grad.storage_offset(), number) for number, grad in enumerate(grads)),
        key=lambda place: place[:2],
    )
    runs: list[list[Tensor]] = []
    behind = None
    for storage, offset, number in placed:
        grad = grads[number]
        if grad.is_contiguous() and behind == (storage, offset, grad.dtype):
            runs[-1].append(grad)
        else:
            runs.append([grad])
        behind = (storage, offset + grad.numel(), grad.dtype) if grad.is_contiguous() else None
    return [_joined(run) for run in runs]


def _joined(run: list[Tensor]) -> Tensor:
    first = run[0]
    if not first.is_contiguous():
        return first.flatten()
    return first.as_strided((sum(grad.numel() for grad in run),), (1,))


def global_gradient_norm(applied: ParallelModel) -> Tensor:
    """2-norm over the gradients of the whole model, equal on every rank: each element counts once.

    Of the ranks that hold the same elements (replicas, tensor-parallel ranks with an unsplit parameter, the two ends of a
    pipeline with a shared table, the sub-group of a branch) one counts them.
    """
    mesh = applied.mesh
    if mesh.world is None:
        return gradient_norm(applied.parameters.values())
    counted = []
    for name, parameter in applied.parameters.items():
        alike = (name in applied.tied and mesh.tie.rank) or (name not in applied.splits and mesh.tp.rank)
        copy = mesh.branch.rank if name in applied.branch else mesh.replicas.rank
        if not alike and copy == 0:
            counted.append(parameter)
    sample = next(iter(applied.parameters.values()))
    norm = gradient_norm(counted) if counted else torch.zeros(())
    square = norm.to(sample.device, torch.float64).square()
    dist.all_reduce(square, group=mesh.world)
    return square.sqrt().to(sample.dtype)


def clipped_update(optimizer: torch.optim.AdamW, loss: Tensor, norm: Tensor, limit: float | None) -> None:
    """Update with gradients scaled so that their norm is at most `limit`; no update where loss or norm is not finite.

    loss, norm: 0-dim tensors. Nothing here waits for the device.
    """
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = ~torch.isfinite(norm.double() + loss)
    compat.update_scaled(optimizer, torch.where(skip, 1.0, divisor).float(), skip.float())
