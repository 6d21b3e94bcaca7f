"""`phalanx train --nproc`: ranks of one machine, started, stopped and failing as one command.

Ranks are forked of a process that the command starts, in every test. The command itself is an interpreter of its own where
the way it starts and ends is what is tested; elsewhere it comes from the fork server.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import phalanx_processes
from command_line import Call
from phalanx.cli.main import main
from phalanx.launch.parent import PARENT
from phalanx_processes import Command
from token_data import write_run_file, write_token_folder

COMMAND = [sys.executable, "-m", "phalanx", "train"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nproc")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def start(run_file: Path, run_dir: Path, *words: str) -> Command:
    return phalanx_processes.start(["train", str(run_file), "--run-dir", str(run_dir), *words])


def test_a_run_directory_goes_on_where_it_is(run_file: Path, tmp_path: Path) -> None:
    began, moved = tmp_path / "began", tmp_path / "moved"
    words = [f"training.run_dir={began}", "training.steps=5"]
    phalanx_processes.finish(["train", str(run_file), *words])
    assert losses(began)
    began.rename(moved)
    phalanx_processes.finish(["train", str(moved), "training.steps=6"])
    assert len(losses(moved)) == 6 and not began.exists()
    elsewhere = tmp_path / "elsewhere"
    phalanx_processes.finish(["train", str(moved), "training.steps=5", f"training.run_dir={elsewhere}"])
    assert len(losses(elsewhere)) == 5 and len(losses(moved)) == 6


def start_interpreter(run_file: Path, run_dir: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [*COMMAND, str(run_file), "--run-dir", str(run_dir), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def wait_for_steps(run_dir: Path, steps: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline, "training did not get going"
        time.sleep(0.05)


def children(pid: int | None) -> list[int]:
    """Ranks of a command, in their order; the process that they were forked of comes before them."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()][1:]


def test_ranks_train_as_one_does(run_file: Path) -> None:
    one, two = run_file.parent / "one", run_file.parent / "two"
    assert start(run_file, one, "training.steps=8").finish()[0] == 0
    code, errors = start(run_file, two, "training.steps=8", "--nproc", "2", "layout.tp=2").finish()
    assert code == 0, errors
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_an_illegal_layout_is_refused_once(run_file: Path) -> None:
    code, errors = start(run_file, run_file.parent / "illegal", "--nproc", "3", "layout.tp=3").finish()
    assert code == 2
    assert errors.count("error:") == 1
    assert "layout.tp=3 does not divide model.n_heads" in errors
    assert not (run_file.parent / "illegal").exists()


def test_nodes_without_ranks_on_each_are_refused(run_file: Path, call: Call) -> None:
    words = ("train", str(run_file), "--nodes", "2", "--node-rank", "0", "--rendezvous", "localhost:29500")
    outcome = call(*words)
    assert (outcome.code, outcome.err) == (
        2,
        "error: --nodes, --node-rank and --rendezvous need --nproc, the ranks of each node\n",
    )
    assert "--rendezvous go together" in call(*words[:4], "--nproc", "1").err


def test_the_command_ends_when_a_rank_dies(run_file: Path) -> None:
    run_dir = run_file.parent / "dies"
    words = ("--nproc", "2", "training.steps=100000", "layout.dp_shard=2", "restart.max=0")
    command = start(run_file, run_dir, *words)
    wait_for_steps(run_dir, 3)
    ranks = children(command.ranks[0].pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    code, errors = command.finish()
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was ended by signal 9 (Killed)" in errors
    assert "Traceback" not in errors and "rank 0 lost another rank in step" in errors
    assert "Traceback" in (run_dir / "failure-rank-0.log").read_text()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks), errors


def train_with_little_memory(words: Sequence[str]) -> None:
    """May allocate 200 MiB more than this process has by now."""
    (size,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line]
    limit = int(size) * 1024 + 200 * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    main(words)


def test_memory_that_runs_out_is_said(run_file: Path, tmp_path: Path) -> None:
    # Each matrix of its blocks would take 512 MiB.
    words = ["train", str(run_file), "--run-dir", str(tmp_path / "run"), "model.d_ff=2000000"]
    code, errors = phalanx_processes.start(words, command=train_with_little_memory).finish()
    assert code == 1 and "Traceback" not in errors
    assert "training is out of memory in building the model" in errors and "lower layout.microbatch" in errors


def test_a_parent_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PARENT, "abc")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 2
    assert "environment variable PHALANX_PARENT is 'abc', no number of a process; unset it" in capsys.readouterr().err


def test_ranks_whose_command_was_killed_stop_with_a_checkpoint(run_file: Path) -> None:
    run_dir = run_file.parent / "orphans"
    words = ("--nproc", "2", "training.steps=100000", "layout.dp_shard=2", "checkpoint.every=null")
    process = start_interpreter(run_file, run_dir, *words)
    wait_for_steps(run_dir, 3)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    _, errors = process.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "the ranks go on"
        time.sleep(0.05)
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1, errors


def test_a_stopped_run_goes_on(run_file: Path) -> None:
    run_dir = run_file.parent / "stopped"
    words = ("--nproc", "2", "layout.dp_shard=2", "checkpoint.every=null", "optimizer.schedule=constant")
    process = start_interpreter(run_file, run_dir, "training.steps=100000", *words)
    wait_for_steps(run_dir, 3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    code = process.returncode
    assert code == 128 + signal.SIGTERM, errors
    assert "checkpoint written; the same command goes on from there" in errors
    done = len(losses(run_dir))
    code, errors = start(run_file, run_dir, f"training.steps={done + 3}", *words).finish()
    assert code == 0, errors
    assert len(losses(run_dir)) == done + 3
