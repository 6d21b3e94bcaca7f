"""Models that read several states: samples, tokens, roll-outs whose window moves, and weights of a model of one state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field_files import dataset, field, field_data, write_year
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, DataError
from phalanx.families.registry import bind
from phalanx.families.weather.config import FieldSource, WeatherRun
from phalanx.families.weather.data.field_samples import FieldReader
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.evaluation.forecast_from import forecast_from
from phalanx.families.weather.evaluation.forecast_split import (
    LoadedForecaster,
    forecast_split,
    plan_steps,
    roll_out,
)
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.resizing import keep_first
from small_forecasters import EVERYTHING, random_fields, random_forecaster, small
from weather_runs import write_weather_run

HOURS = np.arange(240) * 6
FORCED = {
    "model.history": 2,
    "model.variables": ["z500", "t850", "u10", "orography", "insolation"],
    "model.dropout": 0.0,
    "model.drop_path": 0.0,
    "data.history": 2,
    "data.forcings": ["insolation"],
}


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history") / "year"
    write_year(folder)
    return folder


def reader(*sources: Any, **changes: Any) -> FieldReader:
    return FieldSet(field_data(*sources, **changes)).reader("train", seed=1)


def test_a_sample_has_the_states_before_its_own(year: Path) -> None:
    found = reader(year, history=3, history_hours=12)
    cases, batch = found.locate(np.arange(30)), found.read(np.arange(30))
    states = batch.fields.unflatten(1, (3, 4)).numpy()
    for age in range(3):
        for place, name in enumerate(("z500", "t850", "u10")):
            scale = found.statistics.variables[name]
            expected = (field(name, HOURS[cases.start - 2 * age]) - scale.mean) / scale.std
            np.testing.assert_allclose(states[:, age, place], expected, atol=2e-5)
        np.testing.assert_array_equal(states[:, age, 3], states[:, 0, 3])
    # Older states lie in the split too: the first frame that has both is the fifth.
    assert found.sources[0].windows.starts.min() == 4
    assert found.sources[0].windows.without_input == 0
    plain = reader(year)
    assert plain.fingerprint != found.fingerprint != reader(year, history=3, history_hours=6).fingerprint
    # By default states lie as far apart as the shortest lead time.
    assert reader(year, history=2).data.state_hours == 6


def test_holes_and_damaged_frames_cost_the_samples_that_would_read_them(tmp_path: Path) -> None:
    damaged = dataset(np.delete(np.arange(241) * 6, 50))
    damaged["t850"][99] = np.nan
    damaged.to_netcdf(tmp_path / "holes.nc")
    found = reader(tmp_path / "holes.nc", history=2, gaps="skip")
    windows = found.sources[0].windows
    # Frame 50 is of hour 51 * 6, whose older state is the hole.
    assert sorted(set(range(160)) - set(windows.starts.tolist())) == [0, 50, 99, 100, 159]
    assert windows.without_input == 2
    with pytest.raises(DataError, match=r"data\.history=2 states 7 h apart fit no frames of data\.splits\.train"):
        reader(tmp_path / "holes.nc", history=2, history_hours=7, gaps="skip")


def test_a_token_is_the_sum_of_what_its_states_give() -> None:
    """Of a variable alone its token is what the aggregation sees: linear in the states, each with weights of its own."""
    config = small(variables=["temperature_850"], history=3)
    model = random_forecaster(config)
    one = random_forecaster(small(variables=["temperature_850"]))
    fields = random_fields(config, 2, 3)
    rows = torch.arange(config.n_tokens)
    whole = model.embedding.tokens(fields, rows, model.config)
    weight = model.embedding.patches.weight.detach()
    parts = []
    for age in range(3):
        one.load_state_dict({**model.state_dict(), "embedding.patches.weight": weight[..., 4 * age : 4 * age + 4]})
        parts.append(one.embedding.tokens(fields[:, age : age + 1], rows, one.config))
    still = one.embedding.tokens(torch.zeros_like(fields[:, :1]), rows, one.config)
    # The offset is in every part.
    torch.testing.assert_close(whole, sum(parts) - 2 * still)
    assert not torch.allclose(parts[0], parts[1])


@pytest.mark.parametrize("absent", ["mean", "masked"])
def test_weights_of_one_state_give_the_same_forecast_until_others_are_learnt(absent: str) -> None:
    one = {**EVERYTHING.model_dump(), "absent_inputs": absent}
    before = random_forecaster(small(**one))
    after = random_forecaster(small(**{**one, "history": 2}), seed=1)
    weights = dict(before.state_dict())
    name = "embedding.patches.weight"
    grow, cut = (keep_first(*states, "states", dim=2) for states in ((1, 2), (2, 1)))
    assert grow.in_words == "states: the first 1 of 1 kept, 2 in all"
    stored = weights[name]
    weights[name] = grow.apply(stored, after.state_dict()[name])
    after.load_state_dict(weights)
    fields = random_fields(EVERYTHING, 2, 8)
    # A variable without values now that had some before is there.
    hours = torch.tensor([6.0, 72.0], dtype=torch.float64)
    torch.testing.assert_close(after.forecast(fields, hours), before.forecast(fields[:, :4], hours))
    torch.testing.assert_close(cut.apply(weights[name], stored), stored)


def test_steps_follow_where_the_window_can_move() -> None:
    assert plan_steps([6, 24], 36, 6) == {6: (6,), 12: (6, 6), 18: (6, 6, 6), 24: (24,), 30: (6, 24), 36: (6, 6, 24)}
    assert plan_steps([12, 24], 48, 6) == {12: (12,), 24: (24,)}


def loaded_run(folder: Path, changes: dict[str, Any] | None = None) -> LoadedForecaster:
    run = load_run(write_weather_run(folder, {**FORCED, **(changes or {})}))
    assert isinstance(run, WeatherRun)
    FieldSet(run.data).statistics.write(folder / "statistics.json")
    run = run.model_copy(update={"data": run.data.model_copy(update={"statistics": str(folder / "statistics.json")})})
    return LoadedForecaster(random_forecaster(run.model, dtype=torch.float32), run, folder, 0)


def test_the_window_and_the_forcings_move_on_with_a_forecast(tmp_path: Path) -> None:
    """By hand: 6 + 6 + 24 hours, of which the fields of 12 and 6 hours on are the last step's states."""
    loaded = loaded_run(tmp_path)
    model, found = loaded.model, FieldSet(loaded.run.data).reader("test", seed=0)
    starts = found.sources[0].windows.starts[:2]
    states = found.read_states(0, starts).unflatten(1, (2, 5))
    still = states[:, 0, 3:4]

    def step(newest: torch.Tensor, older: torch.Tensor, begun: int, hours: int) -> torch.Tensor:
        forced = found.read_forcings(0, starts, begun + hours)
        fields = torch.cat((newest, still, forced[:, 0], older, still, forced[:, 1]), dim=1)
        return model.forecast(fields, torch.full((2,), float(hours)))

    first = step(states[:, 0, :3], states[:, 1, :3], 0, 6)
    second = step(first, states[:, 0, :3], 6, 6)
    third = step(second, first, 12, 24)
    rolled = list(roll_out(model, found, 0, starts, {24: (24,), 36: (6, 6, 24)}))
    torch.testing.assert_close(rolled[1], found.denormalise(third), rtol=1e-4, atol=1e-3)
    # Insolation of another time would show.
    assert not torch.allclose(step(second, first, 18, 24), third, atol=1e-3)
    scored = forecast_split(loaded, hours=36, split="test", starts=2)
    assert scored.steps[36] == (6, 6, 24)
    # A step that no other may follow.
    with pytest.raises(ConfigError, match=r"no roll-out: steps of data\.history_hours=6 alone lead from states"):
        forecast_split(loaded, hours=48, split="test", step_hours=24)


