"""AdamW over the parameters of a model, with weight decay where the run file wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.config.schema import Optimizer
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


def clipped_update(optimizer: torch.optim.AdamW, loss: Tensor, norm: Tensor, limit: float | None) -> None:
    """Update with gradients scaled so that their norm is at most `limit`; no update where loss or norm is not finite.

    loss, norm: 0-dim tensors. Nothing here waits for the device.
    """
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = ~torch.isfinite(norm.double() + loss)
    compat.update_scaled(optimizer, torch.where(skip, 1.0, divisor).float(), skip.float())
