"""Every own kernel as it runs on the device, beside its plain reference in float64; every element is written."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from device_runs import accelerator, relative_error
from phalanx.config.schema import Optimizer
from phalanx.kernels import LARGE
from phalanx.kernels.flash4 import flash4_attention, import_flash4
from phalanx.kernels.float8 import QuantisedCopy, measure_copies, power_of_two_scale, quantise_reference
from phalanx.kernels.parts_sum import add_weight_gradient, sum_parts
from phalanx.kernels.swiglu import swiglu_backward, swiglu_backward_reference
from phalanx.nn.cross_entropy import IGNORED, chunk_loss
from phalanx.optimizers import build_optimizer
from phalanx.optimizers.adamw import AdamW
from phalanx.optimizers.adamw8bit import ADAMW8BIT
from phalanx.torch_compat import common as compat

pytestmark = pytest.mark.gpu


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values drawn on the CPU, so that any device gets the same."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(accelerator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("rows", "features", "block"), [(4096, 1024, 64), (4097, 704, 32), (3, 8192, 1), (1024, 4096, 16)]
)
def test_gated_product_backward(rows: int, features: int, block: int, dtype: torch.dtype) -> None:
    grad, gate_up = random(rows, features, dtype=dtype, seed=1), random(rows, 2 * features, dtype=dtype, seed=2)
    wanted = swiglu_backward_reference(grad.double(), gate_up.double(), block)
    for found, exact in zip(swiglu_backward(grad, gate_up, block), wanted, strict=True):
        assert found.dtype == dtype and torch.isfinite(found).all()
        assert relative_error(found, exact) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128256), (33, 50257), (3, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("compiled", [False, True])
def test_loss_of_logits(rows: int, columns: int, dtype: torch.dtype, z_loss: float, compiled: bool) -> None:
    """The gradient takes the place of the logits, also where a compiler has the loss."""
    logits = 5.0 * random(rows, columns, dtype=dtype, seed=6)
    targets = torch.arange(rows, device=logits.device) * 7 % columns
    targets[1] = IGNORED
    exact = logits.double().clone()
    wanted, gradient = chunk_loss(exact, targets, z_loss, True)
    kernel = torch.compile(chunk_loss) if compiled else chunk_loss
    without, _ = kernel(logits.clone(), targets, z_loss, False)
    total, found = kernel(logits, targets, z_loss, True)
    assert found.data_ptr() == logits.data_ptr() and found.dtype == dtype
    assert total.dtype == without.dtype == torch.promote_types(dtype, torch.float32)
    bound = max(torch.finfo(dtype).eps, 3e-7)
    assert relative_error(found, gradient) <= bound and not found[1].any()
    for loss in (total, without):
        assert abs(float(loss) / float(wanted) - 1.0) <= 1e-5


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("elements", [LARGE, LARGE + 3, 1000])
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_of_parts(dtype: torch.dtype, parts: int, elements: int, add: bool) -> None:
    """One rank after another in float32: the same bits in every run."""
    values = random(parts, elements, dtype=dtype, seed=3)
    start = random(elements, dtype=torch.float32, seed=4)
    found = start.clone() if add else torch.full_like(start, math.nan)
    sum_parts(values, found, add=add)
    wanted = start.clone() if add else torch.zeros_like(start)
    exact = values.double().sum(0) + (start.double() if add else 0.0)
    assert relative_error(found, exact) <= 4e-7
    again = start.clone() if add else torch.full_like(wanted, math.nan)
    sum_parts(values, again, add=add)
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "out", "into"), [(8192, 4096, 1024), (777, 1001, 333), (1, 64, 8)])
def test_weight_gradient_in_a_product(rows: int, out: int, into: int, dtype: torch.dtype) -> None:
    """Where devices add in the product, nothing is rounded to 16 bits before the sum."""
    grad, x = random(rows, out, dtype=dtype, seed=8), random(rows, into, dtype=dtype, seed=9)
    total = random(out, into, dtype=torch.float32, seed=10)
    wanted = total.double() + 2.0 * (grad.double().t() @ x.double())
    for _ in range(2):
        add_weight_gradient(total, grad, x)
    wide = compat._wide_matmul(total.device, dtype, torch.float32)
    assert relative_error(total, wanted) <= (1e-5 if wide else torch.finfo(dtype).eps)


@pytest.mark.parametrize("elements", [LARGE + 5, 4 * LARGE])
def test_adamw_of_large_parameters(elements: int) -> None:
    """Plain, scaled and skipped updates are PyTorch's in float64 but for rounding."""
    start = random(elements, dtype=torch.float32, seed=5)
    ours, exact = nn.Parameter(start.clone()), nn.Parameter(start.double())
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer, plain = AdamW([ours], fused=True, **options), torch.optim.AdamW([exact], **options)
    device = accelerator()
    for number, (scale, skip) in enumerate(((1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (0.5, 0.0))):
        ours.grad = random(elements, dtype=torch.float32, seed=6 + number)
        exact.grad = ours.grad.double() / scale
        compat.update_scaled(optimizer, torch.tensor(scale, device=device), torch.tensor(skip, device=device))
        if not skip:
            plain.step()
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(optimizer.state[ours][name].double(), plain.state[exact][name], rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[ours]["step"]) == 3.0


@pytest.mark.parametrize("elements", [LARGE + 5, 4 * LARGE])
def test_adamw_writes_copies_in_8_bits(elements: int) -> None:
    """By the scale that was, with the largest number; renewed they are what quantisation gives, bit by bit."""
    device = accelerator()
    if compat.float8_refusal(device):
        pytest.skip("this device multiplies no 8-bit numbers")
    kind = compat.float8_formats(device)[0]
    weight = nn.Parameter(random(elements, dtype=torch.float32, seed=5))
    copy = QuantisedCopy.empty(torch.zeros_like(weight, dtype=kind))
    optimizer = AdamW([weight], fused=True, lr=1e-2)
    optimizer.quantised_copies = {weight: copy}
    renewed = []
    for number, (rate, skip) in enumerate(((1e-2, 0.0), (1e-2, 0.0), (1e-2, 1.0), (30.0, 0.0), (1e-2, 0.0))):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = random(elements, dtype=torch.float32, seed=6 + number)
        compat.update_scaled(optimizer, torch.tensor(1.0, device=device), torch.tensor(skip, device=device))
        assert [id(q) for q in optimizer.written] == ([id(copy.q)] if number else [])
        with torch.no_grad():
            measure_copies([weight], [copy], optimizer.written)
            assert float(copy.amax) == float(weight.abs().max())
            scale = power_of_two_scale(copy.amax.bfloat16(), kind)
            renewed.append(bool(scale != copy.scale))
            copy.renew(weight, scale)
            wanted = quantise_reference(weight.cpu()[None], scale.cpu(), scale.cpu(), kind, True, False)[0][0]
        assert torch.equal(copy.q.cpu().float(), wanted.float())
    # Not measured before the first, and a large rate moves the largest number far.
    assert renewed[0] and renewed[3] and not renewed[1] and not renewed[2]
    weight.data[7] = math.nan
    compat.update_scaled(optimizer, torch.tensor(1.0, device=device), torch.tensor(0.0, device=device))
    assert copy.amax.isnan()


@pytest.mark.parametrize("columns", [1500, 1536])
def test_moments_in_8_bits_are_those_of_the_cpu(columns: int) -> None:
    """Blocks that end with their row and shorter ones. Codes may fall to the other side where rounding decides."""
    config = Optimizer.model_validate({"name": "adamw8bit", "lr": 1e-2})
    start = random(3000, columns, dtype=torch.float32, seed=5)
    found = []
    for device in (accelerator(), torch.device("cpu")):
        weight = nn.Parameter(start.clone().to(device))
        optimizer = build_optimizer({"w": weight}, config, lambda name: "matrix")
        for seed in (6, 7, 8):
            weight.grad = random(3000, columns, dtype=torch.float32, seed=seed).to(device)
            ADAMW8BIT.update(optimizer, torch.tensor(2.0, device=device), torch.tensor(0.0, device=device))
        found.append([weight.detach().cpu(), *(value.cpu() for value in optimizer.state[weight].values())])
    for here, there in zip(*found, strict=True):
        assert float((here.double() - there.double()).abs().gt(1e-5 * there.double().abs()).double().mean()) < 1e-3


def test_flash4_or_why_not() -> None:
    """FlashAttention-4 beside float64; where its package is not installed, the reason names it."""
    if import_flash4().forward is None:
        assert "flash_attn" in import_flash4().reason
        return
    query, key, value = (random(2, heads, 512, 128, dtype=torch.bfloat16, seed=7 + heads) for heads in (8, 2, 2))
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (query, key, value)]
    out = flash4_attention(*inputs)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact = F.scaled_dot_product_attention(*doubles, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(exact, doubles, torch.ones_like(exact))
    assert relative_error(out, exact) <= 1e-2
    for found, expected in zip(grads, wanted, strict=True):
        assert relative_error(found, expected) <= 2e-2
