"""Sources on several grids, with calendars of their own: each step has samples of one, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field_files import dataset, field
from phalanx.config.check import BatchSizes
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, DataError
from phalanx.families.registry import bind
from phalanx.families.weather.config import ModelGrid, WeatherModel, WeatherRun
from phalanx.families.weather.data.field_samples import GridReader
from phalanx.families.weather.data.grid_turns import GridTurns
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.forecast_split import forecast_split, load_forecaster
from phalanx.families.weather.inputs import grid_of_data, require_grids
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.resizing import interpolate_grid
from phalanx_processes import Trained, train
from weather_runs import write_run

COARSE = {"name": "coarse", "n_lat": 3, "n_lon": 7, "first_latitude": -90.0, "last_latitude": 90.0}
"""With rows on the poles, and patches of 2 that reach beyond it."""
POLES = np.linspace(-90.0, 90.0, 3)
EAST = np.arange(7) * 360 / 7
HOURS = np.arange(240) * 6
LAYOUTS = [(4, "layout.tp=2", "layout.dp_shard=2"), (2, "layout.pp=2", "layout.dp_shard=1")]
STEPS = 3
"""In each layout: of weights 1 and 2, one and two of them are of either grid."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on the model's grid and two on another, in three calendars and with other variables; and a run file."""
    root = tmp_path_factory.mktemp("grids")
    other = {"latitudes": POLES, "longitudes": EAST}
    dataset(HOURS).to_netcdf(root / "fine.nc")
    dataset(HOURS, ("z500", "t850"), calendar="noleap", **other).to_netcdf(root / "noleap.nc")
    dataset(HOURS, ("t850", "u10"), calendar="360_day", **other).to_netcdf(root / "days360.nc")
    sources = [
        {"path": str(root / "fine.nc")},
        {"path": str(root / "noleap.nc"), "variables": ["z500", "t850"], "grid": "coarse"},
        {"path": str(root / "days360.nc"), "variables": ["t850", "u10"], "grid": "coarse"},
    ]
    write_run(root, root / "fine.nc", {"data.sources": sources, "model.grids": [COARSE], "layout.global_batch": 4})
    return root


def run_of(folder: Path, *words: str) -> WeatherRun:
    run = load_run(folder / "run.yaml", list(words))
    assert isinstance(run, WeatherRun)
    return run


def small(**changes: Any) -> WeatherModel:
    fields = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_lat": 6, "n_lon": 8, "patch_size": 2, "grids": [COARSE]}
    return WeatherModel.model_validate({**fields, "variables": ["a", "b"], "prediction": "change", **changes})


@pytest.mark.parametrize("positions", ["learned", "fourier"])
@pytest.mark.parametrize("weights", ["cos", "area"])
def test_on_another_grid_a_model_is_that_of_the_grid_with_its_parameters(positions: str, weights: str) -> None:
    config = small(position_embedding=positions, latitude_weights=weights)
    grid = config.grids[0]
    model, other = (Forecaster(one, dtype=torch.float64) for one in (config, config.on_grid(grid)))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.double().parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    own = dict(model.named_parameters())
    if positions == "learned":
        own["embedding.positions"] = interpolate_grid(own["embedding.positions"], (3, 4), (2, 4))
    other.double().load_state_dict(own)
    fields, targets = torch.randn((2, 2, 2, 3, 7), dtype=torch.float64, generator=generator)
    hours = torch.tensor([6.0, 12.0])
    mine = model(fields, targets, lead_hours_B=hours, grid=grid)
    torch.testing.assert_close(mine, other(fields, targets, lead_hours_B=hours), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.forecast(fields, hours, grid), other.forecast(fields, hours), rtol=1e-12, atol=0)


def test_learned_positions_are_interpolated_with_gradients() -> None:
    table = torch.arange(12.0, dtype=torch.float64).reshape(12, 1).requires_grad_()
    same = interpolate_grid(table, (3, 4), (3, 4))
    torch.testing.assert_close(same, table)
    finer = interpolate_grid(table, (3, 4), (6, 8))
    # A row is 4 below the one before it: in the middle of cells half as wide, a quarter of a cell from the old ones.
    assert finer.reshape(6, 8)[2, 2].item() == pytest.approx(4 * 0.75 + 0.75)
    finer.sum().backward()
    assert table.grad is not None and table.grad.sum().item() == pytest.approx(48)
    config = small(n_lat=12, n_lon=16)
    model = Forecaster(config)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    positions = model.embedding.positions
    assert positions is not None
    with torch.no_grad():
        positions.copy_(torch.randn(positions.shape))
    found = model.embedding.places(torch.arange(8), config.on_grid(config.grids[0]))
    torch.testing.assert_close(found, interpolate_grid(positions, (6, 8), (2, 4)))


