"""Faults in real training on two ranks: named within their time, begun again, and the same bits at the end as undisturbed.

Rows of the fault table; `make test-faults` runs them, since each starts interpreters with PyTorch several times. What was
measured is printed as one line a fault, which benchmarks/results/faults holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from fault_injection import fault_words, offer_callback
from phalanx.checkpoint import open_checkpoints, read_tensors
from token_data import write_run_file, write_token_folder

pytestmark = pytest.mark.faults

STEPS, HEARTBEAT_S = 40, 3.0
DETECTED_S, TRAINING_S = 2.0, 15.0
"""Most seconds from a rank's death to its report, and from a fault to the next step."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    offer_callback(folder)
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def start(run_file: Path, run_dir: Path, *words: str, ranks: int = 2) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(run_file.parent), *sys.path])
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(run_file),
        "--run-dir",
        str(run_dir),
        "--nproc",
        str(ranks),
    ]
    chosen = [f"layout.dp_shard={ranks}", f"restart.heartbeat_s={HEARTBEAT_S}", f"training.steps={STEPS}", *words]
    return subprocess.Popen(
        [*command, *chosen],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=1200)
    finally:
        process.kill()
    return process.returncode, errors


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step == STEPS
    return read_tensors(newest.path, "")


@pytest.fixture(scope="module")
def undisturbed(run_file: Path) -> dict[str, torch.Tensor]:
    run_dir = run_file.parent / "undisturbed"
    code, errors = finish(start(run_file, run_dir))
    assert code == 0 and "fault:" not in errors, errors
    return final_weights(run_dir)


def assert_same_bits(run_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    found = final_weights(run_dir)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def measure_times(run_dir: Path, marker: Path) -> tuple[float, float]:
    """Seconds from the fault to its report, and to the start of training again."""
    happened = float(marker.read_text())
    (fault,) = rows(run_dir / "faults.jsonl")
    resumed = [event for event in rows(run_dir / "events.jsonl") if event["kind"] in ("start", "resume")][-1]
    reported = datetime.fromisoformat(fault["time"]).timestamp()
    # Events tell whole seconds.
    return reported - happened, datetime.fromisoformat(resumed["time"]).timestamp() - happened


CASES = [
    ("F01 rank 0 killed", {"kind": "kill", "rank": 0, "step": 8}, "signal"),
    ("F01 rank 1 killed", {"kind": "kill", "rank": 1, "step": 23}, "signal"),
    ("F01 a random rank killed", {"kind": "kill", "rank": -1, "step": 31, "seed": 5}, "signal"),
    ("F02 segmentation fault", {"kind": "segfault", "step": 17}, "signal"),
    ("F02 abort", {"kind": "abort", "step": 17}, "signal"),
    ("F03 suspended", {"kind": "stop", "step": 17}, "stopped"),
    ("F03 endless loop", {"kind": "spin", "step": 17}, "hang"),
    ("F03 Python's lock held", {"kind": "lock", "step": 17}, "hang"),
    ("F04 killed in the first step", {"kind": "kill", "step": 1}, "signal"),
    ("F04 killed in the last step", {"kind": "kill", "step": STEPS}, "signal"),
    *(
        (f"F05 killed in a checkpoint, {seed}", {"kind": "save", "rank": -1, "seed": seed}, "signal")
        for seed in range(6)
    ),
]


@pytest.mark.parametrize(("name", "options", "cause"), CASES, ids=[name for name, *_ in CASES])
def test_a_fault_is_named_and_leaves_no_trace_in_the_result(
    name: str,
    options: dict[str, Any],
    cause: str,
    run_file: Path,
    undisturbed: dict[str, torch.Tensor],
    tmp_path: Path,
    record_property: Any,
) -> None:
    marker, run_dir = tmp_path / "happened", tmp_path / "run"
    code, errors = finish(start(run_file, run_dir, fault_words(marker=marker, **options)))
    assert code == 0, errors
    report = json.loads((run_dir / "fault.json").read_text())
    assert report["cause"] == cause
    if options.get("rank", 1) >= 0:
        assert report["rank"] == options.get("rank", 1)
    if "step" in options:
        assert report["step"] == options["step"]
    named_s, again_s = measure_times(run_dir, marker)
    limit = HEARTBEAT_S + 1.0 if cause in ("hang", "stopped") else DETECTED_S
    found_s = report["silent_s"] if report["silent_s"] is not None else named_s
    print(f"\n| {name} | {cause} | found in {found_s:.1f} s (limit {limit:g}) | training again in {again_s:.0f} s |")
    assert_same_bits(run_dir, undisturbed)
    assert found_s <= limit
    assert again_s <= limit + TRAINING_S


def test_an_exception_names_the_rank_that_raised_it(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [fault_words(kind="raise", step=9, marker=tmp_path / "happened"), "restart.max=0"]
    code, _ = finish(start(run_file, run_dir, *words))
    report = json.loads((run_dir / "fault.json").read_text())
    assert code == 1 and report["rank"] == 1 and "made to fail" in report["detail"]
    print("\n| F02 exception | refused | rank and error named |")


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir / "metrics.jsonl")]


