"""Forecasters small enough for a test, with random weights, and random fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.nn.splits import ModelChunk

NAMES = ("land_sea_mask", "temperature_850", "temperature_500", "geopotential_500", "2m_temperature")
SMALL = WeatherModel(n_layers=3, d_model=32, n_heads=4, n_lat=8, n_lon=12, patch_size=2, variables=NAMES)
"""The published form, with five variables on a grid of 4 by 6 patches."""


def small(**changes: Any) -> WeatherModel:
    """`SMALL` with single fields changed, checked anew."""
    return WeatherModel.model_validate({**SMALL.model_dump(), **changes})


EVERYTHING = small(
    inputs=["2m_temperature", "temperature_850", "geopotential_500", "land_sea_mask"],
    outputs=["geopotential_500", "2m_temperature"],
    aggregation="hierarchical",
    aggregation_groups=3,
    aggregation_queries=2,
    decoder_depth=3,
    qk_norm=True,
    position_embedding="fourier",
    lead_embedding="fourier",
    level_embedding="fourier",
    prediction="change",
    change_scales=[0.3, 0.5],
    latitude_weights="area",
    loss_weights=[1.0, 2.5],
)
"""Every option that departs from the published form, but for dropout."""


def random_forecaster(
    config: WeatherModel, *, seed: int = 0, dtype: torch.dtype = torch.float64, part: ModelChunk | None = None
) -> Forecaster:
    """The forecaster of `config` with weights large enough that attention is far from uniform.

    A parameter's values depend on its name alone, so parts of a model agree with the whole.
    """
    model = Forecaster(config, dtype=dtype, part=part).to(torch.promote_types(dtype, torch.float32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()) % 997)
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1.0 + 0.1 * values if name.endswith("norm.weight") else 0.25 * values)
    return model


def random_fields(config: WeatherModel, samples: int, count: int, *, seed: int = 1) -> Tensor:
    """Fields [B, V, H, W] of `count` variables in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, count, config.n_lat, config.n_lon, generator=generator, dtype=torch.float64)


def random_inputs(config: WeatherModel, samples: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Fields, targets and lead hours."""
    fields = random_fields(config, samples, len(config.input_names))
    targets = random_fields(config, samples, len(config.output_names), seed=2)
    return fields, targets, torch.tensor([6.0, 72.0, 120.0], dtype=torch.float64)[:samples]
