"""8-bit linear layers: gradients beside those of the numbers in 8 bits, what is kept, refusals and formats of devices."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from phalanx.config.layers import MLPConfig
from phalanx.errors import ConfigError
from phalanx.kernels.float8 import quantise
from phalanx.nn import float8_linear
from phalanx.nn.float8_linear import Float8Recipe, Operand, Scaling
from phalanx.nn.layers import GatedLinear, Linear, SwigluMLP, choose_products, quantise_weights
from phalanx.nn.precision import PRECISIONS, find_precision, require_products
from phalanx.torch_compat import common as compat

CPU = torch.device("cpu")
SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "block", "mx")


def uneven(*shape: int, seed: int) -> Tensor:
    """Values in blocks of 128 whose sizes lie 2^24 apart, along both dims."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows, columns = (torch.arange(size) // 128 for size in shape)
    return x * torch.exp2(-24.0 * ((rows[:, None] + 2 * columns[None, :]) % 3 == 1))


def errors(scaling: Scaling, x: Tensor, weight: Tensor, grad: Tensor) -> list[float]:
    """Of the value and of both gradients: largest error of a block of 128 x 128 beside the size of its terms."""
    product = Float8Recipe(scaling).of_layer(weight.shape[1], weight.shape[0], "", "", CPU)
    assert product is not None
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = product(*inputs, None)
    found = [y.detach(), *torch.autograd.grad(y, inputs, grad)]
    pairs = ((x, weight.t()), (grad, weight), (grad.t(), x))
    return [
        float(((value - a @ b).abs() / (a.abs() @ b.abs())).max()) for value, (a, b) in zip(found, pairs, strict=True)
    ]


@pytest.mark.parametrize("scaling", ["block", "mx"])
def test_blocks_of_any_size_are_accurate(scaling: Scaling) -> None:
    x, weight, grad = uneven(272, 384, seed=0), uneven(256, 384, seed=1), uneven(272, 256, seed=2)
    assert max(errors(scaling, x, weight, grad)) <= 0.1
    # One scale for all makes nothing of what is small.
    assert max(errors("tensor", x, weight, grad)) > 0.2


def test_a_transposed_scale_is_found() -> None:
    right = float8_linear.quantise_both

    def wrong(*arguments: Any, **named: Any) -> tuple[Operand, Operand]:
        rows, columns = right(*arguments, **named)
        turned = columns.scale.flatten().view(columns.scale.shape[::-1]).t().contiguous()
        return rows, Operand(columns.q, turned) if named.get("after") is not None else columns

    x, weight, grad = uneven(256, 384, seed=0), uneven(256, 384, seed=1), uneven(256, 256, seed=2)
    with patch.object(float8_linear, "quantise_both", wrong):
        value, grad_x, grad_weight = errors("block", x, weight, grad)
    assert grad_x > 0.5 and max(value, grad_weight) <= 0.1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_equal_sizes_give_one_result_in_all_recipes(scaling: Scaling) -> None:
    """Scales are powers of two: what shares one changes no digit of numbers that are not far below the largest."""
    x, weight, grad = (torch.rand(48, 48, generator=torch.Generator().manual_seed(n)).double() + 0.5 for n in range(3))
    assert errors(scaling, x, weight, grad) == errors("tensor", x, weight, grad)