def test_turns_are_shared_by_weight_in_closed_form() -> None:
    coarse = ModelGrid.model_validate(COARSE)
    turns = GridTurns({None: 1.0, coarse: 2.5}, BatchSizes(8, ((4, 2), (3, 6))))
    grids = [turns.grid_of(step) for step in range(1, 141)]
    assert grids.count(coarse) == 100
    # As evenly as can be: never more than one step from the share.
    for step in range(1, 141):
        assert abs(grids[:step].count(coarse) - step * 2.5 / 3.5) <= 1.0
        counted = [
            sum(turns.sizes.of_step(n) for n in range(1, step + 1) if grids[n - 1] is one) for one in turns.grids
        ]
        assert turns.samples_through(step) == counted
    assert turns.grid_of(10**12) in (None, coarse)


def test_a_step_has_samples_of_one_grid_and_sources_their_shares(folder: Path) -> None:
    run = run_of(folder)
    fields = FieldSet(run.data)
    readers = {run.model.grid_named(name): one for name, one in fields.readers("train", seed=1).items()}
    reader = GridReader(readers, GridTurns.of_run(run))
    shapes, kinds, numbers = [], {"noleap": 0, "360_day": 0}, {}
    for step in range(1, 31):
        # A rank's half of a batch is what it is for one rank.
        mine = np.arange(4 * step - 2, 4 * step)
        whole, half = reader.read(np.arange(4 * step - 4, 4 * step), step), reader.read(mine, step)
        assert torch.equal(half.fields, whole.fields[2:]) and torch.equal(half.sample_indices, torch.from_numpy(mine))
        shapes.append(tuple(whole.fields.shape[2:]))
        assert whole.grid == (None if shapes[-1] == (6, 8) else run.model.grids[0])
        if whole.grid is not None:
            # Of the 360-day source z500 is missing, of the other u10.
            kinds["360_day"] += int(whole.targets[:, 0].isnan().all(2).all(1).sum())
            kinds["noleap"] += int(whole.targets[:, 2].isnan().all(2).all(1).sum())
        numbers[whole.grid] = numbers.get(whole.grid, 0) + len(whole.targets)
    assert shapes.count((3, 7)) == 20 and kinds == {"noleap": 40, "360_day": 40}
    assert numbers == dict(zip(reader.turns.grids, reader.turns.samples_through(30), strict=True))


def test_samples_are_those_of_the_sources_grid_and_calendar(folder: Path) -> None:
    found = FieldSet(run_of(folder).data)
    reader = found.readers("train", seed=1)["coarse"]
    batch, cases = reader.read(np.arange(20)), reader.locate(np.arange(20))
    scale = found.statistics.variables["t850"]
    expected = field("t850", HOURS[cases.start], POLES, 7)
    np.testing.assert_allclose(batch.fields[:, 1] * scale.std + scale.mean, expected, rtol=1e-5)
    in_year = np.where(cases.source == 0, 366, 360)
    # Of a year with leap days in other calendars, to which noleap belongs.
    np.testing.assert_allclose(batch.time_of_year, HOURS[cases.start] / 24 / in_year, atol=1.5 / 360)


@pytest.fixture(scope="module")
def straight(folder: Path) -> Trained:
    return train(folder / "run.yaml", folder / "straight", STEPS * len(LAYOUTS), 1, f"evaluation.every={STEPS}")


