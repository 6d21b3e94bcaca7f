"""Every option of the weather model on the device, compiled and not, beside float64 on the CPU; whole runs there."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest

from device_runs import CPU, accelerator, distance
from field_files import write_climax
from layout_runs import Fields
from phalanx.cli.main import run_command_line as call
from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.record_training import Record, record_training
from weather_runs import SECTIONS, write_run

pytestmark = pytest.mark.gpu

SMALL: Fields = {
    "n_layers": 2,
    "d_model": 64,
    "d_ff": 128,
    "n_heads": 4,
    "n_lat": 8,
    "n_lon": 16,
    "variables": ["z500", "t850", "u10", "orography"],
    "outputs": None,
    "qk_norm": False,
    "prediction": "state",
    "dropout": 0.0,
    "drop_path": 0.0,
}
"""The published form, on 4 by 8 patches."""
CHANGE: Fields = {"outputs": ["z500", "t850", "u10"], "prediction": "change"}
OPTIONS: dict[str, Fields] = {
    "published": {},
    "default width of the MLP": {"d_ff": None},
    "head of 10": {"d_model": 40},
    "patches of 4": {"patch_size": 4},
    "regional grid": {"first_latitude": 20.0, "last_latitude": 60.0},
    "some inputs and outputs": {"inputs": ["t850", "z500", "orography"], "outputs": ["z500"]},
    "several queries": {"aggregation_queries": 2},
    "hierarchical aggregation": {"aggregation": "hierarchical", "aggregation_groups": 2, "aggregation_queries": 2},
    "plain head": {"decoder_depth": 0},
    "deeper head": {"decoder_depth": 3},
    "normalised queries and keys": {"qk_norm": True, "norm_eps": 1e-3},
    "fourier positions": {"position_embedding": "fourier"},
    "fourier lead time": {"lead_embedding": "fourier"},
    "fourier levels": {"level_embedding": "fourier"},
    "change": CHANGE,
    "scaled change": {**CHANGE, "change_scales": [0.3, 0.5, 2.0]},
    "weights by area": {"latitude_weights": "area"},
    "weights of the loss": {"loss_weights": [1.0, 2.5, 0.5, 4.0]},
    "larger initial weights": {"init_std": 0.05},
    "absent inputs": {"absent_inputs": "masked"},
    "three states": {"history": 3},
    "two grids": {"grids": [{"name": "wide", "n_lat": 4, "n_lon": 32}]},
    "an ensemble": {"loss": "crps", "members": 3, "noise_channels": 8, "crps_alpha": 0.9, "init_std": 0.2},
    "dropout": {"dropout": 0.3},
    "skipped branches": {"drop_path": 0.5},
    "dropout and skipped branches": {"dropout": 0.2, "drop_path": 0.3, "qk_norm": True},
}
DATA: dict[str, Fields] = {
    "three states": {"history": 3, "history_hours": 6},
    "two grids": {"sources": ["nowhere", {"path": "elsewhere", "grid": "wide"}]},
}
"""What options ask of the data."""
NOISE = {"fp32": 2e-5, "bf16": 5e-3}
"""Relative error that any order of sums may leave."""


def weather_run(option: str, precision: str, *, compiled: bool, rollout: bool = False) -> WeatherRun:
    """Return a forecaster with the fields of `option`, 8 samples a step in micro-batches of 4."""
    data = {**SECTIONS["data"], "sources": ["nowhere"]}
    sections = {
        "model": {**SECTIONS["model"], **SMALL, **OPTIONS[option]},
        "data": data | DATA.get(option, {}) | ({"rollout_hours": 6} if rollout else {}),
        "layout": {"global_batch": 8, "microbatch": 4, "precision": precision},
        "optimizer": {"lr": 0.01, "schedule": "constant", "eps": 1e-3},
        "training": {"steps": 1, "compile": compiled},
    }
    return WeatherRun.model_validate_json(json.dumps(sections))


def record_steps(run: WeatherRun, on_device: bool) -> Record:
    """Return losses, gradients and updated parameters of two steps."""
    device = accelerator() if on_device else CPU
    return record_training(
        bind(run, VerifiableModel), resolve_layout(bind(run), 1), ONE_RANK, device, steps=2, activations=False
    )


@cache
def reference(option: str) -> Record:
    """The steps in float64 on the CPU."""
    return record_steps(weather_run(option, "fp64", compiled=False), False)


def test_no_option_of_the_model_is_left_out() -> None:
    tried = set().union(*OPTIONS.values())
    assert tried | {"preset", "family", "n_layers", "n_heads", "n_lat", "n_lon", "variables"} == set(
        WeatherRun.model_fields["model"].annotation.model_fields  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_option_computes_what_the_cpu_computes(option: str, precision: str, compiled: bool) -> None:
    """Errors against float64 are those of the format: at most three times what the CPU's own arithmetic leaves in it."""
    found = distance(record_steps(weather_run(option, precision, compiled=compiled), True), reference(option))
    plain = distance(record_steps(weather_run(option, precision, compiled=False), False), reference(option))
    assert found.loss <= 3 * plain.loss + NOISE[precision]
    for name, error in found.gradients.items():
        assert error <= 3 * plain.gradients[name] + NOISE[precision], name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_roll_outs_are_those_of_the_cpu(compiled: bool) -> None:
    records = [
        record_steps(weather_run("change", "fp32", compiled=compiled and on_device, rollout=True), on_device)
        for on_device in (True, False)
    ]
    apart = distance(*records)
    assert apart.loss <= 1e-4 and apart.worst <= 1e-3


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the smallest model on ClimaX shards, which are read without netCDF or zarr."""
    folder = tmp_path_factory.mktemp("weather")
    write_climax(folder / "shards", (2000,), step_hours=6, frames=1460)
    return write_run(
        folder, folder / "shards", {"data.inputs": ["z500", "t850", "u10", "orography"], "data.static": []}
    )


def train(run_file: Path, run_dir: Path, steps: int, *words: str) -> list[float]:
    """Train up to `steps`; returns the losses of all steps."""
    fields = ["model.outputs=null", f"training.steps={steps}", *words]
    assert call(["train", str(run_file), "--run-dir", str(run_dir), *fields]) == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-6), ("fp32", 1e-4), ("bf16", 3e-2)], ids=str)
def test_losses_are_those_of_the_cpu(run_file: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    """Compiled on the device, with the same samples, initial values, dropped elements and skipped branches."""
    found = train(run_file, tmp_path / "device", 3, f"layout.precision={precision}")
    wanted = train(run_file, tmp_path / "cpu", 3, "layout.precision=fp64", "cluster.device=cpu")
    assert found == pytest.approx(wanted, rel=tolerance)


def test_a_run_moves_from_the_cpu_to_the_device_and_back(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = train(run_file, tmp_path / "straight", 9, "cluster.device=cpu")
    moved = tmp_path / "moved"
    train(run_file, moved, 3, "cluster.device=cpu")
    train(run_file, moved, 6, f"cluster.device={accelerator().type}")
    found = train(run_file, moved, 9, "cluster.device=cpu")
    assert found[:3] == straight[:3]
    assert found == pytest.approx(straight, rel=1e-4)
    scores = []
    for device in (accelerator().type, "cpu"):
        capsys.readouterr()
        words = ["--hours", "24", "--starts", "6", "--device", device, "--json"]
        assert call(["forecast", str(moved), *words]) == 0
        rows = json.loads(capsys.readouterr().out)["scores"]
        scores.append([row["rmse"] for row in rows])
    assert scores[0] == pytest.approx(scores[1], rel=1e-3) and all(map(math.isfinite, scores[0]))
