"""AdamW with moments in 8 bits: shares of a scale, blocks within rows, skipped updates, a path near AdamW's."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from ahead_of_time import ASSEMBLY, WIDE, assembly_of, needs_triton, run_interpreted, threads
from phalanx.config.schema import MOMENT_BLOCK, Optimizer
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


INTERPRETED = """
import torch
from phalanx.kernels import adamw_triton
from phalanx.optimizers.adamw8bit import ADAMW8BIT
from phalanx.config.schema import MOMENT_BLOCK
from ahead_of_time import ASSEMBLY, WIDE, assembly_of, needs_triton, run_interpreted, threads
from phalanx.config.schema import MOMENT_BLOCK, Optimizer
from phalanx.optimizers import build_optimizer
from phalanx.optimizers.adamw8bit import _as_rows

torch.cuda.device = lambda device: __import__("contextlib").nullcontext()

def random(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()

config = Optimizer.model_validate({"name": "adamw8bit", "lr": 0.01, "betas": (0.9, 0.99)})
for shape in ((32, 64), (7, 100), (3, 32), (5,)):
    weight = torch.nn.Parameter(random(0, *shape))
    optimizer = build_optimizer({"w": weight}, config, lambda name: "matrix")
    found = {}
    for seed in range(1, 7):
        gradient = random(seed, *shape)
        gradient.view(-1)[: seed * 2] *= 10.0 ** -(seed * 2)
        gradient.view(-1)[-1] = 0.0
        weight.grad, before = gradient.clone(), weight.detach().clone()
        # From the state of the reference, so that a difference of rounding does not grow.
        state = {name: value.clone() for name, value in optimizer.state[weight].items()}
        skip = float(seed == 4)
        ADAMW8BIT.update(optimizer, torch.tensor(2.0), torch.tensor(skip))
        if not state:
            continue
        group, after = optimizer.param_groups[0], optimizer.state[weight]
        bias = [1.0 - beta ** float(after["step"]) for beta in group["betas"]]
        rows = [(_as_rows(state[name]), _as_rows(state[name + "_scale"])) for name in ("exp_avg", "exp_avg_sq_root")]
        adamw_triton.run_adamw8bit(
            _as_rows(before), _as_rows(gradient), *rows, optimizer.tables, torch.tensor([bias[0], bias[1] ** 0.5]),
            torch.tensor(2.0), torch.tensor(skip), block=MOMENT_BLOCK, lr=0.01, decay=group["weight_decay"],
            betas=group["betas"], eps=group["eps"],
        )
        torch.testing.assert_close(before, weight.detach(), rtol=2e-6, atol=2e-7)
        for name, value in state.items():
            if value.dtype == torch.uint8:
                apart = (value.int() - after[name].int()).abs()
                # Between two shares, rounding decides.
                assert int(apart.max()) <= 1 and float(apart.float().mean()) < 2e-3, (shape, seed, name, apart)
            elif name != "step":
                torch.testing.assert_close(value, after[name], rtol=1e-6, atol=0.0)
"""


@needs_triton
def test_the_kernel_updates_as_plain_operations_do() -> None:
    """Blocks that end with their row, shorter ones, blocks of one element, and skipped updates."""
    run_interpreted(INTERPRETED)


@needs_triton
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_the_kernel_compiles_to_wide_accesses(target: str, even: bool) -> None:
    from phalanx.kernels import adamw_triton as module  # noqa: PLC0415

    codes, scales = ("mean_codes", "root_codes"), ("mean_scales", "root_scales")
    tensors = (
        "parameter",
        "gradient",
        codes[0],
        scales[0],
        codes[1],
        scales[1],
        "tables",
        "corrections",
        "divisor",
        "skip",
    )
    types = {name: "*u8" if name in codes else "*fp32" for name in tensors}
    types |= {"blocks": "i64", "columns": "i64", **dict.fromkeys(("lr", "decay", "beta1", "beta2", "eps"), "fp32")}
    constants = {"BLOCKS": module.BLOCKS, "BLOCK": MOMENT_BLOCK, "SHARES": 255, "EVEN": even}
    places = tuple(range(len(tensors)))
    assembly = assembly_of(module.adamw8bit_kernel, target, module.WARPS, types, constants, even=places)
    load, store = WIDE[ASSEMBLY[target]]
    of_16_bytes = 4 * module.BLOCKS * MOMENT_BLOCK // (16 * threads(target, module.WARPS))
    if even:
        # Of gradient and parameter.
        assert len(re.findall(load, assembly)) == 2 * of_16_bytes
        assert len(re.findall(store, assembly)) == of_16_bytes


def test_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="adamw8bit has none"):
        optimizer_over(nn.Parameter(random(0, 4, 48)), options={"block": 256})
