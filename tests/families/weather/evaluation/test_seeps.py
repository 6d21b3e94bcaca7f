"""SEEPS: its matrix and its climate by hand, its scores against an independent implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray
from scores.categorical import seeps

from field_files import dataset, field_data
from phalanx.families.weather.data.field_statistics import climate_by_month
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.compare_forecasts import Comparison, known_climatologies
from phalanx.families.weather.evaluation.forecast_scores import PrecipitationClimates, seeps_errors

HOURS = np.arange(366 * 4) * 6
DRY = 0.25


def one_point(dry_fraction: float) -> PrecipitationClimates:
    """The climate of a point where precipitation is heavy above 3."""
    shape = (1, 1, 1, 1)
    return PrecipitationClimates(
        (0,),
        torch.tensor([DRY], dtype=torch.float64),
        torch.full(shape, dry_fraction, dtype=torch.float64),
        torch.full(shape, 3.0),
    )


def error_of(forecast: float, truth: float, dry_fraction: float) -> float:
    amounts = (torch.full((1, 1, 1, 1), amount) for amount in (forecast, truth))
    return seeps_errors(*amounts, one_point(dry_fraction)).item()


AMOUNTS = (0.1, 1.0, 8.0)
"""Dry, light, heavy."""


def test_errors_are_those_of_the_published_matrix() -> None:
    dry, heavy = 0.4, 0.2
    # Equation 15: rows are forecasts, columns observations.
    matrix = [
        [0, 1 / (1 - dry), 1 / heavy + 1 / (1 - dry)],
        [1 / dry, 0, 1 / heavy],
        [1 / dry + 1 / (1 - heavy), 1 / (1 - heavy), 0],
    ]
    found = [[error_of(forecast, truth, dry) for truth in AMOUNTS] for forecast in AMOUNTS]
    np.testing.assert_allclose(found, np.array(matrix) / 2, rtol=1e-12)


@pytest.mark.parametrize("dry", [0.15, 0.5, 0.8])
@pytest.mark.parametrize("named", AMOUNTS)
def test_a_category_without_knowledge_costs_one_in_the_mean(dry: float, named: float) -> None:
    chances = (dry, 2 * (1 - dry) / 3, (1 - dry) / 3)
    mean = sum(chance * error_of(named, truth, dry) for chance, truth in zip(chances, AMOUNTS, strict=True))
    assert mean == pytest.approx(1.0)


def test_amounts_at_a_threshold_are_below_it() -> None:
    assert error_of(DRY, 0.0, 0.5) == 0.0 and error_of(3.0, 1.0, 0.5) == 0.0
    assert error_of(3.00001, 1.0, 0.5) > 0.0
    assert math.isnan(error_of(math.nan, 1.0, 0.5))


@pytest.fixture(scope="module")
def rainy(tmp_path_factory: pytest.TempPathFactory) -> tuple[FieldSet, np.ndarray]:
    """A leap year in which it rains half of the time, everywhere more in one month than in another; and the amounts."""
    generator = np.random.default_rng(5)
    stored = dataset(HOURS)
    amounts = generator.gamma(0.6, 2.0, size=(len(HOURS), 6, 8)).astype(np.float32)
    # One point is a desert, one has no value in February.
    amounts[:, 0, 0] *= 0.01
    amounts[31 * 4 : 60 * 4, 2, 3] = np.nan
    stored["rain"] = (("time", "lat", "lon"), amounts)
    path = tmp_path_factory.mktemp("rain") / "year.nc"
    stored.to_netcdf(path)
    splits = {"train": {"first": "2000-01", "last": "2000-09"}, "test": {"first": "2000-11", "last": "2000-12"}}
    data = field_data(
        path,
        inputs=["z500", "t850", "rain"],
        splits=splits,
        lead_hours=[24, 48],
        climatology={"first": "2000", "last": "2000"},
        dry_thresholds={"rain": DRY},
        missing="mask",
    )
    return FieldSet(data), amounts


def test_the_climate_is_that_of_a_month_and_a_time_of_day(rainy: tuple[FieldSet, np.ndarray]) -> None:
    fields, amounts = rainy
    climate = fields.climatology().precipitation
    assert climate is not None and climate.places == (2,) and climate.dry_fraction.shape == (12, 4, 1, 6, 8)
    # March at 12 h.
    mine = amounts[60 * 4 : 91 * 4][2::4]
    np.testing.assert_allclose(climate.dry_fraction[2, 2, 0], (mine <= DRY).mean(axis=0), rtol=1e-6)
    for row, column in ((1, 1), (5, 7), (2, 3)):
        wet = mine[:, row, column]
        expected = np.quantile(wet[wet > DRY], 2 / 3)
        assert climate.heavy_threshold[2, 2, 0, row, column] == pytest.approx(expected, rel=1e-6)
    # A point that is never wet has no heavy amounts, one without values nothing.
    assert climate.dry_fraction[2, 2, 0, 0, 0] == 1.0 and np.isnan(climate.heavy_threshold[2, 2, 0, 0, 0])
    assert np.isnan(climate.dry_fraction[1, :, 0, 2, 3]).all()


def test_a_climate_is_of_the_frames_that_are_named(rainy: tuple[FieldSet, np.ndarray]) -> None:
    fields, amounts = rainy
    frames = np.array([4, 8, 12], dtype=np.int64)
    climate = climate_by_month(fields.stores[0], fields.data.target_variables, frames, {"rain": DRY})
    np.testing.assert_allclose(climate.dry_fraction[0, 0, 0], (amounts[frames] <= DRY).mean(axis=0), rtol=1e-6)
    assert np.isnan(climate.dry_fraction[0, 1:]).all() and np.isnan(climate.dry_fraction[1:]).all()


def test_scores_are_those_of_an_independent_implementation(rainy: tuple[FieldSet, np.ndarray]) -> None:
    fields, amounts = rainy
    reader = fields.reader("test", seed=0)
    climatologies, _ = known_climatologies(fields, reader)
    assert climatologies is not None
    comparison = Comparison(reader, climatologies, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    cases, forecasts = reader.cases(), []
    for first in range(0, len(cases), 50):
        part = cases.take(slice(first, first + 50))
        truth = reader.read_outputs(part)
        forecasts.append(truth * torch.empty_like(truth).uniform_(0.3, 2.5, generator=generator))
        comparison.add(part, forecasts[-1])
    forecast = torch.cat(forecasts)[:, 2].double().numpy()
    climate = climatologies[0].precipitation
    assert climate is not None
    fraction, heavy = (one[:, 0].astype(np.float64) for one in climate.at(reader.sources[0].store.times, cases.target))
    area = xarray.DataArray(reader.grid.area_weights(), dims=("lat", "lon"))
    rows = {(row.variable, row.lead_hours): row for row in comparison.rows()}
    leads = reader.lead_hours(cases).numpy()
    for lead in (24, 48):
        mine = leads == lead
        fields_of = [amounts[cases.target[mine]], fraction[mine], np.where(np.isnan(heavy[mine]), 1e9, heavy[mine])]
        truth, dry, threshold = (xarray.DataArray(one, dims=("n", "lat", "lon")) for one in fields_of)
        row = rows["rain", lead]
        for found, tried in (
            (row.seeps, forecast[mine]),
            (row.persistence_seeps, amounts[cases.start[mine]]),
        ):
            with pytest.warns(UserWarning, match="exactly equal to 0 or 1"):
                expected = seeps(
                    xarray.DataArray(tried, dims=("n", "lat", "lon")),
                    truth,
                    dry,
                    threshold,
                    dry_light_threshold=DRY,
                    preserve_dims=["n"],
                    weights=area,
                )
            assert found == pytest.approx(float(expected.mean()), rel=1e-6)
        # What is right but for its size is better than what is not known at all.
        assert row.seeps < 0.7 < 0.9 < row.persistence_seeps < 1.1
        assert rows["z500", lead].seeps is None and rows["z500", lead].persistence_seeps is None
