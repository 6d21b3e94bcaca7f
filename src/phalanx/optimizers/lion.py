"""Lion: parameters move by the sign of a mean of momentum and gradient (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.config.schema import Optimizer
from phalanx.optimizers.optimizer_kind import (
    Group,
    HeldParameters,
    ScaledUpdates,
    ScaledUpdatesKind,
    local_part,
    refuse_options,
)


class LionKind(ScaledUpdatesKind):
    """Lion, whose one moment is half of AdamW's state."""

    state_values = 1
    # Gradient, momentum and parameter read, the last two written, and the direction written and read.
    value_passes = 7
    per_parameter = True

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> Lion:
        """Return Lion over `groups`."""
        refuse_options(config)
        return Lion(groups, lr=config.lr, betas=config.betas)


LION = LionKind()


class Lion(ScaledUpdates):
    """Algorithm 2 of the paper, with decoupled weight decay; state of a parameter is its momentum, `exp_avg`."""

    def __init__(self, groups: Sequence[Group], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def update_parameter(self, parameter: Tensor, group: dict[str, Any], divisor: Tensor, skip: Tensor) -> None:
        """See `ScaledUpdates`."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        local, momentum = local_part(parameter), local_part(state["exp_avg"])
        assert parameter.grad is not None
        skip = skip.to(local.dtype)
        # Filled, not multiplied by 0: a gradient that is not finite would stay so.
        gradient = local_part(parameter.grad).div_(divisor.to(local.dtype)).masked_fill_(skip.bool(), 0.0)
        interpolated, kept = group["betas"]
        rate = group["lr"] * (1.0 - skip)
        direction = momentum.mul(interpolated).add_(gradient, alpha=1.0 - interpolated).sign_()
        local.mul_(1.0 - rate * group["weight_decay"]).addcmul_(direction, rate, value=-1.0)
        momentum.lerp_(gradient, (1.0 - kept) * (1.0 - skip))
