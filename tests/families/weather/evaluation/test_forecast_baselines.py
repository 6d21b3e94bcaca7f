"""Scoring a split: the two baselines, on fields that are known and on a simulated year."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field_files import LATITUDES, REAL, dataset, field, field_data
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldData
from phalanx.families.weather.data.field_samples import Cases, FieldReader
from phalanx.families.weather.data.field_statistics import Climatology
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.compare_forecasts import ScoreRow, climatology_at
from phalanx.families.weather.evaluation.forecast_scores import ForecastScores, Score

HOURS = np.arange(366 * 4 * 2) * 6
Forecast = Callable[[Cases], torch.Tensor]
"""Predicts the output variables [n, V_out, H, W], in their own units, at the targets of n cases."""


def persistence_forecast(reader: FieldReader) -> Forecast:
    return lambda cases: reader.read_outputs(cases, at_start=True)


def climatology_forecast(reader: FieldReader, climatologies: Mapping[int, Climatology]) -> Forecast:
    return lambda cases: climatology_at(reader, climatologies, cases)


def score_forecasts(
    reader: FieldReader,
    forecast: Forecast,
    *,
    climatologies: Mapping[int, Climatology] | None = None,
    source: int = 0,
    batch: int = 16,
    rank: int = 0,
    ranks: int = 1,
) -> ForecastScores:
    """Score `forecast` for this rank's share of the inputs of a source's split and every lead time of `reader`."""
    scores = ForecastScores(reader.outputs, reader.leads, torch.from_numpy(reader.grid.area_weights()))
    mine = reader.cases(source).take(slice(rank, None, ranks))
    for first in range(0, len(mine), batch):
        cases = mine.take(slice(first, first + batch))
        usual = None if climatologies is None else climatology_at(reader, climatologies, cases)
        scores.add(forecast(cases), reader.read_outputs(cases), reader.lead_hours(cases), usual)
    return scores


@pytest.fixture(scope="module")
def two_years(tmp_path_factory: pytest.TempPathFactory) -> FieldSet:
    path = tmp_path_factory.mktemp("fields") / "two.nc"
    noise = dataset(HOURS)
    generator = np.random.default_rng(0)
    for name in ("z500", "t850", "u10"):
        noise[name] = noise[name] + generator.normal(size=(366 * 8, 6, 8)).astype(np.float32)
    noise.to_netcdf(path)
    splits = {"train": {"first": "2000", "last": "2000"}, "test": {"first": "2001-03", "last": "2001-04"}}
    return FieldSet(field_data(path, outputs=["t850", "u10"], splits=splits, lead_hours=[24, 48], climatology_days=21))


def by_hand(error: np.ndarray) -> float:
    bounds = np.sin(np.deg2rad([-90, -60, -30, 0, 30, 60, 90]))
    assert LATITUDES[0] == -75
    return math.sqrt(float(((error**2).mean(axis=(0, 2)) * np.diff(bounds)).sum() / 2))


def test_persistence_by_hand(two_years: FieldSet) -> None:
    reader = two_years.reader("test", seed=0)
    scores = score_forecasts(reader, persistence_forecast(reader))
    store, windows = two_years.stores[0], reader.sources[0].windows
    for score in scores.results():
        column = 0 if score.lead_hours == 24 else 1
        found = windows.targets[:, column] >= 0
        variable = store.variables.index(score.variable)
        truth = store.read(windows.targets[found, column], [variable])[:, 0].astype(np.float64)
        start = store.read(windows.starts[found], [variable])[:, 0]
        assert score.rmse == pytest.approx(by_hand(start - truth), rel=1e-10)
        assert score.forecasts == 61 * 4 - score.lead_hours // 6


def test_the_climatology_forecast_is_of_the_training_year_alone(two_years: FieldSet) -> None:
    reader = two_years.reader("test", seed=0)
    usual = two_years.climatology()
    scores = score_forecasts(reader, climatology_forecast(reader, {0: usual}), climatologies={0: usual})
    # The moving waves and the noise remain, of which the mean over 21 days takes nearly all away.
    for score in scores.results():
        assert score.acc == 0
        frames = reader.sources[0].windows.targets[:, 0 if score.lead_hours == 24 else 1]
        frames = frames[frames >= 0]
        day = two_years.stores[0].times.days_of_year[frames]
        hour = HOURS[frames] % 24
        values = two_years.stores[0].read(np.arange(366 * 4), [two_years.variables.index(score.variable)])[:, 0]
        training_days = np.arange(366 * 4) // 4
        expected = [
            values[(np.abs(training_days - d) <= 10) & (HOURS[: 366 * 4] % 24 == h)].astype(np.float64).mean(axis=0)
            for d, h in zip(day, hour, strict=True)
        ]
        truth = two_years.stores[0].read(frames, [two_years.variables.index(score.variable)])[:, 0]
        assert score.rmse == pytest.approx(by_hand(np.stack(expected) - truth), rel=1e-6)


@pytest.mark.parametrize(("batch", "ranks"), [(1, 1), (64, 3), (7, 2)])
def test_batches_and_ranks_do_not_matter(two_years: FieldSet, batch: int, ranks: int) -> None:
    reader, usual = two_years.reader("test", seed=0), {0: two_years.climatology()}
    whole = score_forecasts(reader, persistence_forecast(reader), climatologies=usual, batch=16)
    shares = [
        score_forecasts(reader, persistence_forecast(reader), climatologies=usual, batch=batch, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    total = shares[0]
    # As `all_reduce` adds them up.
    for share in shares[1:]:
        total._sums += share._sums
    for found, expected in zip(total.results(), whole.results(), strict=True):
        assert dataclasses.astuple(found)[2:] == pytest.approx(
            dataclasses.astuple(expected)[2:], rel=1e-12, nan_ok=True
        )


def test_a_model_is_scored_in_the_units_of_the_data(two_years: FieldSet) -> None:
    reader = two_years.reader("test", seed=0)

    def perfect_but_for_a_kelvin(cases: Any) -> torch.Tensor:
        predicted = reader.denormalise(reader.read_cases(cases).targets)
        predicted[:, 0] += 1
        return predicted

    warm, exact = score_forecasts(reader, perfect_but_for_a_kelvin).results()[:2]
    assert (warm.variable, warm.rmse, warm.bias) == ("t850", pytest.approx(1, abs=1e-4), pytest.approx(1, abs=1e-4))
    assert exact.rmse < 1e-5


def test_a_day_without_climatology_is_refused(tmp_path: Path) -> None:
    dataset(np.arange(240) * 6).to_netcdf(tmp_path / "a.nc")
    fields = FieldSet(field_data(tmp_path / "a.nc", climatology_days=5))
    reader = fields.reader("test", seed=0)
    with pytest.raises(DataError, match="has no frame within 2 days of the day of year of 2000-02-"):
        score_forecasts(reader, climatology_forecast(reader, {0: fields.climatology()}))
    assert field("u10", np.array([0])).shape == (1, 6, 8)


def simulated(first: int, last: int) -> tuple[FieldSet, FieldReader]:
    """Steps of the simulated year, with the climatology of all its steps over 31 days."""
    names = ["z500=geopotential_500", "t850=temperature_850", "t2m=2m_temperature"]
    data = {
        "sources": [{"path": str(REAL / "speedy_5.625deg_12h.nc"), "names": names}],
        "inputs": ["z500", "t850", "t2m"],
        "lead_hours": [24, 48, 72],
        "splits": {"train": {"first": "step 0", "last": "step 479"}, "test": {"first": "step 580", "last": "step 659"}},
        "climatology": {"first": "step 0", "last": "step 659"},
        "climatology_days": 31,
    }
    if first == 0:
        data["splits"] = {"train": {"first": "step 0", "last": f"step {last}"}}
    fields = FieldSet(FieldData.model_validate(data))
    return fields, fields.reader("train" if first == 0 else "test", seed=0)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the weather fields are not at {REAL}")
@pytest.mark.parametrize(
    ("first", "last", "still", "usual"),
    [
        # The figures beside the data are of all 660 steps; those of the last 80 are what a forecast has to beat.
        (0, 659, {"z500": (398, 558, 624), "t850": (2.13, 2.96, 3.30), "t2m": (1.60, 2.28, 2.56)}, (454, 2.42, 1.86)),
        (
            580,
            659,
            {"z500": (420, 596, 667), "t850": (2.23, 3.20, 3.62), "t2m": (1.74, 2.55, 2.90)},
            (466, 2.576, 2.073),
        ),
    ],
)
def test_the_baselines_of_the_simulated_year(
    first: int, last: int, still: dict[str, tuple[float, ...]], usual: tuple[float, ...]
) -> None:
    fields, reader = simulated(first, last)
    climatology = {0: fields.climatology()}

    def found(scores: list[Score], variable: str) -> list[float]:
        return [score.rmse for score in scores if score.variable == variable]

    unchanged = score_forecasts(reader, persistence_forecast(reader)).results()
    for variable, expected in still.items():
        assert found(unchanged, variable) == pytest.approx(list(expected), rel=0.005)
    as_usual = score_forecasts(reader, climatology_forecast(reader, climatology)).results()
    for variable, expected_usual in zip(still, usual, strict=True):
        assert found(as_usual, variable) == pytest.approx([expected_usual] * 3, rel=0.01)


def test_the_better_baseline_is_one_that_is_known() -> None:
    """A point that is missing at the start leaves persistence without an error, and the climatology with one."""
    row = ScoreRow("t850", 6, 4, 1.5, 1.0, 0.0, 0.9, math.nan, None, 2.0)
    assert row.baseline_rmse == 2.0 and row.skill == 0.25
    assert math.isnan(dataclasses.replace(row, climatology_rmse=None).skill)
