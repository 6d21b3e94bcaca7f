"""Ensembles of one model: noise that nothing but seed, sample and member decides, their loss, and their forecasts."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from pydantic import ValidationError

from phalanx.config.load import load_run
from phalanx.ensemble.members import open_member
from phalanx.errors import ConfigError
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.ensemble import build_forecasts
from phalanx.families.weather.evaluation.compare_forecasts import skill_in_words
from phalanx.families.weather.evaluation.forecast_from import forecast_from
from phalanx.families.weather.evaluation.forecast_page import render_forecasts
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScores
from phalanx.families.weather.evaluation.forecast_split import (
    LoadedForecaster,
    forecast_split,
    load_forecaster,
    member_count,
)
from phalanx.families.weather.model.field_head import almost_fair_crps
from phalanx.families.weather.model.grid_features import row_weights
from phalanx.families.weather.model.member_noise import member_noise
from phalanx.training.start import train
from small_forecasters import random_forecaster, random_inputs, small
from weather_runs import write_weather_run

CPU = torch.device("cpu")
ENSEMBLE: dict[str, Any] = {"loss": "crps", "members": 3, "noise_channels": 4}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedForecaster:
    """A model of three members after two steps, that draws from noise what members far apart are made of."""
    folder = tmp_path_factory.mktemp("members")
    changes = {f"model.{name}": value for name, value in ENSEMBLE.items()} | {"model.init_std": 0.2}
    train(load_run(write_weather_run(folder, changes), ["training.steps=2"]), folder / "run")
    return load_forecaster(folder / "run", CPU)


def test_noise_is_a_function_of_seed_sample_member_and_token() -> None:
    config = small(**ENSEMBLE)
    samples, rows = torch.tensor([7, 2**40, 8]), torch.arange(config.n_tokens)
    whole = member_noise(config, 5, samples, 6, rows)
    assert whole is not None and whole.shape == (18, 24, 4) and whole.dtype == torch.float32
    # Other samples, members and tokens beside it change nothing.
    part = member_noise(config, 5, samples[1:2], 2, rows[10:])
    assert part is not None and torch.equal(part, whole[6:8, 10:])
    others = [member_noise(config, seed, samples, 6, rows, step=step) for seed, step in ((6, 0), (5, 1))]
    every = torch.cat([whole.flatten(), *(one.flatten() for one in others if one is not None)])
    assert len(every.unique()) > 0.95 * len(every)
    assert member_noise(small(), 5, samples, 1, rows) is None


def test_noise_has_no_mean_and_unit_variance() -> None:
    config = small(**ENSEMBLE)
    values = member_noise(config, 0, torch.arange(500), 8, torch.arange(config.n_tokens))
    assert values is not None
    assert abs(float(values.mean())) < 0.005 and float(values.var()) == pytest.approx(1.0, abs=0.005)
    # The four parts of 16 bits have the kurtosis 3 - 1.2 / 4.
    assert float(values.double().pow(4).mean()) == pytest.approx(2.7, abs=0.03)
    by_member = values.view(500, 8, -1)
    together = torch.corrcoef(torch.cat((by_member[0], by_member[1])))
    assert float((together - torch.eye(16)).abs().max()) < 0.5


@pytest.mark.parametrize(("alpha", "count"), [(0.0, 4), (0.95, 2), (0.95, 5), (1.0, 3)])
def test_the_almost_fair_score_is_that_of_all_pairs(alpha: float, count: int) -> None:
    """As Lang et al. (2024) write it: a sum over pairs of members with epsilon = (1 - alpha) / M."""
    generator = torch.Generator().manual_seed(0)
    members = torch.randn(7, count, 5, generator=generator, dtype=torch.float64)
    truth = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    total = torch.zeros(7, 5, dtype=torch.float64)
    for one, other in combinations(members.unbind(1), 2):
        apart = (one - other).abs() * (1 - (1 - alpha) / count)
        total += (one - truth).abs() + (other - truth).abs() - apart
    torch.testing.assert_close(almost_fair_crps(members, truth, alpha), total / (count * (count - 1)))


def test_the_loss_is_the_weighted_score_of_the_members() -> None:
    config = small(**ENSEMBLE, loss_weights=[2.0, 0.5, 1.0, 3.0, 0.25], prediction="change")
    model = random_forecaster(config)
    fields, targets, hours = random_inputs(config)
    targets[0, 1] = torch.nan
    targets[1, :, 2:5, 3] = torch.nan
    noise = member_noise(config, 1, torch.tensor([3, 4]), 3, torch.arange(config.n_tokens))
    loss = model(fields, targets, lead_hours_B=hours, noise_RSC=noise)
    members = model.forecast(fields, hours, noise_RSC=noise).unflatten(0, (2, 3))
    assert float(members.std(1).min()) > 0.0
    scores = almost_fair_crps(members, targets, 0.95) * row_weights(config, CPU)[:, None]
    scores = scores * torch.tensor(config.loss_weights)[:, None, None]
    torch.testing.assert_close(loss[0], scores[~targets.isnan()].sum())
    loss.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    # A row for each member instead of one for each sample is the same.
    repeated = model(fields.repeat_interleave(3, 0), targets, lead_hours_B=hours.repeat_interleave(3), noise_RSC=noise)
    torch.testing.assert_close(repeated, loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "crps", "noise_channels": 4}, "members is 1; give 2 or more"),
        ({"loss": "crps", "members": 2}, "give noise_channels, 4 say"),
        ({"members": 2}, "members=2 is for ensembles and loss is mse; give loss=crps, or members=1"),
        ({"noise_channels": 2}, "noise_channels=2 is for ensembles"),
        ({"crps_alpha": 0.5}, "crps_alpha=0.5 is for ensembles"),
        ({**ENSEMBLE, "members": 65}, "less than or equal to 64"),
        ({**ENSEMBLE, "crps_alpha": 1.5}, "less than or equal to 1"),
    ],
)
def test_half_an_ensemble_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small(**changes)


def test_members_are_scored_together_and_their_mean_as_a_forecast(loaded: LoadedForecaster) -> None:
    """By hand, of steps of 24 + 12 hours, each with noise by the time of the input."""
    found = forecast_split(loaded, hours=36, split="test", starts=2, members=4, mapped=["u10"])
    reader = FieldSet(loaded.run.data).reader("test", seed=0, leads=list(found.steps))
    source = reader.sources[0]
    start = source.windows.starts[:1]
    model, number = loaded.model, torch.from_numpy(source.store.times.seconds[start])
    x = reader.read_states(0, start).repeat_interleave(4, 0)
    for step, hours in enumerate((24.0, 12.0)):
        noise = member_noise(model.config, loaded.run.training.seed, number, 4, torch.arange(12), step=step)
        x = model.next_inputs(x, model.forecast(x, torch.full((4,), hours), noise_RSC=noise))
    members = reader.denormalise(x[:, :3])
    shown = {(one.variable, one.lead_hours): one.forecast for one in found.maps}
    np.testing.assert_allclose(shown["u10", 36], members[:, 2].mean(0), rtol=1e-4)
    for row in found.rows:
        assert row.ensemble is not None and row.ensemble.members == 4 and row.ensemble.spread > 0
        assert row.ensemble.rmse == pytest.approx(row.rmse) and row.ensemble.bias == pytest.approx(row.bias)
        assert sum(row.ensemble.ranks) == pytest.approx(1.0) and len(row.ensemble.ranks) == 5
    leads = {row.lead_hours for row in found.rows}
    assert skill_in_words(found.rows).partition("; spread over error: ")[2].count(" h ") == len(leads)
    page = render_forecasts(loaded, found)
    assert "of a reliable ensemble 40.0 %" in page and "spread/error" in page
    # With as many as in training where nobody says how many; fewer are the first of more.
    assert forecast_split(loaded, hours=6, split="test", starts=2).members == 3


def test_files_have_a_dimension_of_members(loaded: LoadedForecaster, tmp_path: Path) -> None:
    for path in (tmp_path / "split.nc", tmp_path / "split.zarr"):
        found = forecast_split(loaded, hours=12, split="test", starts=2, members=5, out=path)
        with xarray.open_dataset(path, engine="zarr" if path.suffix == ".zarr" else "netcdf4") as stored:
            assert stored["z"].dims[:3] == ("time", "prediction_timedelta", "number")
            fields = torch.from_numpy(stored["u10"].values)
        reader = FieldSet(loaded.run.data).reader("test", seed=0, leads=[6, 12])
        # The last start has no truth at 12 h: scores of the file's first start at 6 h and 12 h, and of the last at 6 h.
        scores = EnsembleScores(reader.outputs, (6, 12), torch.from_numpy(reader.grid.area_weights()), 5)
        windows = reader.sources[0].windows
        for time, row in enumerate((0, len(windows.starts) - 1)):
            for lead, target in enumerate(windows.targets[row]):
                if target >= 0:
                    truth = torch.from_numpy(reader.sources[0].store.read(np.array([target]), [0, 1, 2]))
                    at = torch.full((1, 5, 3, 6, 8), torch.nan)
                    at[:, :, 2] = fields[time, lead]
                    scores.add(at, truth, torch.tensor([(6, 12)[lead]]))
        expected = [score for score in scores.results() if score.variable == "u10"]
        crps = {row.lead_hours: row.ensemble.crps for row in found.rows if row.ensemble and row.variable == "u10"}
        assert crps == pytest.approx({score.lead_hours: score.crps for score in expected}, rel=1e-5)
    one = tmp_path / "today.zarr"
    moment = str(np.datetime64(int(windows.starts[0]) * 6, "h") + (np.datetime64("2000-01-01") - np.datetime64(0, "h")))
    forecast_from(loaded, [moment.replace("T", " ")], one, hours=12, members=2)
    with xarray.open_zarr(one) as stored:
        assert stored.sizes["number"] == 2
        # The same member of the same start, whatever is forecast beside it.
        np.testing.assert_allclose(stored["u10"].values[0], fields[0, :, :2], rtol=1e-4, atol=1e-4)


def test_members_without_noise_and_ensembles_of_ensembles_are_refused(loaded: LoadedForecaster, tmp_path: Path) -> None:
    plain = load_run(write_weather_run(tmp_path))
    assert isinstance(plain, WeatherRun) and member_count(plain, 1) == member_count(plain, None) == 1
    with pytest.raises(ConfigError, match="--members 2: the model has no noise"):
        member_count(plain, 2)
    folder = loaded.where.parent.parent
    with pytest.raises(ConfigError, match="is an ensemble itself; score it with phalanx forecast --members M"):
        build_forecasts([open_member(folder), open_member(folder)], CPU)
