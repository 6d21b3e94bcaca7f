"""Time that ends: the run saves and stops before, by what its steps and saves took, or warns that it cannot."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import phalanx_processes
from phalanx.checkpoint import open_checkpoints
from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.launch.wall_time import END_TIME, GRACE, Grace, granted_grace, granted_seconds, set_time_limit
from phalanx.training.safeguards import time_limit
from phalanx.training.safeguards.time_limit import ENDING_S, GraceCheck, TimeLimit
from phalanx.training.stopping import TIME_IS_UP, StopRequest
from token_data import write_run_file, write_token_folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now[0])
    return now


def passes_until_near(clock: list[float], limit: TimeLimit, pass_s: list[float], save_s: float = 0.0) -> int:
    """How many passes of these seconds, the last again and again, the run makes."""
    for number in range(1, 1000):
        clock[0] += pass_s[min(number, len(pass_s)) - 1]
        if limit.is_near(save_s, 1):
            return number
    return 1000


def test_room_is_left_for_a_step_and_two_saves(clock: list[float]) -> None:
    # 100 s, of which 5 are for the end: 95 passes of a second, but for one more and for two saves of 10 s.
    assert ENDING_S == 5.0
    assert passes_until_near(clock, TimeLimit(100.5, 0.0), [1.0]) == 95
    assert passes_until_near(clock, TimeLimit(100.5, 10.0), [1.0]) == 75
    assert passes_until_near(clock, TimeLimit(100.5, 1.0), [1.0], save_s=10.0) == 75
    # The first pass compiles, which does not come again; an evaluation of 20 s does.
    assert passes_until_near(clock, TimeLimit(100.5, 0.0), [50.0, 1.0]) == 46
    assert passes_until_near(clock, TimeLimit(100.5, 0.0), [1.0, 20.0, 1.0]) == 57
    assert passes_until_near(clock, TimeLimit(None, 10.0), [1.0]) == 1000


def test_the_command_counts_before_the_job_it_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (END_TIME, "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    assert granted_seconds() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + 500:.0f}")
    assert granted_seconds() == pytest.approx(500, abs=5)
    monkeypatch.setenv(END_TIME, "0")
    set_time_limit(90.0)
    assert granted_seconds() == pytest.approx(90, abs=5)
    monkeypatch.setenv(END_TIME, "soon")
    with pytest.raises(ConfigError, match=f"{END_TIME}=soon is no number"):
        granted_seconds()


def test_a_signal_behind_the_runs_own_wish_is_no_second_one() -> None:
    with StopRequest() as request:
        request.signal_number = TIME_IS_UP
        signal.raise_signal(signal.SIGTERM)
        assert request.signal_number == TIME_IS_UP


def test_ranks_save_and_stop_together(tmp_path: Path) -> None:
    run_file, run_dir = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data")), tmp_path / "run"
    words = ["train", str(run_file), "--run-dir", str(run_dir), "layout.dp_shard=2", "checkpoint.every=null"]
    # Less than what is left for the end alone: it is up behind the first step, whatever that takes.
    code, errors = phalanx_processes.start([*words, "training.steps=100000", "--time", "0:00:05"], 2).finish()
    assert code == 128 + signal.SIGTERM, errors[-3000:]
    assert "stopped before the end of the wall time after step 1, checkpoint written" in errors
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step == 1


def test_the_grace_is_that_of_whoever_started_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GRACE, "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert granted_grace() is None
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    found = granted_grace()
    assert found is not None and (found.seconds, found.option) == (30.0, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    found = granted_grace()
    assert found is not None and (found.seconds, found.option) == (30.0, "torchrun --shutdown-timeout")
    monkeypatch.setenv(GRACE, "600")
    found = granted_grace()
    assert found is not None and (found.seconds, found.option) == (600.0, "--grace")
    monkeypatch.setenv(GRACE, "long")
    with pytest.raises(ConfigError, match=f"{GRACE}=long is no number"):
        granted_grace()


def test_a_save_longer_than_the_grace_is_warned_of_once() -> None:
    check = GraceCheck(Grace(30.0, "they leave", "--grace"))
    assert check.warn(29.9) is None
    warning = check.warn(36.0)
    assert warning is not None and "takes about 36 s, longer than the 30 s" in warning and "give --grace 77" in warning
    assert check.warn(40.0) is None
    assert GraceCheck(None).warn(1e9) is None


def train_as_under_torchrun(words: Sequence[str]) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    main(words)


def test_a_run_whose_saves_take_longer_than_torchrun_waits_says_so_as_it_starts(tmp_path: Path) -> None:
    run_file, run_dir = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data")), tmp_path / "run"
    words = ["train", str(run_file), "--run-dir", str(run_dir), "layout.dp_shard=1", "checkpoint.every=null"]
    said = phalanx_processes.finish([*words, "training.steps=5"], command=train_as_under_torchrun)
    assert "warning: a checkpoint takes" not in said
    log = run_dir / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (saved,) = [event for event in events if event["kind"] == "checkpoint_written"]
    saved["seconds"] = 36.0
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    said = phalanx_processes.finish([*words, "training.steps=6"], command=train_as_under_torchrun)
    assert "a checkpoint takes about 36 s, longer than the 30 s that torchrun by default leaves ranks" in said
    assert "torchrun --shutdown-timeout 77" in said and said.index("36 s") < said.index("trained to step 6")
