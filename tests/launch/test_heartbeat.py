"""What a rank notes, another process reads; and silence counts by what the rank was doing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.launch.faults import Limits, RankView, first_failed, silent_ranks
from phalanx.launch.heartbeat import FOLDER, Beat, Heartbeat, beat_file, heartbeat_of, read_beat


def test_a_phase_is_seen_as_it_begins(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 3)
    assert (found := read_beat(beat_file(tmp_path, 3))) is not None and found.phase == "start"
    heart.begin(40)
    heart.enter("forward", 41)
    found = read_beat(beat_file(tmp_path, 3))
    # The first step compiles, whatever part of it is under way.
    assert found is not None and (found.phase, found.step, found.resumed) == ("compile", 41, 40)
    heart.finish_step(41)
    heart.enter("backward", 42)
    with heart.during("checkpoint"):
        found = read_beat(beat_file(tmp_path, 3))
        assert found is not None and found.phase == "checkpoint"
    found = read_beat(beat_file(tmp_path, 3))
    assert found is not None and (found.phase, found.step, found.done) == ("backward", 42, 41)
    assert abs(found.since - time.monotonic()) < 5.0


def test_a_file_that_is_no_heartbeat_is_none(tmp_path: Path) -> None:
    assert read_beat(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"x" * 7)
    assert read_beat(tmp_path / "short") is None


def test_the_folder_is_for_this_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat_of(0).folder is None
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert heartbeat_of(0).folder == tmp_path
    assert FOLDER not in os.environ and heartbeat_of(0).folder is None


def test_a_heartbeat_costs_little_beside_a_step(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    heart.finish_step(1)
    start = time.thread_time()
    for _ in range(1000):
        heart.enter("forward")
    # Some six a step: under 0.5% of one that takes 60 ms even at this generous bound.
    assert (time.thread_time() - start) / 1000 < 50e-6


def beat(phase: int, since: float, *, done: int = 5, slowest: float = 0.0) -> Beat:
    return Beat(since, slowest, 0.0, 0.0, 0.0, 6, done, 0, phase, 1)


DATA, CHECKPOINT = 1, 5


@pytest.mark.parametrize(
    ("found", "state", "silent"),
    [
        (beat(DATA, 96.5), "S", True),
        (beat(DATA, 97.5), "S", False),
        # Micro-batches that took a second so far may take five.
        (beat(DATA, 96.5, slowest=1.0), "S", False),
        (beat(DATA, 94.5, slowest=1.0), "S", True),
        (beat(CHECKPOINT, 60.0), "S", False),
        (beat(CHECKPOINT, 30.0), "S", True),
        # Suspended, it does nothing whatever its phase.
        (beat(CHECKPOINT, 60.0), "T", True),
        (beat(DATA, 60.0, done=-1), "S", False),
        (None, "S", False),
        (None, "T", True),
    ],
)
def test_silence_counts_by_the_phase(found: Beat | None, state: str, silent: bool) -> None:
    view = RankView(0, 1, None, state, found, None, started=80.0)
    assert bool(silent_ranks([view], Limits(3.0, 50.0), 100.0, 0.0)) == silent
    # Whoever watches was asleep itself until a second ago.
    assert not silent_ranks([view], Limits(3.0, 50.0), 100.0, 99.0)


def test_the_rank_that_tells_most_is_the_first_to_have_failed() -> None:
    def view(rank: int, code: int, kind: str | None = None, at: float = 0.0) -> RankView:
        return RankView(rank, 1, code, "", None, None if kind is None else {"kind": kind, "time": at})

    lost, raised, later = view(0, 1, "lost link", 1.0), view(1, 1, "exception", 2.0), view(2, 1, "exception", 3.0)
    killed, stopped = view(3, -9), view(4, 143)
    for views, first in (
        ([lost, raised, later], 1),
        ([lost, killed], 3),
        ([lost, stopped], 0),
        ([stopped], 4),
        ([view(5, 1), raised], 1),
    ):
        found = first_failed(views, [143])
        assert found is not None and found.rank == first
    assert first_failed([view(0, 0)], [143]) is None
