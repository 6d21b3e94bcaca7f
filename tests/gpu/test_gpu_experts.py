"""Kernels of mixtures of experts on the device, beside their plain references in float64, and a whole mixture."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from device_runs import accelerator, relative_error
from phalanx.config.layers import MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.kernels import grouped_products_triton
from phalanx.kernels.grouped_products import (
    Float8GroupedProducts,
    GroupedLinear,
    grouped_gradient,
    grouped_gradient_reference,
    grouped_product,
    grouped_product_reference,
)
from phalanx.kernels.routed_rows import (
    combine_rows,
    combine_rows_backward,
    combine_rows_backward_reference,
    combine_rows_reference,
)
from phalanx.nn.experts import MixtureOfExperts, RoutingPass
from phalanx.torch_compat import common as compat

pytestmark = pytest.mark.gpu

FORMATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
GROUPS = [(100, 0, 1, 155), (64, 64, 64, 64), (0, 0, 0, 256), (13, 1, 130, 7)]
"""Rows of each group; of 256 rows, those that are left belong to none."""


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values drawn on the CPU, so that any device gets the same."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(accelerator())


def ends_of(groups: tuple[int, ...]) -> Tensor:
    return torch.tensor(groups).cumsum(0).int().to(accelerator())


def rounding(dtype: torch.dtype) -> float:
    """Bound of relative errors: 16-bit results are rounded once, wider ones as often as they are added to."""
    return (2 if dtype.itemsize == 2 else 16) * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("out", "wide"), [(256, 128), (72, 200), (33, 17)])
@pytest.mark.parametrize("groups", GROUPS)
def test_grouped_products(groups: tuple[int, ...], out: int, wide: int, dtype: torch.dtype) -> None:
    """By the library or by our kernel, whichever runs; sizes with and without whole 16 bytes in a row."""
    ends, complete = ends_of(groups), sum(groups) == 256
    rows, matrices = random(256, wide, dtype=dtype, seed=1), random(4, out, wide, dtype=dtype, seed=2)
    grad = random(256, out, dtype=dtype, seed=3)
    bound = rounding(dtype)
    wanted = grouped_product_reference(rows.double(), matrices.double(), ends)
    assert relative_error(grouped_product(rows, matrices, ends, complete), wanted) <= bound
    wanted = grouped_product_reference(grad.double(), matrices.double().transpose(1, 2), ends)
    assert relative_error(grouped_product(grad, matrices.transpose(1, 2), ends, complete), wanted) <= bound
    wanted = grouped_gradient_reference(grad.double(), rows.double(), ends)
    assert relative_error(grouped_gradient(grad, rows, ends), wanted) <= bound


@pytest.mark.parametrize("dtype", FORMATS[:3])
@pytest.mark.parametrize(("out", "wide"), [(256, 128), (33, 17)])
@pytest.mark.parametrize("groups", GROUPS)
def test_own_grouped_kernels(groups: tuple[int, ...], out: int, wide: int, dtype: torch.dtype) -> None:
    """Also where the library would run, as on devices that it does not know."""
    ends, complete = ends_of(groups), sum(groups) == 256
    rows, matrices = random(256, wide, dtype=dtype, seed=1), random(4, out, wide, dtype=dtype, seed=2)
    grad = random(256, out, dtype=dtype, seed=3)
    found = grouped_products_triton.run_grouped_product(rows, matrices, ends, complete)
    wanted = grouped_product_reference(rows.double(), matrices.double(), ends)
    assert relative_error(found, wanted) <= rounding(dtype)
    found = grouped_products_triton.run_grouped_gradient(grad, rows, ends)
    wanted = grouped_gradient_reference(grad.double(), rows.double(), ends)
    assert relative_error(found, wanted) <= rounding(dtype)


@pytest.mark.parametrize("groups", [*GROUPS, (0, 0, 0, 0)])
def test_products_of_eight_bits(groups: tuple[int, ...]) -> None:
    """By the library; the same 8-bit numbers on the CPU, summed up more exactly."""
    assert not compat.grouped_float8_refusal(accelerator())
    e4m3, _ = compat.float8_formats(accelerator())
    products, found = Float8GroupedProducts(e4m3, e4m3), []
    for device in (accelerator(), torch.device("cpu")):
        rows, matrices, grad = (
            random(*shape, dtype=torch.bfloat16, seed=seed).to(device)
            for seed, shape in enumerate([(256, 128), (4, 208, 128), (256, 208)])
        )
        inputs, ends = (rows.requires_grad_(), matrices.requires_grad_()), ends_of(groups).to(device)
        y = GroupedLinear.apply(*inputs, ends, sum(groups) == 256, products)
        found.append([each.detach().cpu() for each in (y, *torch.autograd.grad(y, inputs, grad))])
    for here, wanted in zip(*found, strict=True):
        # Sums in the tensor cores' own registers keep fewer digits than the result has.
        assert torch.isfinite(here).all() and relative_error(here, wanted) <= 2e-2


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [2048, 4100, 24])
def test_rows_are_combined(width: int, dtype: torch.dtype) -> None:
    tokens, copies = 37, 6
    slot = torch.randperm(tokens * copies, generator=torch.Generator().manual_seed(5))
    position = slot.view(tokens, copies).int().to(accelerator())
    rows, grad = random(tokens * copies, width, dtype=dtype, seed=1), random(tokens, width, dtype=dtype, seed=2)
    weights = random(tokens, copies, dtype=torch.promote_types(dtype, torch.float32), seed=3)
    bound = torch.finfo(dtype).eps
    for chosen in (weights, None):
        wanted = combine_rows_reference(rows.double(), position, None if chosen is None else chosen.double())
        found = combine_rows(rows, position, chosen)
        assert found.dtype == dtype and relative_error(found, wanted) <= bound
        assert torch.equal(found, combine_rows(rows, position, chosen))
    found_rows, found_weights = combine_rows_backward(grad, rows, position, weights)
    wanted_rows, wanted_weights = combine_rows_backward_reference(
        grad.double(), rows.double(), position, weights.double()
    )
    assert relative_error(found_rows, wanted_rows) <= bound
    assert relative_error(found_weights, wanted_weights) <= max(1e-6, 1e-3 * bound)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_mixture_is_that_of_the_cpu(capacity: float | None, compiled: bool) -> None:
    """In float32, with the choices of the CPU's float64 where no two scores are near."""
    config = LanguageModel(
        n_layers=1,
        d_model=128,
        n_heads=4,
        vocab_size=64,
        max_positions=64,
        d_ff=128,
        experts={"count": 16, "active": 4, "shared": 1, "z_loss": 1e-3, "capacity_factor": capacity, "bias_rate": 0.01},
    )
    mixture = config.layer(0).mlp
    assert isinstance(mixture, MixtureConfig)
    model = MixtureOfExperts(mixture).double()
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        nn.init.normal_(parameter, std=0.1, generator=generator)
    x = torch.randn((4, 64, 128), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    def run(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        there = model.to(device, dtype)
        call = torch.compile(there) if compiled and device.type != "cpu" else there
        moved = x.to(device, dtype).requires_grad_()
        out = call(moved, RoutingPass(0.1))
        found = torch.autograd.grad(out, [moved, *there.parameters()], grad.to(device, dtype))
        return [out.detach().double().cpu(), *(one.double().cpu() for one in found)]

    wanted = run(torch.device("cpu"), torch.float64)
    found = run(accelerator(), torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert math.isfinite(float(one.sum())) and relative_error(one, other) <= 2e-5
