"""What a checkpoint says beside its tensors: checked when a run resumes, wrong fields are damage of that checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from phalanx.checkpoint import Checkpoint, CheckpointDamaged, CheckpointStore, read_state, read_tensors, rng_state
from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.families.materials.cost_fitting import SUMS, BalancerState
from phalanx.training.checkpointing import check_state
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder

State = dict[str, Any]
SOUND: State = {"step": 10, "data_fingerprint": "ab/8", "scaler": None, "rng": rng_state(), "run": "model: {}"}
NEWEST = Checkpoint(10, Path("run/checkpoints/step-00000010"))


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def having(**fields: Any) -> Callable[[State], State]:
    return lambda state: state | fields


def with_rng(**fields: Any) -> Callable[[State], State]:
    return lambda state: state | {"rng": state["rng"] | fields}


BROKEN: dict[str, tuple[Callable[[State], State], str]] = {
    "no step": (without("step"), "step is missing"),
    "a step in quotes": (having(step="10"), "step='10'"),
    "a step before the first": (having(step=-1), "step='-1'"),
    "a step that is no whole number": (having(step=10.0), "step='10.0'"),
    "a step that is true": (having(step=True), "step='True'"),
    "another step than the manifest's": (having(step=9), "step=9 in the checkpoint of step 10"),
    "no generators": (without("rng"), "rng is missing"),
    "generators of a list": (having(rng=[1]), "rng="),
    "a generator too short": (with_rng(torch="00"), "rng.torch="),
    "a generator that is no hex": (with_rng(torch="xyz"), "rng.torch="),
    "a generator beyond its words": (
        with_rng(numpy={"words": "ff" * 2500, "gauss": None}),
        "position 4294967295 among 624 words",
    ),
    "a generator of another version": (with_rng(python={"version": 2, "words": "00" * 2500, "gauss": None}), "rng."),
    "no fingerprint": (without("data_fingerprint"), "data_fingerprint is missing"),
    "an empty fingerprint": (having(data_fingerprint=""), "data_fingerprint=''"),
    "a run that is a list": (having(run=["model"]), "run="),
    "no run": (without("run"), "run is missing"),
    "no scaler": (without("scaler"), "scaler is missing"),
    "a loss scale of nothing": (having(scaler={"scale": 0.0}), "scaler.scale='0.0'"),
}


def test_a_sound_state_passes() -> None:
    assert check_state(NEWEST, SOUND | {"special_tokens": {}}).step == 10
    scaler = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}
    found = check_state(NEWEST, SOUND | {"scaler": scaler}).scaler
    assert found is not None and found.model_dump(by_alias=True) == scaler


@pytest.mark.parametrize("kind", BROKEN)
def test_a_field_that_no_run_writes_is_damage(kind: str) -> None:
    change, message = BROKEN[kind]
    with pytest.raises(CheckpointDamaged) as caught:
        check_state(NEWEST, change(SOUND))
    assert str(caught.value).startswith(f"{NEWEST.path}/state.json: ") and message in str(caught.value)


COSTS = [[1, 1.0, 0.3, 0.0], [60, 2.0, 0.1, 0.5]]


def test_costs_of_structures_are_checked() -> None:
    BalancerState.model_validate({"step": 3})
    BalancerState.model_validate({"cost_sums": [0.5] * SUMS, "costs": COSTS})
    for broken in (
        {"costs": COSTS},
        {"cost_sums": [0.5] * SUMS, "costs": []},
        {"cost_sums": [0.5] * (SUMS - 1), "costs": COSTS},
        {"cost_sums": [float("nan")] * SUMS, "costs": COSTS},
        {"cost_sums": [0.5] * SUMS, "costs": [[1, -1.0, 0.3, 0.0]]},
        {"cost_sums": [0.5] * SUMS, "costs": [[1, 0.0, 0.0, 1.0]]},
        {"cost_sums": [0.5] * SUMS, "costs": [[1, 1.0]]},
    ):
        with pytest.raises(ValidationError):
            BalancerState.model_validate(broken)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run file, and a run of ten steps with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("state")
    run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))
    train(load_run(run_file, ["training.steps=10"]), folder / "run")
    return run_file, folder / "run"


@pytest.mark.parametrize(
    "kind", ["no step", "another step than the manifest's", "no generators", "a run that is a list"]
)
def test_a_run_resumes_from_the_checkpoint_before(trained: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    run_file, before = trained
    run_dir = tmp_path / "run"
    shutil.copytree(before, run_dir)
    newest = run_dir / "checkpoints" / "step-00000010"
    change, message = BROKEN[kind]
    with CheckpointStore(run_dir / "checkpoints", keep_last=5) as store:
        store.save(10, read_tensors(newest), change(read_state(newest)))
    train(load_run(run_file, ["training.steps=11"]), run_dir)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "resume"] == [5]
    assert any(message in event.get("text", "") for event in events)


def test_a_whole_older_checkpoint_under_the_newest_name_is_passed_over(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file, before = trained
    run_dir = tmp_path / "run"
    shutil.copytree(before, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000010")
    shutil.copytree(run_dir / "checkpoints" / "step-00000005", run_dir / "checkpoints" / "step-00000010")
    train(load_run(run_file, ["training.steps=11"]), run_dir)
    assert "step=5; this is the checkpoint of another step" in capsys.readouterr().err


def test_when_no_state_is_sound_nothing_starts_anew(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run_file, before = trained
    run_dir = tmp_path / "run"
    shutil.copytree(before, run_dir)
    path = run_dir / "checkpoints" / "step-00000005"
    # Those of later steps no longer count.
    with CheckpointStore(run_dir / "checkpoints", keep_last=5) as store:
        store.save(5, read_tensors(path), {"step": "many"})
    with pytest.raises(PhalanxError, match=r"none of the 1 checkpoints in .* is usable; newest: .*step='many'"):
        train(load_run(run_file, ["training.steps=11"]), run_dir)
