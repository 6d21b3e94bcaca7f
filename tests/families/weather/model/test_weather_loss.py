"""The loss: sums with counts, missing targets, weights."""

from __future__ import annotations

import pytest
import torch

from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.field_head import loss_sum
from phalanx.families.weather.model.grid_features import fields_of, row_latitudes
from published_climax import published_loss
from small_forecasters import EVERYTHING, SMALL, random_forecaster, random_inputs, small

CPU = torch.device("cpu")
EDGES = EVERYTHING.model_copy(update={"n_lat": 7, "n_lon": 11})
"""The last patches reach beyond the grid."""


def test_missing_targets_are_left_out_of_sum_count_and_gradient() -> None:
    model = random_forecaster(SMALL)
    fields, targets, hours = random_inputs(SMALL)
    predicted = model.forecast(fields, hours)
    targets[0, 1] = torch.nan
    targets[1, :, 2:5, 3] = torch.nan
    valid = ~targets.isnan()
    cosines = torch.cos(torch.deg2rad(row_latitudes(SMALL, CPU)))
    error = (predicted - targets).square() * (cosines / cosines.mean())[:, None]
    loss = model(fields, targets, lead_hours_B=hours)
    torch.testing.assert_close(loss[0], error[valid].sum())
    loss.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_batch_without_targets_has_loss_zero_and_no_gradient() -> None:
    model = random_forecaster(EVERYTHING)
    fields, targets, hours = random_inputs(EVERYTHING)
    loss = model(fields, torch.full_like(targets, torch.nan), lead_hours_B=hours)
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_uneven_batches_add_up() -> None:
    model = random_forecaster(SMALL)
    fields, targets, hours = random_inputs(SMALL, samples=3)
    targets[2] = torch.nan
    targets[0, 0] = torch.nan
    whole = model(fields, targets, lead_hours_B=hours)
    parts = [model(fields[s], targets[s], lead_hours_B=hours[s]) for s in (slice(0, 1), slice(1, 3))]
    torch.testing.assert_close(sum(parts), whole)
    counts = [(~targets[s].isnan()).sum() for s in (slice(0, 1), slice(1, 3))]
    assert sum(counts) == (~targets.isnan()).sum()


def test_weights_of_variables() -> None:
    weights = (2.0, 0.5, 1.0, 3.0, 0.25)
    model = random_forecaster(small(loss_weights=list(weights)))
    fields, targets, hours = random_inputs(SMALL)
    predicted = model.forecast(fields, hours)
    rows = row_latitudes(SMALL, CPU).tolist()
    by_variable = [published_loss(predicted[:, v], targets[:, v], rows) * 2 * 8 * 12 for v in range(5)]
    expected = sum(weight * loss for weight, loss in zip(weights, by_variable, strict=True))
    torch.testing.assert_close(model(fields, targets, lead_hours_B=hours)[0], expected)


def test_a_loss_of_bfloat16_predictions_is_summed_in_float32() -> None:
    predicted = torch.full((1, 5000, 1, 1), 1.0, dtype=torch.bfloat16)
    total = loss_sum(SMALL, predicted, torch.zeros(1, 5000, 1, 1), torch.ones(5000, 1))
    assert total.dtype == torch.float32 and total.tolist() == [5000.0]


@torch.no_grad()
@pytest.mark.parametrize("config", [SMALL, EVERYTHING, EDGES])
def test_the_loss_is_that_of_the_predicted_fields(config: WeatherModel) -> None:
    model = random_forecaster(config)
    fields, _, hours = random_inputs(config)
    hidden = model.hidden(fields, model.all_positions(CPU), lead_hours_B=hours)
    predicted = fields_of(model.head(hidden, None, fields_BVHW=fields), config)
    assert model.head(hidden, predicted, fields_BVHW=fields).tolist() == [0.0]
    off_by_one = model.head(hidden, predicted + 1.0, fields_BVHW=fields)
    weight = sum(config.loss_weights or [1.0] * len(config.output_names))
    assert off_by_one.tolist() == pytest.approx([2 * config.n_lat * config.n_lon * weight])
