"""Observed fields of a storm, with corners that never have values and frames that are missing, from file to forecast."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from field_files import REAL
from phalanx.config.load import load_run
from phalanx.families.weather.evaluation.forecast_split import forecast_split, load_forecaster
from phalanx.training.start import train
from weather_runs import SECTIONS

STORM = REAL / "storm_jan1996_6h_64steps_north_america.nc"
NAMES = ["t", "p", "u", "v", "u500", "v500"]


@pytest.mark.skipif(not STORM.exists(), reason=f"{STORM.name} is not beside the repository")
def test_a_regional_model_is_trained_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"n_lat": 33, "n_lon": 36, "patch_size": 3, "first_latitude": 20, "last_latitude": 60}
    sections = {
        **SECTIONS,
        "model": {
            **SECTIONS["model"],
            **model,
            "variables": list(NAMES),
            "outputs": None,
            "dropout": 0.0,
            "drop_path": 0.0,
        },
        "data": {
            "sources": [{"path": str(STORM), "time_dim": "timestep", "time_units": "hours since 1996-01-05 00:00"}],
            "inputs": NAMES,
            "lead_hours": [6, 12],
            "splits": {
                "train": {"first": "1996-01-05", "last": "1996-01-16"},
                "validation": {"first": "1996-01-18", "last": "1996-01-20"},
            },
        },
        "layout": {**SECTIONS["layout"], "microbatch": 8},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    train(load_run(tmp_path / "run.yaml", ["training.steps=20"]), tmp_path / "run")
    said = capsys.readouterr().err
    assert "t, time index 17 (1996-01-09 06:00)" in said and "v500, time index 36" in said
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(map(math.isfinite, losses))
    found = forecast_split(load_forecaster(tmp_path / "run", torch.device("cpu")), hours=18, split="validation")
    assert found.steps[18] == (12, 6)
    assert {row.variable for row in found.rows} == set(NAMES)
    assert all(math.isfinite(row.rmse) and row.rmse < 1.2 * row.persistence_rmse for row in found.rows)
    # Nothing is forecast where nothing is known: the corners are grey in the maps.
    assert all(math.isnan(float(one.truth[0, 0])) or math.isnan(float(one.truth[-1, 0])) for one in found.maps)