def test_a_run_on_two_grids_goes_on_in_another_layout(folder: Path, straight: Trained) -> None:
    for number, (ranks, *words) in enumerate(LAYOUTS, 1):
        found = train(folder / "run.yaml", folder / "matrix", STEPS * number, ranks, *words)
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, straight.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for scored, expected in zip(found.evaluations, straight.evaluations, strict=True):
        assert scored["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert scored["forecasts"] == expected["forecasts"] > 3
        for score, wanted in zip(scored["scores"], expected["scores"], strict=True):
            assert score["rmse"] == pytest.approx(wanted["rmse"], rel=1e-4)
            assert score["forecasts"] == wanted["forecasts"]
    # Of 12 locations and 8: two of three steps are of the coarse grid.
    assert bind(run_of(folder)).positions_through(6) == 4 * (2 * 12 + 4 * 8)


def test_forecasts_take_the_grid_of_their_data(folder: Path, straight: Trained) -> None:
    loaded = load_forecaster(folder / "straight", torch.device("cpu"))
    with pytest.raises(ConfigError, match="several grids, among them the model's own and coarse; name sources of one"):
        forecast_split(loaded, hours=6, split="test")
    dataset(HOURS, latitudes=POLES, longitudes=EAST).to_netcdf(folder / "whole.nc")
    # The same grid by its name, and found by its points.
    named = f"data.sources=[{{path: {folder / 'whole.nc'}, grid: coarse}}]"
    plain = f'data.sources=["{folder / "whole.nc"}"]'
    scores = []
    for words in (named, plain):
        loaded = load_forecaster(folder / "straight", torch.device("cpu"), [words])
        found = forecast_split(loaded, hours=6, split="test", starts=3)
        assert found.grid.shape == (3, 7)
        scores.append([row.rmse for row in found.rows])
    assert scores[0] == scores[1] and np.isfinite(scores[0]).all()


def test_a_grid_that_was_not_trained_on_is_named_and_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, latitudes = run_of(folder), np.array([-80.0, -48.0, -16.0, 16.0, 48.0, 80.0])
    dataset(HOURS, latitudes=latitudes, longitudes=np.arange(12) * 30.0).to_netcdf(folder / "finer.nc")
    alone = f'data.sources=["{folder / "finer.nc"}"]'
    grid = FieldSet(run_of(folder, alone).data).grid
    tropics = ("model.first_latitude=-30", "model.last_latitude=30", "model.grids=[]")
    with pytest.raises(
        DataError, match=r"the data's grid: grids, data: its rows span -90 to 90 degrees, those of the model"
    ):
        grid_of_data(run_of(folder, alone, *tropics), grid)
    found = grid_of_data(run, grid)
    assert found is not None and (found.n_lat, found.n_lon) == (6, 12)
    assert "grid of 6 x 12 points, which the model was not trained on" in capsys.readouterr().err


REFUSED = [
    ([{**COARSE, "n_lat": 1}], "grids, coarse: patch_size=2 is more than n_lat=1"),
    ([{**COARSE, "first_latitude": None}], "grids, coarse: give both first_latitude and last_latitude, or neither"),
    (
        [{**COARSE, "first_latitude": -40.0, "last_latitude": 40.0}],
        r"grids, coarse: its rows span -60 to 60 degrees, those",
    ),
    ([{**COARSE, "first_latitude": 90.0, "last_latitude": -90.0}], r"grids, coarse: its rows span 90 to -90 degrees"),
    ([COARSE, COARSE], "grids names coarse more than once"),
]


@pytest.mark.parametrize(("grids", "words"), REFUSED)
def test_grids_that_do_not_go_together_are_refused(grids: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(grids=grids)


def test_data_on_other_grids_than_stated_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lies on grid coarse, which model.grids does not name; it names none"):
        run_of(folder, "model.grids=[]")
    run = run_of(folder)
    grids = FieldSet(run.data).grids
    require_grids(run, grids)
    with pytest.raises(DataError, match=r"model.grids, coarse: n_lat=3 and .*, but the data have 6 x 8 points"):
        require_grids(run, {**grids, "coarse": grids[None]})
    # One source of the grid on other points than the others.
    dataset(HOURS, ("z500", "t850")).to_netcdf(tmp_path / "other.nc")
    sources = [one.model_dump() for one in run.data.sources]
    sources[1]["path"] = str(tmp_path / "other.nc")
    data = type(run.data).model_validate({**run.data.model_dump(), "sources": sources})
    with pytest.raises(
        DataError, match=r"days360.nc: another grid than that of .*other.nc: 3 x 7 points instead of 6 x 8"
    ):
        FieldSet(data)
    dataset(HOURS, latitudes=POLES, longitudes=np.arange(7) * 20.0).to_netcdf(tmp_path / "region.nc")
    sources = [sources[0], {"path": str(tmp_path / "region.nc"), "grid": "coarse"}]
    data = type(run.data).model_validate({**run.data.model_dump(), "sources": sources})
    with pytest.raises(
        DataError, match=r"sources on grid coarse span -10 to 130 degrees of longitude, those on the model's"
    ):
        require_grids(run, FieldSet(data).grids)


def test_a_source_upside_down_is_refused_on_another_grid_too(folder: Path, tmp_path: Path) -> None:
    latitudes = np.arange(-82.5, 90.0, 15.0)
    upright = dataset(HOURS, latitudes=latitudes, longitudes=np.arange(12) * 30.0)
    turned = upright.isel(lat=slice(None, None, -1)).assign_coords(lat=latitudes)
    words = "model.grids=[{name: coarse, n_lat: 12, n_lon: 12}]"
    for name, one in (("upright", upright), ("turned", turned)):
        one.to_netcdf(tmp_path / f"{name}.nc")
    found = [
        run_of(
            folder, words, f"data.sources=['{folder / 'fine.nc'}', {{path: {tmp_path / name}.nc, grid: coarse}}]"
        ).data
        for name in ("upright", "turned")
    ]
    assert list(FieldSet(found[0]).grids) == [None, "coarse"]
    with pytest.raises(DataError, match=r"latitudes of .*turned.nc look reversed"):
        FieldSet(found[1])


def test_splits_are_dates_of_every_calendar(folder: Path) -> None:
    dates = "data.splits={train: {first: 2000-01, last: %s}, validation: {first: 2000-02-05, last: 2000-02-28}}"
    fields = FieldSet(run_of(folder, dates % "2000-01").data)
    # All of January, which is shorter in a calendar of 360 days.
    lengths = [len(one.windows.frames) for r in fields.readers("train", seed=1).values() for one in r.sources]
    assert lengths == [124, 124, 120]
    with pytest.raises(
        ConfigError, match=r"2000-01-31 is not a date of the calendar 360_day: .* of every calendar: 2000-01"
    ):
        FieldSet(run_of(folder, dates % "2000-01-31").data)


def test_layouts_are_judged_on_every_grid(folder: Path) -> None:
    run = run_of(folder, "model.grids=[{name: coarse, n_lat: 6, n_lon: 10}]", "layout.tp=2", "layout.dp_shard=1")
    with pytest.raises(
        ConfigError, match=r"layout.tp=2 does not divide the patches of model.grids, coarse \(15 parts\)"
    ):
        resolve_layout(bind(run), 2)