def test_training_rolls_the_window_out_as_a_forecast_does(tmp_path: Path) -> None:
    loaded = loaded_run(tmp_path, {"data.rollout_hours": 6, "layout.dp_shard": 1})
    run, cpu = loaded.run, torch.device("cpu")
    (stage,) = apply_layout(
        bind(run, LayoutModel), resolve_layout(bind(run), 1), ONE_RANK, cpu, AttentionChoice("sdpa")
    ).stages
    stage.part.load_state_dict(loaded.model.state_dict())
    found = FieldSet(run.data).reader("test", seed=0)
    cases = found.cases().take(slice(0, 12))
    batch = found.read_cases(cases)
    x, inputs = batch.inputs()
    del inputs["targets_BVHW"]
    assert set(batch.lead_hours.tolist()) == {6.0, 12.0, 24.0}
    with torch.no_grad():
        trained = found.denormalise(stage(x, batch.sample_indices, **inputs))
    starts = np.unique(cases.start)
    rolled = dict(
        zip((6, 12, 24), roll_out(stage.part, found, 0, starts, {n: (6,) * (n // 6) for n in (6, 12, 24)}), strict=True)
    )
    for sample, hours in enumerate(batch.lead_hours.tolist()):
        place = int(np.searchsorted(starts, cases.start[sample]))
        torch.testing.assert_close(trained[sample], rolled[int(hours)][place], rtol=1e-4, atol=1e-2)


def test_a_forecast_from_a_time_needs_the_states_before_it(tmp_path: Path) -> None:
    loaded = loaded_run(tmp_path)
    dataset(np.array([239, 240]) * 6).to_netcdf(tmp_path / "today.nc")
    source = [FieldSource(path=str(tmp_path / "today.nc"))]
    data = loaded.run.data.model_copy(update={"sources": source})
    today = LoadedForecaster(loaded.model, loaded.run.model_copy(update={"data": data}), loaded.where, 0)
    assert list(forecast_from(today, ["2000-03-01 00:00"], tmp_path / "a.zarr", hours=12)) == [6, 12]
    with pytest.raises(
        ConfigError,
        match=r"--from '2000-02-29 18:00': .*today\.nc has no frame 6 h before it, and the model reads data\.history=2",
    ):
        forecast_from(today, ["2000-02-29 18:00"], tmp_path / "b.zarr", hours=12)