def test_the_input_is_kept_in_eight_bits_alone() -> None:
    layer = GatedLinear(64, 32, bias=False, block=16)
    torch.nn.init.normal_(layer.weight)
    choose_products(layer, PRECISIONS["fp8-tensor"], CPU)
    kept: list[Tensor] = []
    gate_up = torch.randn(3, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        layer(gate_up)
    tokens_by_features = [x for x in kept if x.numel() == 24 * 64]
    assert torch.float8_e4m3fn in {x.dtype for x in tokens_by_features}


def test_frozen_parameters_and_inputs_without_gradients() -> None:
    product = Float8Recipe("row").of_layer(32, 16, "", "", CPU)
    assert product is not None
    x, weight = torch.randn(5, 32, requires_grad=True), torch.randn(16, 32)
    (grad,) = torch.autograd.grad(product(x, weight, None).sum(), x)
    assert grad.shape == x.shape
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(product(x.detach(), weight, None).sum(), weight)
    assert grad.shape == weight.shape


def test_narrow_layers_stay_in_sixteen_bits() -> None:
    assert Float8Recipe("tensor").of_layer(64, 1, "", "", CPU) is None
    assert Float8Recipe("tensor").of_layer(40, 64, "", "", CPU) is None


def test_infinite_and_missing_numbers_show() -> None:
    for scaling in SCALINGS:
        product = Float8Recipe(scaling).of_layer(32, 16, "", "", CPU)
        assert product is not None
        for bad in (float("inf"), float("nan")):
            x = torch.ones(4, 32, dtype=torch.bfloat16)
            x[1, 3] = bad
            assert not torch.isfinite(product(x, torch.ones(16, 32, dtype=torch.bfloat16), None)[1]).any()


def test_formats_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert compat.float8_formats(CPU) == (torch.float8_e4m3fn, torch.float8_e5m2)
    monkeypatch.setattr(compat, "is_rocm", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"gcnArchName": "gfx942:sramecc+"})
    )
    assert compat.float8_formats(gpu) == (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    monkeypatch.setattr(compat, "float8_refusal", lambda _: "")
    product = find_precision("fp8-row", "e5m2").products
    assert product is not None
    layer = product.of_layer(32, 16, "", "", gpu)
    assert isinstance(layer, float8_linear.Float8Product)
    assert (layer.format, layer.gradient_format) == (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.mark.parametrize(("name", "nearest"), [("mxfp8", "fp8-block"), ("fp8-row", "bf16")])
def test_devices_without_the_products_are_refused(name: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "gfx90a has none" if name == "fp8-row" else ""
    monkeypatch.setattr(compat, "float8_refusal", lambda _: refusal)
    require_products(PRECISIONS[name], CPU)
    require_products(PRECISIONS["bf16"], torch.device("cuda"))
    with pytest.raises(
        ConfigError,
        match=rf"(?s)layout.precision={name} cannot .* set layout.precision={nearest}".replace(" set", "\nset"),
    ):
        require_products(PRECISIONS[name], torch.device("cuda"))


@pytest.mark.parametrize(
    ("gradients", "refusal", "said"),
    [("e4m3", "sm_120 has none", "sm_120 has none"), ("e5m2", "", "fp8_gradients=e5m2")],
)
def test_devices_without_grouped_products_are_refused_experts(
    gradients: str, refusal: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "float8_refusal", lambda _: "")
    monkeypatch.setattr(compat, "grouped_float8_refusal", lambda _: refusal)
    require_products(find_precision("fp8-row", gradients), torch.device("cuda"))
    require_products(find_precision("fp8-row-experts", gradients), CPU)
    with pytest.raises(
        ConfigError, match=f"(?s)layout.precision=fp8-row-experts cannot .*{said}.*set layout.precision=fp8-row$"
    ):
        require_products(find_precision("fp8-row-experts", gradients), torch.device("cuda"))


def test_a_gated_pair_is_its_two_products() -> None:
    torch.manual_seed(0)
    mlp = SwigluMLP(MLPConfig(width=32, hidden=64, activation="swiglu", bias=False)).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, grad = (torch.randn(2, 7, 32, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    inputs = [x, *mlp.parameters()]
    choose_products(mlp, PRECISIONS["fp8-tensor"], CPU)
    assert mlp.joint_products is not None
    together = torch.autograd.grad(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), inputs, grad)
    mlp.joint_products = None
    for found, wanted in zip(together, torch.autograd.grad(mlp(x), inputs, grad), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-row", "fp8-block"])
def test_weights_held_in_eight_bits_are_those_of_the_moment(name: str) -> None:
    """Main parameters quantised once a step give what their copies in 16 bits give, quantised where they are used."""
    torch.manual_seed(0)
    mlp = SwigluMLP(MLPConfig(width=32, hidden=64, activation="swiglu", bias=False))
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    choose_products(mlp, PRECISIONS[name], CPU)
    x, grad = (torch.randn(2, 7, 32).bfloat16() for _ in range(2))
    x.requires_grad_()
    copy = deepcopy(mlp).bfloat16()
    quantise_weights([mlp.gate_up, mlp.down])
    run = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(run(x), [x, *mlp.parameters()], grad)
    wanted = torch.autograd.grad(copy(x), [x, *copy.parameters()], grad)
    assert torch.equal(found[0], wanted[0])
    for here, there in zip(found[1:], wanted[1:], strict=True):
        # Gradients of main parameters are not rounded on the way, where the device can leave that out.
        assert here.dtype == torch.float32 and torch.equal(here.bfloat16(), there)
    with torch.no_grad():
        mlp.down.weight.mul_(3.0)
    before = mlp(x)
    quantise_weights([mlp.gate_up, mlp.down])
    torch.testing.assert_close(mlp(x), 3.0 * before, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("factor", [1.0, 0.9, 3.0])
def test_weights_that_an_optimizer_writes_are_those_of_the_moment(factor: float) -> None:
    """It divides by the scale that was; where another suits the largest number, all are written again."""
    torch.manual_seed(0)
    layer, fresh = (Linear(32, 48, bias=False) for _ in range(2))
    for one in (layer, fresh):
        choose_products(one, PRECISIONS["fp8-tensor"], CPU)
    with torch.no_grad():
        # Largest of all 1.9 times a power of two: 0.9 of it has the same scale.
        layer.weight.uniform_(-1.0, 1.0)[0, 0] = 1.9
        quantise_weights([layer])
        copy = layer.quantised_copy
        assert copy is not None and layer.held is not None
        fresh.weight.copy_(layer.weight.mul_(factor))
        copy.amax.copy_(layer.weight.abs().amax())
        copy.q.copy_(quantise(layer.weight, copy.scale, copy.scale, copy.q.dtype, True, False)[0])
        if factor == 1.0:
            # Nobody reads the weight again.
            layer.weight.fill_(torch.nan)
    quantise_weights([layer], [copy.q])
    quantise_weights([fresh])
    assert fresh.held is not None
    held = [(*one.rows, one.column_scale) for one in (layer.held, fresh.held)]
    for found, wanted in zip(*held, strict=True):
        assert torch.equal(found.float(), wanted.float())


def test_layers_choose_by_the_whole_layer() -> None:
    layer = Linear(64, 32, bias=True)
    layer.weight = torch.nn.Parameter(torch.zeros(32, 8))
    layer.input_group = "ranks"
    choose_products(layer, PRECISIONS["fp8-tensor"], CPU)
    assert layer.multiply == Float8Recipe("tensor").of_layer(64, 32, "ranks", "", CPU)
