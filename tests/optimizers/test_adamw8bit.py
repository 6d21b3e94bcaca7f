"""AdamW with moments in 8 bits: shares of a scale, blocks within rows, skipped updates, a path near AdamW's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from phalanx.config.schema import Optimizer
from phalanx.errors import ConfigError
from phalanx.optimizers import build_optimizer
from phalanx.optimizers.adamw8bit import ADAMW8BIT, Moment, list_shares


def random(seed: int, *shape: int) -> Tensor:
    # Of very different sizes, as gradients are.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def optimizer_over(weight: nn.Parameter, **fields: object) -> torch.optim.Optimizer:
    config = Optimizer.model_validate({"name": "adamw8bit", "lr": 0.01, "betas": (0.9, 0.99), **fields})
    return build_optimizer({"w": weight}, config, lambda name: "matrix")


def test_shares_are_those_of_dynamic_trees() -> None:
    shares = list_shares(3)
    expected = [0.0055, 0.01 * 3.25, 0.01 * 7.75, 0.2125, 0.4375, 0.6625, 1.0]
    torch.testing.assert_close(shares, torch.tensor(expected, dtype=torch.float64))
    assert len(list_shares(7)) == 127 and len(list_shares(8)) == 255


def test_a_block_has_the_scale_of_its_largest_element_and_the_next_another() -> None:
    shares = list_shares(7).float()
    signed = torch.cat((-shares.flip(0), torch.zeros(1), shares))
    values = random(0, 5, 40)
    values[2] = 0.0
    values[:, 32:] *= 1e-12
    moment = Moment(torch.zeros(5, 40, dtype=torch.uint8), torch.zeros(5, 2), signed)
    moment.encode(slice(0, 5), values)
    assert torch.equal(moment.scales_RB, torch.stack((values[:, :32].abs().amax(1), values[:, 32:].abs().amax(1)), 1))
    found = moment.decode(slice(0, 5))
    scales = moment.scales_RB.repeat_interleave(32, 1)[:, :40]
    large = values.abs() > 0.1 * scales
    # Half the distance of two shares of the highest decade, 0.9/64; the last two are further apart.
    assert bool(((found - values).abs() <= 0.011 * scales)[large].all())
    assert torch.equal(found[2], torch.zeros(40))
    before = moment.codes_RC.clone()
    moment.encode(slice(0, 5), found)
    assert torch.equal(moment.codes_RC, before)


@pytest.mark.parametrize("shape", [(7, 100), (3, 4, 32), (5,), ()])
def test_updates_stay_near_those_of_adamw(shape: tuple[int, ...]) -> None:
    weight, other = (nn.Parameter(random(0, *shape)) for _ in range(2))
    optimizer = optimizer_over(weight)
    adamw = torch.optim.AdamW([other], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    start = weight.detach().clone()
    for seed in range(1, 21):
        gradient = random(seed, *shape)
        weight.grad, other.grad = 2.0 * gradient, gradient
        ADAMW8BIT.update(optimizer, torch.tensor(2.0), torch.tensor(0.0))
        adamw.step()
        if seed == 1:
            # Before anything was coded.
            torch.testing.assert_close(weight, other)
    # Vectors have a scale for each element.
    tolerance = 0.03 if len(shape) > 1 else 1e-6
    with torch.no_grad():
        assert float((weight - other).norm()) <= tolerance * float((other - start).norm())


def test_a_small_element_beside_a_large_one_is_not_divided_by_epsilon() -> None:
    weight = nn.Parameter(torch.zeros(1, 32))
    optimizer = optimizer_over(weight, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.full((1, 32), 1e-9)
        weight.grad[0, 0] = 1.0
        ADAMW8BIT.update(optimizer, torch.tensor(1.0), torch.tensor(0.0))
    assert float(weight.detach().abs().max()) < 0.04


def test_nothing_changes_in_a_skipped_update() -> None:
    weight = nn.Parameter(random(0, 4, 48))
    optimizer = optimizer_over(weight)
    weight.grad = torch.full_like(weight, math.nan)
    ADAMW8BIT.update(optimizer, torch.tensor(1.0), torch.tensor(1.0))
    assert torch.equal(weight.detach(), random(0, 4, 48))
    weight.grad = random(1, 4, 48)
    ADAMW8BIT.update(optimizer, torch.tensor(1.0), torch.tensor(0.0))
    before = {"": weight.detach().clone(), **{what: value.clone() for what, value in optimizer.state[weight].items()}}
    weight.grad = torch.full_like(weight, math.inf)
    ADAMW8BIT.update(optimizer, torch.tensor(1.0), torch.tensor(1.0))
    after = {"": weight.detach(), **optimizer.state[weight]}
    assert all(torch.equal(after[what], value) for what, value in before.items())
    assert float(after["step"]) == 1.0


def test_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="adamw8bit has none"):
        optimizer_over(nn.Parameter(random(0, 4, 48)), options={"block": 256})