def test_a_place_that_is_lost_is_left_out_and_the_run_goes_on_in_another_layout(run_file: Path, tmp_path: Path) -> None:
    # Batches of 12 are shared out among 4, 3 and 2 ranks. Place 3 is lost at step 7; place 0, and with it the store, at 21.
    common = ["layout.global_batch=12", "layout.microbatch=1", "training.steps=30"]
    code, errors = finish(start(run_file, tmp_path / "undisturbed", *common, ranks=4))
    assert code == 0, errors
    faults = [fault_words(kind="lost", place=3, step=7), fault_words(kind="lost", place=0, step=21)]
    both = f"{faults[0][:-1]}, {faults[1].partition('=[')[2]}"
    words = [*common, both, "restart.layout=replan", "restart.backoff_s=0.0"]
    code, errors = finish(start(run_file, tmp_path / "run", *words, ranks=4))
    assert code == 0, errors
    assert "place 3 of this machine has failed twice in a row and is left out, 3 ranks (dp_shard=3) begin" in errors
    assert "place 0 of this machine has failed twice in a row and is left out, 2 ranks (dp_shard=2) begin" in errors
    assert [fault["rank"] for fault in rows(tmp_path / "run" / "faults.jsonl")] == [3, 3, 0, 0]
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "undisturbed")
    assert found == pytest.approx(expected, abs=1e-5) and len(found) == 30
    worst = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    print(f"\n| F13 4 ranks, then 3, then 2 | two places lost | losses of 30 steps differ by at most {worst:.1e} |")


