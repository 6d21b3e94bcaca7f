"""What must fit together in the run file of a weather model, and what the messages say where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from weather_runs import write_weather_run

READ = "data.inputs, data.static and data.forcings"
RENAMED = ["z500", "temperature_850", "u10", "orography"]


def test_a_sound_run_is_read(tmp_path: Path) -> None:
    assert load_run(write_weather_run(tmp_path)).model.family == "weather"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.variables": RENAMED, "model.outputs": ["z500", "temperature_850", "u10"]},
            f"{READ} do not name the 4 variables of model.inputs in their order: number 2 is t850 in "
            "the data and temperature_850 in the model",
        ),
        (
            {"data.static": []},
            f"{READ} do not name the 4 variables of model.inputs in their order: number 4 is nothing "
            "more in the data and orography in the model",
        ),
        (
            {"data.outputs": ["t850", "z500", "u10"]},
            "data.outputs do not name the 3 variables of model.outputs in their order: number 1 is t850 in the data and "
            "z500 in the model",
        ),
        ({"data.rollout_hours": 9}, "data.rollout_hours=9 does not divide the lead time 6"),
        (
            {"data.rollout_hours": 6, "layout.pp": 2},
            "starts steps from forecasts, which layout.pp=2 has on other ranks",
        ),
        (
            {"data.rollout_hours": 6, "data.outputs": ["z500"], "model.outputs": ["z500"]},
            "data.rollout_hours=6 needs all inputs predicted, but t850 is not among data.outputs",
        ),
        (
            {"data.forcings": ["insolation"]},
            f"{READ} do not name the 4 variables of model.inputs in their order: number 5 is "
            "insolation in the data and nothing more in the model",
        ),
        (
            {"data.outputs": ["z500", "insolation"], "data.forcings": ["insolation"]},
            "forcings names insolation, which is among inputs or outputs; it is computed, so leave it out of these",
        ),
        (
            {"data.static": ["insolation"], "data.forcings": ["insolation"]},
            "inputs names insolation twice",
        ),
        (
            {"data.history": 2},
            "data.history=2 states are given to a model that reads model.history=1",
        ),
        ({"data.history_hours": 6}, "history_hours=6 has no effect with history=1; set it to null"),
        (
            {"data.history": 2, "model.history": 2, "data.rollout_hours": 6, "data.history_hours": 12},
            "history_hours=12 differs from rollout_hours=6, after which a roll-out reads its own forecast",
        ),
        ({"data.rollout_steps": 3}, "rollout_steps has no effect without rollout_hours; give the hours of one step"),
        (
            {"data.rollout_hours": 6, "data.rollout_steps": {"first": 3, "last": 2, "every": 10}},
            "last=2 is less than first=3; roll-outs grow, so give first <= last",
        ),
        ({"training.attention": "flex"}, "training.attention=flex is for causal attention"),
        (
            {"layout.global_batch": "4096 tokens"},
            "layout.global_batch=4096 tokens: only text has tokens; a weather batch is counted in samples",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(write_weather_run(tmp_path, changes))
    assert message in str(caught.value)


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    file = write_weather_run(tmp_path)
    path = tmp_path / "prepared"
    words = [f"data.sources=[{{path: {path}}}]", "data.sources.0.time_units=2020", "data.sources.0.weight=2"]
    (source,) = load_run(file, words).data.sources
    assert (source.time_units, source.weight) == ("2020", 2.0)
