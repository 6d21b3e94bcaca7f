"""The model section of the weather family: its presets, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from phalanx.config.presets import load_preset
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.families.weather.sizes import model_flops_per_sample, parameter_count
from small_forecasters import NAMES, SMALL, small

EXACT = {
    "climax-small": 6_907_208,
    "climax": 108_087_488,
    "orbit-115m": 110_841_600,
    "orbit-1b": 974_251_776,
    "orbit-10b": 9_292_429_568,
    "orbit-113b": 102_428_882_688,
}


def _preset(name: str, **changes: Any) -> WeatherModel:
    return WeatherModel.model_validate({**load_preset(name).fields, "preset": name, **changes})


@pytest.mark.parametrize("name", EXACT)
def test_presets_have_exactly_these_parameters(name: str) -> None:
    config = _preset(name)
    with torch.device("meta"):
        model = Forecaster(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config) == EXACT[name]
    assert load_preset(name).sequence_length == config.n_tokens


@pytest.mark.parametrize("name", ["climax", "orbit-115m", "orbit-1b", "orbit-10b", "orbit-113b"])
def test_published_presets_are_of_the_published_form(name: str) -> None:
    config = _preset(name)
    assert len(config.variables) == 48 and config.aggregation == "flat" and config.aggregation_queries == 1
    assert (config.prediction, config.latitude_weights) == ("state", "cos")
    assert (config.position_embedding, config.lead_embedding, config.level_embedding) == ("learned", "linear", "none")


def test_operations_of_a_sample_of_the_largest() -> None:
    config = _preset("orbit-113b")
    trunk = 6 * 2048 * 56 * 12 * 12288**2 + 12 * 56 * 12288 * 2048**2
    assert trunk < model_flops_per_sample(config) < 1.01 * trunk
    assert 1.1 * trunk < model_flops_per_sample(config, "published") < 1.2 * trunk


def test_reads_lists_as_run_files_hold_them() -> None:
    fields = {**SMALL.model_dump(), "inputs": list(NAMES[:2]), "loss_weights": [1.0] * 5}
    read = WeatherModel.model_validate_json(json.dumps(fields))
    assert read == WeatherModel.model_validate(fields) and read.inputs == NAMES[:2]
    assert hash(read) == hash(small(inputs=list(NAMES[:2]), loss_weights=[1.0] * 5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_heads": 5}, "n_heads=5 does not divide d_model=32"),
        ({"patch_size": 9}, "patch_size=9 is more than n_lat=8 or n_lon=12"),
        ({"d_model": 30, "n_heads": 3}, "multiple of 4 as d_model, not 30"),
        ({"inputs": ["ozone"]}, "inputs names ozone, which is not among variables"),
        ({"outputs": ["ozone"]}, "outputs names ozone"),
        ({"outputs": ["2m_temperature", "2m_temperature"]}, "outputs names 2m_temperature more than once"),
        ({"variables": ["a", "b", "a"]}, "variables names a more than once"),
        ({"prediction": "change", "inputs": ["2m_temperature"]}, "outputs names land_sea_mask"),
        ({"change_scales": [1.0] * 5}, "change_scales has no effect"),
        ({"loss_weights": [1.0]}, "loss_weights has 1 numbers for 5 outputs"),
        ({"aggregation_groups": 2}, "aggregation_groups=2 has no effect with aggregation=flat"),
        ({"aggregation": "hierarchical", "aggregation_groups": 6}, "aggregation_groups=6 is more than the 5 inputs"),
        ({"first_latitude": 20.0}, "give both first_latitude and last_latitude"),
        ({"first_latitude": 20.0, "last_latitude": 20.0}, "rows must differ"),
        (
            {"first_latitude": 20.0, "last_latitude": 60.0, "position_embedding": "fourier"},
            "rows from 20.0 to 60.0 degrees do not span it",
        ),
        ({"variables": []}, "at least 1 item"),
        ({"dropout": 1.0}, "less than 1"),
        ({"heads": 4}, "Extra inputs"),
    ],
)
def test_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
        small(**changes)


def test_patches_cover_grids_that_they_do_not_divide() -> None:
    era5 = small(n_lat=721, n_lon=1440, patch_size=4)
    assert (era5.patch_rows, era5.patch_columns, era5.n_locations) == (181, 360, 181 * 360)


def test_grids_with_rows_on_the_poles_span_the_globe() -> None:
    config = small(first_latitude=90.0, last_latitude=-90.0, position_embedding="fourier")
    assert config.n_locations == config.n_tokens == 24