def test_restarts_in_vain_end_with_93(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, errors = finish(
        start(run_file, run_dir, fault_words(kind="kill", step=9), "restart.max=1", "restart.backoff_s=0.0")
    )
    # The first attempt saved step 5; the two that began from there came no further.
    assert code == 93 and "given up (exit code 93)" in errors
    assert len(rows(run_dir / "faults.jsonl")) == 3
    print("\n| F04 the same fault again and again | given up | exit code 93 after 3 faults |")


def test_500_steps_without_a_fault_raise_no_alarm_and_name_no_straggler(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["training.steps=500", "checkpoint.every=100", "evaluation.every=100"]
    code, errors = finish(start(run_file, run_dir, *words))
    assert code == 0 and "fault:" not in errors and not (run_dir / "fault.json").exists()
    named = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "straggler"]
    looks = [row for row in rows(run_dir / "metrics.jsonl") if row["node_wait_seconds"] is not None]
    print(f"\n| F18 500 even steps | {len(named)} stragglers named in {len(looks)} looks |")
    assert not named and looks


def test_a_rank_60_ms_slower_is_named(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = fault_words(kind="slow", rank=1, step=40, seconds=0.06)
    code, errors = finish(start(run_file, run_dir, slow, "training.steps=160", "checkpoint.every=null"))
    assert code == 0, errors
    named = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "straggler"]
    assert named and {event["rank"] for event in named} == {1}
    print(f"\n| F18 60 ms a step slower from step 40 | rank 1 named at step {named[0]['step']} |")
    assert "rank 1 on" in errors and "is a straggler" in errors
    assert named[0]["step"] >= 40
    assert any(row["straggler"] == 1 for row in rows(run_dir / "metrics.jsonl"))


def test_a_suspended_rank_under_torchrun_is_named(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = os.pathsep.join([str(run_file.parent), *sys.path])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    words = ["layout.dp_shard=2", f"restart.heartbeat_s={HEARTBEAT_S}", f"training.steps={STEPS}"]
    fault = fault_words(kind="stop", step=17, marker=tmp_path / "happened")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "phalanx", "train", str(run_file), "--run-dir", str(run_dir), *words, fault],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((run_dir / "fault.json").read_text())
    assert (report["rank"], report["cause"]) == (1, "stopped")
    assert report["silent_s"] <= HEARTBEAT_S + 1.0
    print(f"\n| F03 suspended, under torchrun | stopped | found in {report['silent_s']:.1f} s, restarted by torchrun |")


def test_a_suspended_rank_does_not_outlive_a_request_to_stop(run_file: Path, tmp_path: Path) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "happened"
    words = [fault_words(kind="stop", step=17, marker=marker), "restart.heartbeat_s=600", "training.steps=100000"]
    process = start(run_file, run_dir, *words)
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    took = time.monotonic() - asked
    assert code == 128 + signal.SIGTERM, errors
    print(f"\n| F11 SIGTERM to a run with a suspended rank | ended in {took:.1f} s, saved |")
    assert took < 15.0


def test_memory_that_runs_out_halves_the_micro_batch_in_place(
    run_file: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    run_dir = run_file.parent / "full"
    # In every step, the first one too: only less memory helps.
    code, errors = finish(start(run_file, run_dir, fault_words(kind="full", rank=1, step=1, samples=2)))
    assert code == 0, errors
    assert (
        "memory ran out" in errors
        and "layout.microbatch" in errors
        and "restart 1" in errors
        and "restart 2" not in errors
    )
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["microbatch"] for event in events if event["kind"] == "less_memory"] == [2]
    found = final_weights(run_dir)
    worst = max(float((found[name].double() - value.double()).abs().max()) for name, value in undisturbed.items())
    print(f"out of memory in step 1: restarted once with micro-batches of 2; weights differ by at most {worst:.1e}")
    assert worst < 1e-4


def test_chaos_finds_names_and_survives_what_it_injects(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "chaos"
    words = ["layout.dp_shard=2", f"restart.heartbeat_s={HEARTBEAT_S}", f"training.steps={STEPS}"]
    options = ["--nproc", "2", "--count", "3", "--faults-per-run", "3", "--seed", "3", "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "chaos", str(run_file), *options, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((out / "chaos.json").read_text()) and found["failures"] == []
    assert len(found["outcomes"]) == 3 and all(row["survived"] and row["same_bits"] for row in found["outcomes"])
    kinds = [row["fault"]["kind"] for row in found["outcomes"]]
    print(f"\n| F26 chaos: {', '.join(kinds)} | found, named, same bits |")


def test_chaos_sees_a_flipped_bit_of_a_replica(run_file: Path, tmp_path: Path) -> None:
    words = ["--faults", "bitflip", "--nproc", "2", "--count", "2", "--faults-per-run", "2", "--json"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "phalanx",
            "chaos",
            str(run_file),
            *words,
            "--out",
            str(tmp_path / "chaos"),
            "dp_replicate=2",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["outcomes"]
    assert len(rows) == 2 and all(row["found_as"] == "replicas differ" and row["survived"] for row in rows)
    print("\n| F17 two bits flipped in a replica, by chaos | replicas differ | same bits |")
