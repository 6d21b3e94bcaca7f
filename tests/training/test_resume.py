"""A run that was killed and one that was not end with the same bits."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx_processes
from phalanx.checkpoint import open_checkpoints, read_tensors
from phalanx_processes import Command
from token_data import write_run_file, write_token_folder

STEPS = 40


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Path:
    """The run directory of a run that nothing disturbed."""
    run_dir = run_file.parent / "straight"
    errors = finish(run_file, run_dir)
    assert len(rows(run_dir)) == STEPS, errors
    return run_dir


def start(run_file: Path, run_dir: Path, *overrides: str) -> Command:
    return phalanx_processes.start(["train", str(run_file), "--run-dir", str(run_dir), *overrides])


def finish(run_file: Path, run_dir: Path, *overrides: str) -> str:
    return phalanx_processes.finish(["train", str(run_file), "--run-dir", str(run_dir), *overrides])


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def kill_after(process: Command, run_dir: Path, step: int, signal_number: int) -> tuple[int, str]:
    """Send a signal as soon as `step` has been logged; returns the exit code and what the process wrote on stderr."""
    deadline = time.monotonic() + 120
    while len(rows(run_dir)) < step:
        assert process.poll() is None, process.finish()
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.002)
    process.send_signal(signal_number)
    return process.finish()


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None
    assert newest.step == STEPS
    return read_tensors(newest.path, "")


def assert_same_run(run_dir: Path, straight: Path) -> None:
    assert [row["step"] for row in rows(run_dir)] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in rows(run_dir)] == [row[name] for row in rows(straight)], name
    ours, expected = final_weights(run_dir), final_weights(straight)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_killed_at_a_random_step_and_resumed_it_ends_with_the_same_bits(
    asynchronous: str, run_file: Path, straight: Path
) -> None:
    run_dir = run_file.parent / f"killed-{asynchronous}"
    step = random.Random(f"kill {asynchronous}").randrange(8, STEPS - 3)
    process = start(run_file, run_dir, f"checkpoint.asynchronous={asynchronous}")
    kill_after(process, run_dir, step, signal.SIGKILL)
    assert len(rows(run_dir)) < STEPS
    finish(run_file, run_dir, f"checkpoint.asynchronous={asynchronous}")
    assert_same_run(run_dir, straight)


def test_ctrl_c_leaves_a_checkpoint_of_the_last_step_and_says_how_to_go_on(run_file: Path, straight: Path) -> None:
    run_dir = run_file.parent / "stopped"
    process = start(run_file, run_dir, "checkpoint.every=null")
    code, errors = kill_after(process, run_dir, 12, signal.SIGINT)
    assert code == 130, errors
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None
    assert newest.step == len(rows(run_dir)) >= 12
    assert f"stopped by signal 2 after step {newest.step}, checkpoint written; the same command goes on" in errors
    assert "error:" not in errors
    # A run directory stands for its own run file.
    finish(run_dir, run_dir, "checkpoint.every=null")
    assert_same_run(run_dir, straight)


def test_a_schedulers_warning_leaves_a_checkpoint(run_file: Path) -> None:
    run_dir = run_file.parent / "warned"
    process = start(run_file, run_dir, "checkpoint.every=null")
    code, errors = kill_after(process, run_dir, 3, signal.SIGUSR1)
    assert code == 128 + signal.SIGUSR1, errors
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step == len(rows(run_dir)) < STEPS


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run_file: Path, straight: Path) -> None:
    run_dir = run_file.parent / "damaged"
    finish(run_file, run_dir, "training.steps=40", "checkpoint.keep_last=3")
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    victim = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-3] ^= 0x10
    victim.write_bytes(content)
    errors = finish(run_file, run_dir)
    assert victim.name in errors
    assert "checksum" in errors
    assert_same_run(run_dir, straight)


def refused(run_file: Path, run_dir: Path, *overrides: str) -> str:
    code, errors = start(run_file, run_dir, *overrides).finish()
    assert code in (1, 2), errors
    assert "Traceback" not in errors
    return errors


def test_a_used_run_directory_is_refused_under_resume_never(run_file: Path, straight: Path) -> None:
    errors = refused(run_file, straight, "training.resume=never")
    assert f"training.resume=never, but {straight}/checkpoints holds checkpoints; choose another --run-dir" in errors


def test_resume_must_without_a_checkpoint_is_refused_and_leaves_nothing(run_file: Path, tmp_path: Path) -> None:
    for word in ("training.resume=must", f"training.resume={tmp_path}"):
        assert "holds no whole checkpoint; use training.resume=auto" in refused(run_file, tmp_path / "new", word)
        assert not (tmp_path / "new").exists()
    errors = refused(run_file, tmp_path / "new", f"training.init_from={tmp_path}")
    assert "no whole checkpoint there" in errors and not (tmp_path / "new").exists()


def test_other_samples_than_before_are_refused(run_file: Path, straight: Path) -> None:
    for change, words in {
        "training.seed=7": "training.seed was 0, now 7",
        "layout.global_batch=16": "layout.global_batch was 8, now 16",
        "data.sequence_length=16": "data.sequence_length was 32, now 16",
    }.items():
        errors = refused(run_file, straight, change, "data.prefetch=0", "optimizer.lr=1e-3", "training.steps=50")
        assert f"was trained on other samples: {words}; put that back, or start a new run with" in errors, change


def test_another_model_is_refused_with_the_tensor_that_differs(run_file: Path, straight: Path) -> None:
    errors = refused(run_file, straight, "model.d_ff=128", "training.steps=50")
    assert "blocks.0.mlp" in errors


def test_going_on_from_another_runs_checkpoint_and_from_weights_alone(run_file: Path, straight: Path) -> None:
    onward = run_file.parent / "onward"
    finish(run_file, onward, f"training.resume={straight}", "training.steps=42")
    assert [row["step"] for row in rows(onward)] == [41, 42]
    fresh = run_file.parent / "fresh"
    finish(run_file, fresh, f"training.init_from={straight}", "training.steps=6", "training.seed=5")
    assert rows(fresh)[0]["step"] == 1
    assert rows(fresh)[0]["loss"] < rows(straight)[0]["loss"] - 1.0


@pytest.mark.parametrize("field", ["init_from", "resume"])
def test_a_hugging_face_folder_is_refused_with_the_command_that_imports_it(run_file: Path, field: str) -> None:
    folder = run_file.parent / "theirs"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    errors = refused(run_file, run_file.parent / "imported", f"training.{field}={folder}")
    assert f"`phalanx convert {folder} imported` makes a checkpoint of it" in " ".join(errors.split())


def test_when_every_checkpoint_is_damaged_nothing_starts_anew(run_file: Path) -> None:
    run_dir = run_file.parent / "all-damaged"
    finish(run_file, run_dir, "training.steps=10", "checkpoint.every=5")
    for victim in (run_dir / "checkpoints").glob("step-*/*.safetensors"):
        victim.write_bytes(victim.read_bytes()[:-8])
    errors = refused(run_file, run_dir)
    assert "none of the 2 checkpoints in" in errors
    assert len(rows(run_dir)) == 10


def test_a_finished_run_says_so(run_file: Path, straight: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    assert "already trained to step 40; raise training.steps to go on" in finish(run_file, straight)
    assert (straight / "metrics.jsonl").read_bytes() == before
