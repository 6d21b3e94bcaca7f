"""AdamW over the parameters of a model, with weight decay where the run file wants it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from phalanx.config.schema import Optimizer
from phalanx.models.language.declare import parameter_kind


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) in two groups, with and without weight decay; fused, on every device type."""
    decayed, free = [], []
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


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale gradients so that their global 2-norm is at most `limit`; returns the norm before, a 0-dim tensor.

    Nothing is scaled when `limit` is None. Sharded gradients count once, over all ranks.
    """
    kept = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in kept if p.grad is not None], foreach=True)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if limit is not None:
        nn.utils.clip_grads_with_norm_(kept, limit, norm, foreach=True)
    return norm
