"""Lion: signs of the mean of momentum and gradient, decoupled decay, skipped updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from phalanx.config.schema import Optimizer
from phalanx.errors import ConfigError
from phalanx.optimizers import build_optimizer
from phalanx.optimizers.lion import LION


def random(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def optimizer_over(weight: nn.Parameter, **fields: object) -> torch.optim.Optimizer:
    config = Optimizer.model_validate({"name": "lion", "lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.2, **fields})
    return build_optimizer({"w": weight}, config, lambda name: "matrix")


def test_update_is_algorithm_2_of_the_paper() -> None:
    weight = nn.Parameter(random(0))
    expected, momentum = weight.detach().clone(), torch.zeros(4, 6, dtype=torch.float64)
    optimizer = optimizer_over(weight)
    for seed in (1, 2, 3):
        gradient = random(seed)
        direction = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.01 * (direction + 0.2 * expected)
        momentum = 0.98 * momentum + 0.02 * gradient
        weight.grad = 2.0 * gradient
        LION.update(optimizer, torch.tensor(2.0), torch.tensor(0.0))
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], momentum, rtol=1e-12, atol=1e-14)


def test_nothing_changes_in_a_skipped_update() -> None:
    weight = nn.Parameter(random(0))
    optimizer = optimizer_over(weight)
    weight.grad = random(1)
    LION.update(optimizer, torch.tensor(1.0), torch.tensor(0.0))
    before = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.full_like(weight, math.inf)
    LION.update(optimizer, torch.tensor(1.0), torch.tensor(1.0))
    assert torch.equal(weight, before[0]) and torch.equal(optimizer.state[weight]["exp_avg"], before[1])


def test_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="lion has none"):
        optimizer_over(nn.Parameter(random(0)), options={"beta": 0.9})
