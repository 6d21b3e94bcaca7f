"""Wall time that ends: the run saves and stops before, by what its steps and saves took."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx_processes
from phalanx.checkpoint import open_checkpoints
from phalanx.errors import ConfigError
from phalanx.launch.wall_time import END_TIME, granted_seconds, set_time_limit
from phalanx.training.safeguards import time_limit
from phalanx.training.safeguards.time_limit import ENDING_S, TimeLimit
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
