"""Weights of a published ClimaX in our forecaster: its forecasts, and models that compute something else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint import TensorReader
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.evaluation.climax_weights import holds_climax, import_climax
from phalanx.families.weather.evaluation.forecast_split import load_forecaster
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.training.transfer import MODEL
from published_climax import PublishedClimaX, published_state
from small_forecasters import random_inputs, small

CPU = torch.device("cpu")
NARROW = small(d_model=16, n_layers=2, n_lat=8, n_lon=16)
"""The published form, of a grid twice as wide as high."""


def random_climax(config: WeatherModel, dtype: torch.dtype) -> PublishedClimaX:
    """ClimaX with random weights, all biases included, large enough that attention is far from uniform."""
    network = PublishedClimaX(config).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1.0 + 0.1 * values if ".norm" in name else 0.25 * values)
    return network


def in_one_kernel(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict as `parallel_patch_embed` has it."""
    parts = {kind: [state[f"net.token_embeds.{n}.proj.{kind}"] for n in range(5)] for kind in ("weight", "bias")}
    rest = {name: tensor for name, tensor in state.items() if ".token_embeds." not in name}
    joined = {
        "net.token_embeds.proj_weights": torch.stack(parts["weight"]),
        "net.token_embeds.proj_biases": torch.stack(parts["bias"]),
    }
    return rest | joined


def with_earlier_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict as the first checkpoints were saved, without Lightning's prefix."""
    return {
        name.removeprefix("net.").replace("var_", "channel_") if ".var_" in name else name.removeprefix("net."): tensor
        for name, tensor in state.items()
    }


def read_forecaster(folder: Path, config: WeatherModel, dtype: torch.dtype) -> Forecaster:
    """The imported forecaster: as `phalanx forecast` loads it, or in float64, in which it loads none."""
    if dtype == torch.float32:
        return load_forecaster(folder, CPU).model
    model = Forecaster(config, dtype=dtype).to(dtype)
    with TensorReader(folder / "checkpoints" / "step-00000000") as reader:
        model.load_state_dict({name: reader.read(MODEL + name) for name in model.state_dict()})
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("changes", "form", "grid"),
    [
        ({}, dict, None),
        ({"patch_size": 4, "d_ff": 40, "decoder_depth": 1}, with_earlier_names, None),
        ({"n_lon": 12, "decoder_depth": 0}, in_one_kernel, (8, 12)),
    ],
)
def test_forecasts_are_those_of_the_published_code(
    changes: dict[str, Any], form: Any, grid: Any, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    config = WeatherModel.model_validate({**NARROW.model_dump(), **changes})
    network = random_climax(config, dtype)
    save_file(form(published_state(network)), tmp_path / "climax.safetensors")
    assert holds_climax(tmp_path / "climax.safetensors")
    written = import_climax(
        tmp_path / "climax.safetensors", tmp_path / "own", dtype, variables=config.variables, heads=4, grid=grid
    )
    kept = {"d_model", "n_layers", "n_lat", "n_lon", "patch_size", "decoder_depth", "variables"}
    assert written.model.model_dump(include=kept) == config.model_dump(include=kept)
    assert written.model.ff_size == config.ff_size
    model = read_forecaster(tmp_path / "own", written.model, dtype)
    # All variables out, and fields without time among the inputs last.
    read, predicted = (
        [config.variables.index(name) for name in names]
        for names in (written.model.input_names, written.model.output_names)
    )
    fields, _, hours = (tensor.to(dtype) for tensor in random_inputs(config))
    expected = network(fields, hours)[:, predicted].detach()
    torch.testing.assert_close(model.forecast(fields[:, read], hours), expected, rtol=tolerance, atol=tolerance)


def changed(state: dict[str, Tensor], name: str, change: Tensor | None) -> dict[str, Tensor]:
    return {**state, name: change} if change is not None else {k: v for k, v in state.items() if k != name}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("net.blocks.1.attn.qkv.bias", None, r"has no blocks\.1\.attn\.qkv\.bias; it is needed"),
        ("net.blocks.0.ls1.gamma", torch.ones(16), r"blocks\.0\.ls1\.gamma stands for something"),
        ("net.token_embeds.6.proj.weight", torch.ones(16, 1, 2, 2), r"token_embeds\.6\.proj\.weight stands for"),
        ("net.token_embeds.1.proj.weight", torch.ones(16, 2, 2, 2), r"has the shape \[16, 2, 2, 2\], \[16, 1, 2, 2\]"),
        ("net.var_query", torch.ones(1, 2, 16), r"var_query has the shape \[1, 2, 16\], \[1, 1, 16\] is read"),
        ("net.head.4.weight", None, r"head\.2\.weight has the shape \[16, 16\], \[20, 16\] is read"),
        ("net.head.6.weight", torch.ones(20, 16), r"head\.4\.weight has the shape \[20, 16\], \[16, 16\] is read"),
        ("net.head.1.weight", torch.ones(16, 16), r"head\.1\.weight stands for something"),
        ("var_query", torch.ones(1, 1, 16), "var_query is there twice"),
        ("net.blocks.1.mlp.fc1.weight", torch.ones(32, 16), r"fc1\.weight has the shape \[32, 16\], \[64, 16\]"),
    ],
)
def test_models_that_compute_something_else_are_refused(
    name: str, change: Tensor | None, message: str, tmp_path: Path
) -> None:
    state = changed(published_state(random_climax(NARROW, torch.float32)), name, change)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=message):
        import_climax(tmp_path / "other.safetensors", tmp_path / "own", variables=NARROW.variables, heads=4)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variables": None}, "has 5 variables, without --variables, there are 48"),
        ({"variables": ("t850",)}, "has 5 variables, --variables names 1"),
        ({"heads": 3}, "--heads=3 does not divide the width 16"),
        ({"grid": (16, 16)}, "--grid=16x16 is not 32 patches of 2 x 2"),
        ({"grid": (1, 128)}, "--grid=1x128 is not 32 patches of 2 x 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_file(published_state(random_climax(NARROW, torch.float32)), tmp_path / "climax.safetensors")
    given = {"variables": NARROW.variables, "heads": 4, "grid": None, **settings}
    with pytest.raises(ConfigError, match=message):
        import_climax(tmp_path / "climax.safetensors", tmp_path / "own", **given)


def test_a_grid_of_another_shape_must_be_named(tmp_path: Path) -> None:
    config = small(d_model=16, n_layers=1, n_lat=8, n_lon=12)
    save_file(published_state(random_climax(config, torch.float32)), tmp_path / "climax.safetensors")
    with pytest.raises(ConfigError, match="24 patches of 2 x 2, which is no grid twice as wide as high"):
        import_climax(tmp_path / "climax.safetensors", tmp_path / "own", variables=config.variables, heads=4)
