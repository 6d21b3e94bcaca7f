"""Variables by name: where they stand in a model's tables, and the pressure level a name carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.families.weather.field_names import split_level
from phalanx.families.weather.model_config import WeatherModel


def input_places(config: WeatherModel) -> list[int]:
    """Numbers, among the model's variables, of those it reads."""
    return [config.variables.index(name) for name in config.input_names]


def output_places(config: WeatherModel) -> list[int]:
    """Numbers, among the model's variables, of those it predicts."""
    return [config.variables.index(name) for name in config.output_names]


def outputs_among_inputs(config: WeatherModel) -> list[int]:
    """Numbers of the predicted variables among the fields that are read."""
    return [config.input_names.index(name) for name in config.output_names]


def take(tensor: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """The elements of `tensor` at `places` along `dim`; a view where they are consecutive."""
    first, count = places[0], len(places)
    if list(places) == list(range(first, first + count)):
        return tensor.narrow(dim, first, count)
    return tensor.index_select(dim, torch.tensor(places, device=tensor.device))


def pressure_level(name: str) -> int | None:
    """Pressure in hPa that ends a variable's name (`temperature_850`, `t850`); None for variables of the surface (`u10`)."""
    found = split_level(name)
    return None if found is None else found[1]
