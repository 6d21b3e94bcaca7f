"""Closed forms of size and cost against the real module."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.families.weather.model.member_noise import member_noise
from phalanx.families.weather.sizes import (
    embedding_flops_per_sample,
    model_flops_per_sample,
    parameter_count,
)
from small_forecasters import EVERYTHING, SMALL, small

FORMS = {
    "published": SMALL,
    "everything": EVERYTHING,
    "several tokens": small(aggregation_queries=3, qk_norm=True, d_ff=40),
    "some variables": small(inputs=["2m_temperature", "temperature_850"], outputs=["2m_temperature"], decoder_depth=0),
    "groups": small(aggregation="hierarchical", aggregation_groups=2, level_embedding="fourier"),
    "states": small(history=3, inputs=["2m_temperature", "temperature_850"]),
    "members": small(loss="crps", members=3, noise_channels=4, history=2),
    "waves": small(position_embedding="fourier", lead_embedding="fourier", decoder_depth=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_module_has_exactly_the_computed_parameters(form: str) -> None:
    with torch.device("meta"):
        model = Forecaster(FORMS[form])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(FORMS[form])


def _counted(config: WeatherModel, samples: int) -> int:
    """Operations of matrix products in a forward pass."""
    with torch.device("meta"):
        model = Forecaster(config)
        fields = torch.empty(samples, config.history * len(config.input_names), config.n_lat, config.n_lon)
        hours = torch.empty(samples)
        with FlopCounterMode(display=False) as counter:
            numbers = torch.empty(samples, dtype=torch.int64)
            positions = model.all_positions(fields.device)
            noise = member_noise(config, 0, numbers, config.members, positions.rows_S)
            hidden = model.hidden(fields, positions, lead_hours_B=hours, noise_RSC=noise)
            model.head.patches(hidden)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("form", FORMS)
def test_needed_operations_are_those_of_one_more_sample(form: str) -> None:
    config = FORMS[form]
    lead = 64 if config.lead_embedding == "fourier" else 1
    counted = _counted(config, 3) - _counted(config, 2) - 2 * lead * config.d_model
    assert 3 * counted == model_flops_per_sample(config)


def test_published_operations_are_a_key_and_a_value_for_every_variable() -> None:
    width, variables, points, locations = 32, 5, 4, 24
    tokens = variables * (width * points + 2 * width * width)
    attention = 2 * variables * width
    per_location = tokens + 2 * width * width + attention
    assert embedding_flops_per_sample(SMALL, "published") == 6 * locations * per_location
    gained = embedding_flops_per_sample(SMALL, "published") - embedding_flops_per_sample(SMALL)
    assert model_flops_per_sample(SMALL, "published") == model_flops_per_sample(SMALL) + gained
