"""A weather run through several layouts: its losses and held-out scores are those of one rank, to the bit in one layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config.load import load_run
from phalanx.errors import DataError
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.inputs import require_grid
from phalanx_processes import Trained, train
from weather_runs import write_weather_run

LAYOUTS = [
    (4, "layout.tp=2", "layout.dp_shard=2"),
    (2, "layout.dp_shard=2"),
    (2, "layout.pp=2", "layout.dp_shard=1"),
]
STEPS = 2
"""In each layout."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weather_run(tmp_path_factory.mktemp("weather"))


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Trained:
    return train_straight(run_file)


def train_straight(run_file: Path) -> Trained:
    """Train on one rank, with an evaluation where a layout ends."""
    return train(run_file, run_file.parent / "straight", STEPS * len(LAYOUTS), 1, f"evaluation.every={STEPS}")


def check_layouts(run_file: Path, straight: Trained, *, tolerance: float, ensemble: bool) -> None:
    """Train in one layout after the other and hold losses and scores against those of one rank."""
    run_dir = run_file.parent / "matrix"
    for number, (ranks, *words) in enumerate(LAYOUTS, 1):
        found = train(run_file, run_dir, STEPS * number, ranks, *words)
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, straight.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert len(found.evaluations) == len(LAYOUTS)
    for scored, expected in zip(found.evaluations, straight.evaluations, strict=True):
        assert scored["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert scored["forecasts"] == expected["forecasts"] == 10
        for score, wanted in zip(scored["scores"], expected["scores"], strict=True):
            assert score.pop("variable") == wanted["variable"]
            # SEEPS is of precipitation alone.
            for name in ("seeps", "persistence_seeps"):
                assert score.pop(name) is wanted[name] is None
            members, expected_members = score.pop("ensemble"), wanted["ensemble"]
            assert (members is not None) == (expected_members is not None) == ensemble
            if ensemble:
                assert members.pop("variable") == expected_members["variable"] and members["spread"] > 0
                assert members.pop("ranks") == pytest.approx(expected_members["ranks"], abs=1e-3)
                expected_members = {name: expected_members[name] for name in members}
                assert members == pytest.approx(expected_members, rel=tolerance, abs=1e-4)
            assert score == pytest.approx({name: wanted[name] for name in score}, rel=tolerance, abs=1e-4)


def test_a_checkpoint_is_bound_to_no_layout(run_file: Path, straight: Trained) -> None:
    check_layouts(run_file, straight, tolerance=1e-4, ensemble=False)


def test_nor_is_that_of_an_ensemble(tmp_path: Path) -> None:
    # Members far enough apart that rounding changes no order of theirs, by which gradients go.
    fields = {"model.loss": "crps", "model.members": 2, "model.noise_channels": 3, "model.init_std": 0.2}
    run_file = write_weather_run(tmp_path, fields)
    check_layouts(run_file, train_straight(run_file), tolerance=1e-3, ensemble=True)


def test_the_same_layout_goes_on_to_the_same_bits(run_file: Path, straight: Trained) -> None:
    run_dir = run_file.parent / "parts"
    train(run_file, run_dir, 3, 1)
    assert train(run_file, run_dir, STEPS * len(LAYOUTS), 1).steps == straight.steps


def test_evaluation_scores_every_variable_and_lead_time(straight: Trained) -> None:
    scores = straight.evaluations[-1]["scores"]
    assert {(s["variable"], s["lead_hours"]) for s in scores} == {
        (name, lead) for name in ("z500", "t850", "u10") for lead in (6, 12, 24)
    }
    for score in scores:
        # Of four starts, the last has no truth beyond 6 hours.
        assert score["forecasts"] == (4 if score["lead_hours"] == 6 else 3)
        # In metres squared per second squared, not in standard deviations.
        assert score["variable"] != "z500" or 50 < score["persistence_rmse"] < 5000
        assert score["persistence_rmse"] > 0 and score["climatology_rmse"] > 0 and -1 <= score["acc"] <= 1
        best = min(score["persistence_rmse"], score["climatology_rmse"])
        assert score["skill"] == pytest.approx(1 - score["rmse"] / best)


def test_data_on_another_grid_are_refused(run_file: Path) -> None:
    run = load_run(run_file, ["model.n_lat=8"])
    assert isinstance(run, WeatherRun)
    grid = FieldSet(run.data).grid
    with pytest.raises(DataError, match=r"but the data have 6 x 8 points; set model.n_lat=6 model.n_lon=8"):
        require_grid(run, grid)
    turned = load_run(run_file, ["model.first_latitude=75", "model.last_latitude=-75"])
    assert isinstance(turned, WeatherRun)
    with pytest.raises(DataError, match=r"set model.first_latitude=-75 model.last_latitude=75"):
        require_grid(turned, grid)
    require_grid(load_run(run_file), grid)  # type: ignore[arg-type]
