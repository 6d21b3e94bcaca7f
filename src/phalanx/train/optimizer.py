"""AdamW over the parameters of a model, with weight decay where the run file wants it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx import compat
from phalanx.config.schema import Optimizer
from phalanx.models.language.declare import parameter_kind


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) in two groups, with and without weight decay; fused, on every device type."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
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
    """2-norm over all gradients, a 0-dim tensor equal on every rank; sharded gradients count once, over all ranks."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clipped_update(optimizer: torch.optim.AdamW, loss: Tensor, norm: Tensor, limit: float | None) -> None:
    """Update with gradients scaled so that their norm is at most `limit`; no update where loss or norm is not finite.

    loss, norm: 0-dim tensors. Nothing here waits for the device.
    """
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = ~(torch.isfinite(norm) & torch.isfinite(loss))
    compat.update_scaled(optimizer, torch.where(skip, 1.0, divisor).float(), skip.float())
