"""Dropout on the device: the same elements as on the CPU, compiled or not, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from device_runs import CPU, accelerator, distance, record_steps, small_run
from phalanx.counter_random import CounterDropout, DropoutContext
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.forecaster import path_factors
from phalanx.torch_compat import common as compat
from small_forecasters import random_fields, random_forecaster, small

pytestmark = pytest.mark.gpu

SAMPLES, POSITIONS = torch.tensor([7, 1_000_000_007, 3, 4]), torch.arange(96)


def dropped(
    device: torch.device, dtype: torch.dtype, width: int, layer: int, *, compiled: bool
) -> tuple[Tensor, Tensor]:
    """What dropout makes of fixed values on `device`, and the gradient of their sum, both on the CPU."""
    torch.compiler.reset()
    x = torch.randn(4, 96, width, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    dropout = CounterDropout(0.3, site=1)
    run = torch.compile(dropout, fullgraph=True, dynamic=False) if compiled else dropout
    where = DropoutContext.of_step(0, 5, SAMPLES.to(device), POSITIONS.to(device), width).at_layer(layer)
    result = run(x, where)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    return result.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("width", [128, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_device_drops_what_the_cpu_drops(dtype: torch.dtype, width: int, compiled: bool) -> None:
    wanted = dropped(CPU, dtype, width, 7, compiled=False)
    for device in (CPU, accelerator()):
        for found, right in zip(dropped(device, dtype, width, 7, compiled=compiled), wanted, strict=True):
            assert torch.equal(found, right), device


def test_device_skips_the_branches_that_the_cpu_skips() -> None:
    config = small(n_layers=5, drop_path=0.4)
    factors = []
    for device in (CPU, accelerator()):
        where = DropoutContext.of_step(3, 2, torch.arange(5000, device=device), torch.arange(1, device=device), 1)
        made = path_factors(config, 4, where.at_layer(4))
        assert made is not None
        factors.append(made.cpu())
    assert torch.equal(*factors)


def test_three_compiled_steps_are_those_of_the_cpu() -> None:
    run = small_run({"model.dropout": 0.1}, "fp32", compiled=True)
    wanted = record_steps(small_run({"model.dropout": 0.1}, "fp64", compiled=False), CPU, steps=3)
    found = record_steps(run, accelerator(), steps=3)
    assert distance(found, wanted).worst < 1e-4
    for step, right in zip(found.steps, wanted.steps, strict=True):
        assert step.loss == pytest.approx(right.loss, rel=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_weather_with_dropout_and_skipped_branches(compiled: bool) -> None:
    """Loss and gradients in float64 differ from the CPU's by rounding alone, so the same elements were dropped."""
    config = small(dropout=0.1, drop_path=0.3)
    found = [
        weather_gradients(config, CPU, compiled=False),
        weather_gradients(config, accelerator(), compiled=compiled),
    ]
    for name, right in found[0].items():
        torch.testing.assert_close(found[1][name], right, rtol=1e-9, atol=1e-9 * float(right.abs().max()))


def weather_gradients(config: WeatherModel, device: torch.device, *, compiled: bool) -> dict[str, Tensor]:
    """The squares of the activations behind the last block, summed, and the gradients of that, by parameter."""
    torch.compiler.reset()
    model = random_forecaster(config).to(device)
    for block in model.blocks if compiled else ():
        block.compile(options=compat.compile_options(torch.float64))
    fields = random_fields(config, 3, len(config.input_names)).to(device)
    positions = model.all_positions(device)
    where = DropoutContext.of_step(7, 1, torch.tensor([8, 9, 40], device=device), positions.rows_S, config.d_model)
    hours = torch.tensor([6.0, 24.0, 72.0], dtype=torch.float64, device=device)
    total = model.hidden(fields, positions, lead_hours_B=hours, dropout=where).square().sum()
    total.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"total": total.detach().cpu(), **gradients}
