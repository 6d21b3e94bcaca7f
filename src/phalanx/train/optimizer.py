"""AdamW over the parameters of a model, with weight decay where the run file wants it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import compat
from phalanx.config.schema import Optimizer
from phalanx.layout.apply import Applied
from phalanx.layout.execute import local_gradient
from phalanx.models.language.declare import parameter_kind


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) over parameters by name, in two groups: with and without weight decay.

    Fused, on every device type.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in parameters.items():
        (free if parameter_kind(name) in config.no_decay else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` in every group from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = value


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm over this rank's elements of all gradients, a 0-dim tensor."""
    grads = [grad for p in parameters if (grad := local_gradient(p)) is not None]
    norm: Tensor = nn.utils.get_total_norm(grads, foreach=True)
    return norm


def global_gradient_norm(applied: Applied) -> Tensor:
    """2-norm over the gradients of the whole model, equal on every rank: each element counts once.

    Of the ranks that hold the same elements (replicas, tensor-parallel ranks with an unsplit parameter, the two ends of a
    pipeline with a shared table) one counts them.
    """
    mesh = applied.mesh
    if mesh.world is None:
        return gradient_norm(applied.parameters.values())
    counted = []
    for name, parameter in applied.parameters.items():
        alike = (name in applied.tied and mesh.tie.rank) or (name not in applied.splits and mesh.tp.rank)
        if not alike and mesh.replicas.rank == 0:
            counted.append(parameter)
    device = next(iter(applied.parameters.values())).device
    square = gradient_norm(counted).to(device).square() if counted else torch.zeros((), device=device)
    wide = square.double()
    dist.all_reduce(wide, group=mesh.world)
    return wide.sqrt().to(square.dtype)


def clipped_update(optimizer: torch.optim.AdamW, loss: Tensor, norm: Tensor, limit: float | None) -> None:
    """Update with gradients scaled so that their norm is at most `limit`; no update where loss or norm is not finite.

    loss, norm: 0-dim tensors. Nothing here waits for the device.
    """
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = ~(torch.isfinite(norm) & torch.isfinite(loss))
    compat.update_scaled(optimizer, torch.where(skip, 1.0, divisor).float(), skip.float())
