"""Forecasts over a split: which steps, what they start from, and what comes out for models whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation import forecast_split as module
from phalanx.families.weather.evaluation.compare_forecasts import Comparison, known_climatologies
from phalanx.families.weather.evaluation.forecast_split import (
    LoadedForecaster,
    forecast_split,
    load_forecaster,
    plan_steps,
)
from phalanx.families.weather.inputs import spread_cases
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.training.start import train
from weather_runs import write_weather_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory after three steps."""
    folder = tmp_path_factory.mktemp("forecast")
    run = load_run(write_weather_run(folder), ["training.steps=3", "optimizer.lr=0.05"])
    train(run, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(trained: Path) -> LoadedForecaster:
    return load_forecaster(trained, CPU)


def test_the_fewest_steps_are_taken_and_build_on_shorter_forecasts() -> None:
    assert plan_steps([24, 48, 72], 120) == {24: (24,), 48: (48,), 72: (72,), 96: (72, 24), 120: (72, 48)}
    assert plan_steps([24], 72) == {24: (24,), 48: (24, 24), 72: (24, 24, 24)}
    assert plan_steps([10, 25], 30) == {10: (10,), 20: (10, 10), 25: (25,), 30: (10, 10, 10)}


def test_the_model_is_the_one_that_was_trained(trained: Path, loaded: LoadedForecaster) -> None:
    assert loaded.step == 3 and loaded.where.name == "step-00000003"
    # Statistics come from the run's folder, so that other data are normalised as the training data were.
    assert loaded.run.data.statistics == str(trained / "statistics.json")
    mean = FieldSet(loaded.run.data).statistics.mean_of(["z500"])[0]
    assert mean == FieldSet(load_run(trained.parent / "run.yaml").data).statistics.mean_of(["z500"])[0]  # type: ignore[arg-type]


def still(loaded: LoadedForecaster) -> LoadedForecaster:
    """The model with a head that gives no change."""
    model = Forecaster(loaded.model.config)
    model.load_state_dict(loaded.model.state_dict())
    with torch.no_grad():
        model.head.output.weight.zero_()
        model.head.output.bias.zero_()
    return replace(loaded, model=model)


def test_a_model_that_changes_nothing_is_persistence_however_often_it_steps(loaded: LoadedForecaster) -> None:
    found = forecast_split(still(loaded), hours=48, split="test", step_hours=6)
    assert {row.lead_hours for row in found.rows} == set(range(6, 49, 6))
    for row in found.rows:
        assert row.rmse == pytest.approx(row.persistence_rmse, rel=1e-5)
        assert row.acc == pytest.approx(row.persistence_acc, abs=1e-5)
        assert row.skill == pytest.approx(1 - row.rmse / min(row.persistence_rmse, row.climatology_rmse or np.inf))


def test_a_roll_out_starts_each_step_from_the_one_before(loaded: LoadedForecaster) -> None:
    """By hand, for the first start of the split: 24 + 12 hours, orography kept."""
    run = loaded.run
    reader = FieldSet(run.data).reader("test", seed=0, leads=[36])
    case = reader.cases().take(slice(1))
    fields = reader.read_cases(case).fields
    first = loaded.model.forecast(fields, torch.tensor([24.0]))
    second = loaded.model.forecast(torch.cat((first, fields[:, 3:]), dim=1), torch.tensor([12.0]))
    expected = reader.denormalise(second)[0]
    found = forecast_split(loaded, hours=36, split="test", starts=2, mapped=["u10", "z500"])
    assert found.steps[36] == (24, 12)
    maps = {(one.variable, one.lead_hours): one for one in found.maps}
    assert maps.keys() == {(name, lead) for name in ("u10", "z500") for lead in (12, 24, 36)}
    np.testing.assert_allclose(maps["u10", 36].forecast, expected[2], rtol=1e-5)
    np.testing.assert_array_equal(maps["z500", 36].truth, reader.read_outputs(case)[0, 0])


def test_scores_do_not_depend_on_how_many_are_computed_at_a_time(
    loaded: LoadedForecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = forecast_split(loaded, hours=24, split="test")
    monkeypatch.setattr(module, "_BATCH", 3)
    for row, other in zip(whole.rows, forecast_split(loaded, hours=24, split="test").rows, strict=True):
        assert (other.variable, other.lead_hours, other.forecasts) == (row.variable, row.lead_hours, row.forecasts)
        assert (other.rmse, other.mae, other.bias, other.acc) == pytest.approx(
            (row.rmse, row.mae, row.bias, row.acc), rel=1e-5
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hours": 25}, "--hours 25: steps of 6, 12, 24 hours do not reach it\nnearest: --hours 24"),
        ({"hours": 24, "step_hours": 18}, "--step 18: the model was trained on lead times of 6, 12, 24 hours"),
        ({"hours": 24, "mapped": ["q"]}, "--map q: not predicted; the model predicts z500, t850, u10"),
    ],
)
def test_what_cannot_be_forecast_is_refused(loaded: LoadedForecaster, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forecast_split(loaded, split="test", **changes)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_what_is_not_predicted_ends_a_roll_out(tmp_path: Path) -> None:
    run = load_run(write_weather_run(tmp_path, {"data.outputs": ["z500"], "model.outputs": ["z500"]}))
    assert isinstance(run, WeatherRun)
    loaded = LoadedForecaster(Forecaster(run.model), run, tmp_path, 0)
    with pytest.raises(ConfigError, match="no roll-out: t850 is read but not predicted"):
        forecast_split(loaded, hours=48, split="test")


def test_evaluation_spreads_starts_and_takes_all_their_lead_times(loaded: LoadedForecaster) -> None:
    reader = FieldSet(loaded.run.data).reader("validation", seed=0)
    cases = spread_cases(reader, 12)
    every = reader.cases()
    for start in np.unique(cases.start):
        assert (cases.start == start).sum() == (every.start == start).sum()
    assert len(np.unique(cases.start)) == 4
    assert len(spread_cases(reader, 10_000)) == len(every)


def test_a_climatology_that_does_not_cover_the_split_or_is_too_large_is_left_out(loaded: LoadedForecaster) -> None:
    data = loaded.run.data
    short = FieldSet(data.model_copy(update={"climatology_days": 3}))
    reader = short.reader("test", seed=0)
    found, why = known_climatologies(short, reader)
    assert found is None and why is not None and "data.climatology_days" in why
    assert known_climatologies(short, reader, 1000)[1] == (
        "its sources hold 0 GiB, too much to average now; phalanx forecast does"
    )
    comparison = Comparison(reader, None, CPU)
    cases = reader.cases().take(slice(5))
    comparison.add(cases, reader.read_outputs(cases))
    row = comparison.rows()[0]
    assert (row.rmse, row.climatology_rmse, row.acc, row.skill) == (0.0, None, None, 1.0)


def test_maps_are_of_one_start_that_has_truths_at_all_their_lead_times(
    loaded: LoadedForecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last start that has all of them, where the first ones lack one: however many are computed at a time."""
    plain = forecast_split(loaded, hours=24, split="test", mapped=["z500"])
    whole = FieldSet.reader

    def holes(self: FieldSet, *given: object, **options: object) -> object:
        reader = whole(self, *given, **options)  # type: ignore[arg-type]
        reader.sources[0].windows.targets[:5, -1] = -1
        return reader

    monkeypatch.setattr(FieldSet, "reader", holes)
    for batch in (64, 3, 1):
        monkeypatch.setattr(module, "_BATCH", batch)
        found = forecast_split(loaded, hours=24, split="test", mapped=["z500"])
        assert [one.lead_hours for one in found.maps] == [one.lead_hours for one in plain.maps]
        assert len({one.start for one in found.maps}) == 1
        assert found.maps[0].start > plain.maps[0].start
