"""Faults of ranks of one machine: found, named, and followed by a restart or by an end that says why there is none.

The ranks are probes with real heartbeats that do what their scenario says; launcher, signals and reports are real.
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

import phalanx
from phalanx.launch import faults
from phalanx.launch.faults import (
    FAILED_NODES,
    FAULT_FILE,
    FAULT_LOG,
    FAULT_TEXT,
    GONE,
    RankView,
    collect_stacks,
    name_fault,
    write_report,
)
from phalanx.launch.heartbeat import stack_file
from phalanx.launch.restart import GIVEN_UP, RankPlaces

PROBE = """#!{python} -SE
import os, signal, sys, time
sys.path.insert(0, {source!r})
from pathlib import Path
from phalanx.launch.heartbeat import heartbeat_of

scenario, folder = [word for word in sys.argv if "layout." not in word][-2:]
rank, folder = int(os.environ["RANK"]), Path(folder)
with (folder / "places").open("a") as file:
    print(rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], *sys.argv[1 + sys.argv.index(str(folder)):], file=file)
heart = heartbeat_of(rank)
heart.answer(lambda: None)
with (folder / f"attempts-{{rank}}").open("a") as file:
    file.write("%f\\n" % time.time())
attempt = len((folder / f"attempts-{{rank}}").read_text().split())
# Each attempt begins from a newer checkpoint only where the scenario says so.
heart.begin(10 * attempt if scenario.startswith("progress") else 10)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

def fails(kind):
    # Raised, as in a real rank: only so has it a traceback.
    try:
        raise ValueError("the batch is bad")
    except ValueError as error:
        heart.fail(kind, error)
        (folder / "said").write_text(str(time.time()))
    if "slowly" in scenario:
        time.sleep(2)
    if "closing" in scenario and kind == "exception":
        # As Python does once a run has ended.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1000)
    sys.exit(1)

def state(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"

for step in range(11, 31):
    heart.enter("data", step)
    time.sleep(0.01)
    if rank == 1 and step == 20:
        (folder / "coming").write_text(str(os.getpid()))
        (folder / "coming").rename(folder / "came")
    if rank == 1 and step == 20 and (attempt == 1 or "always" in scenario):
        if "killed" in scenario:
            os.kill(os.getpid(), signal.SIGKILL)
        if "stopped" in scenario:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "hangs" in scenario:
            time.sleep(1000)
        if "raises" in scenario:
            fails("exception")
        if "refuses" in scenario:
            fails("refused")
        if "saves" in scenario:
            with heart.during("checkpoint"):
                time.sleep(1.6)
    heart.enter("collective")
    heart.finish_step(step)
    if rank == 0 and step == 25 and attempt == 1:
        # In a real run it would wait in a collective.
        while not (folder / "came").exists():
            heart.enter("collective")
            time.sleep(0.01)
        # It is the other one that gave its last sign of life first.
        heart.enter("collective")
        # What a rank does that waits on a device for a peer that is gone.
        if "deaf" in scenario:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(1000)
        # What one does that is told so by gloo.
        if "alone" in scenario:
            time.sleep(1000)
        if any(word in scenario for word in ("killed", "raises", "refuses")):
            fails("lost link")
        if "stopped" in scenario or "hangs" in scenario:
            pid = (folder / "came").read_text()
            while state(pid) not in "ZX":
                time.sleep(0.01)
            fails("lost link")
heart.enter("end")
"""
LAUNCH = """
import sys
from pathlib import Path
from phalanx.launch.faults import Limits
from phalanx.launch.local_launch import launch_ranks
from phalanx.launch.restart import RestartPolicy
sys.executable = sys.argv[1]
layouts = {1: ["layout.tp=1", "layout.microbatch=2"]} if "replans" in sys.argv[-2] else {}
policy = RestartPolicy(int(sys.argv[2]), float(sys.argv[3]), Limits(1.0, 60.0), Path(sys.argv[-1]), layouts=layouts)
sys.exit(launch_ranks(sys.argv[4:], 2, policy=policy))
"""


class Launch:
    """A launcher with two probes, whose reports go to `folder`."""

    def __init__(self, folder: Path, scenario: str, most: int = 2, backoff_s: float = 0.0) -> None:
        self.folder = folder
        probe = folder / "probe"
        source = str(Path(phalanx.__file__).parents[1])
        probe.write_text(PROBE.format(python=sys.executable, source=source))
        probe.chmod(0o755)
        command = [sys.executable, "-c", LAUNCH, str(probe), str(most), str(backoff_s), scenario, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    def attempts(self) -> list[float]:
        """When rank 1 was started."""
        return [float(line) for line in (self.folder / "attempts-1").read_text().split()]

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / FAULT_FILE).read_text())
        return found


@pytest.mark.parametrize(
    ("scenario", "cause", "detail"),
    [
        ("killed", "signal", "9 (Killed)"),
        ("raises", "exception", "ValueError: the batch is bad"),
        ("hangs", "hang", "nothing for 1."),
        ("stopped", "stopped", "has not run for 1."),
    ],
)
def test_the_first_rank_to_fail_is_named_and_all_are_started_again(
    tmp_path: Path, scenario: str, cause: str, detail: str
) -> None:
    launch = Launch(tmp_path, scenario)
    code, errors = launch.finish()
    assert code == 0, errors
    report = launch.report()
    assert (report["rank"], report["cause"], report["step"]) == (1, cause, 20)
    assert report["phase"] == "data" and detail in report["detail"]
    assert errors.count("fault: rank 1 on") == 1 and "restart 1: all ranks begin again" in errors
    assert len(launch.attempts()) == 2
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    # The rank that was left says where it was: by its stacks, or by its own traceback where it has lost its peer first.
    assert "most recent call" in (tmp_path / FAULT_TEXT).read_text()
    if cause in ("hang", "stopped"):
        assert report["silent_s"] < 1.0 + 1.0
        assert set(report["stacks"]) == {"0", "1"}


def test_a_rank_that_waits_on_its_device_is_not_waited_for(tmp_path: Path) -> None:
    """It hears of nothing, and no signal reaches Python there."""
    launch = Launch(tmp_path, "killed deaf")
    code, errors = launch.finish()
    assert code == 0, errors
    report = launch.report()
    assert (report["rank"], report["cause"]) == (1, "signal")
    # A second for last words; the rest is a busy machine's.
    assert launch.attempts()[1] - datetime.fromisoformat(report["time"]).timestamp() < 3.0


def test_a_fault_is_found_when_a_rank_says_so_and_not_when_it_ends(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "raises slowly alone")
    code, errors = launch.finish()
    assert code == 0, errors
    report = launch.report()
    assert (report["rank"], report["cause"], report["phase"]) == (1, "exception", "data")
    said = float((tmp_path / "said").read_text())
    assert datetime.fromisoformat(report["time"]).timestamp() - said < 1.5


def test_a_rank_that_is_ended_while_it_closes_has_failed_and_was_not_asked_to_stop(tmp_path: Path) -> None:
    # The other one, which lost it, ends first.
    launch = Launch(tmp_path, "raises closing")
    code, errors = launch.finish()
    assert code == 0, errors
    report = launch.report()
    assert (report["rank"], report["cause"]) == (1, "exception") and "restart 1" in report["action"]


def test_a_rank_that_said_why_it_fails_is_not_called_hung_while_it_closes() -> None:
    said = {"kind": "exception", "error": "ValueError", "message": "the batch is bad"}
    for error, expected in ((said, "exception"), (None, "hang")):
        view = RankView(1, 1, None, "S", None, error)
        assert name_fault(view, [view], attempt=0, now=9.0, silent=True).cause == expected


def test_nodes_are_named_by_their_scheduler_where_they_may_be_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: dict[str, object] = {"kind": "lost link", "error": "PeerFailureError", "message": "rank 1 is gone"}
    for node, code, error in (("node007", -signal.SIGKILL, None), ("node008", 1, lost), ("node009", GONE, None)):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        view = RankView(1, 1, code, "", None, error)
        write_report(name_fault(view, [view], attempt=0, now=9.0), tmp_path)
    assert json.loads((tmp_path / FAULT_FILE).read_text())["host"] == "node009"
    assert (tmp_path / FAILED_NODES).read_text().split() == ["node007", "node009"]


def test_stacks_of_a_rank_that_ends_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_STACK_WAIT_S", 60.0)
    # A process that has no answer to the signal is ended by it, as one that lost another ends by itself.
    with subprocess.Popen(["sleep", "1000"]) as process:
        stack_file(tmp_path, 1).touch()
        began = time.monotonic()
        assert collect_stacks(tmp_path, [RankView(1, process.pid, None, "S", None, None)]) == {}
        assert time.monotonic() - began < 20.0


def test_restarts_without_a_newer_checkpoint_end_with_a_code_of_their_own(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "killed always", backoff_s=0.5)
    code, errors = launch.finish()
    assert code == GIVEN_UP == 93
    assert f"given up (exit code {GIVEN_UP}): 2 restarts in a row have led to no newer checkpoint" in errors
    assert len((tmp_path / FAULT_LOG).read_text().splitlines()) == 3
    _, second, third = launch.attempts()
    # The second restart from the same checkpoint waits.
    assert third - second > 0.5 and "after 0.5 s" in errors


def test_a_place_that_fails_twice_in_a_row_is_left_out(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "killed always replans")
    code, errors = launch.finish()
    assert code == 0, errors
    assert "place 1 of this machine has failed twice in a row and is left out, 1 ranks (microbatch=2) begin" in errors
    started = sorted((tmp_path / "places").read_text().splitlines())
    both = [f"{rank} {rank} 2" for rank in (0, 1) for _ in range(2)]
    assert started == sorted([*both, "0 0 1 layout.tp=1 layout.microbatch=2"])


def test_ranks_take_the_places_that_are_left_and_spare_ones_first() -> None:
    places = RankPlaces(4, {2: ["layout.tp=2"], 1: []})
    assert places.leave_out(1) and places.used == [0, 2] and places.words == ["layout.tp=2"]
    # Of three places that were left, two have ranks; the third is spare.
    assert places.leave_out(0) and places.used == [2, 3] and places.words == ["layout.tp=2"]
    assert places.leave_out(1) and places.used == [2]
    assert not places.leave_out(0) and places.used == [2]


def test_restarts_that_come_further_are_not_counted(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "progress killed always", most=1)
    launch_until(launch, attempts=4)
    launch.process.terminate()
    launch.finish()
    assert "given up" not in (tmp_path / FAULT_TEXT).read_text()


def launch_until(launch: Launch, attempts: int) -> None:
    deadline = time.monotonic() + 60
    while not (launch.folder / "attempts-1").exists() or len(launch.attempts()) < attempts:
        assert time.monotonic() < deadline and launch.process.poll() is None
        time.sleep(0.02)


def test_what_a_rank_says_to_the_user_is_no_reason_to_start_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "refuses")
    code, _ = launch.finish()
    assert code == 1 and len(launch.attempts()) == 1
    assert launch.report()["cause"] == "refused"


def test_a_fault_without_restarts_ends_as_it_always_did_and_is_named(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "killed", most=0)
    code, errors = launch.finish()
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was ended by signal 9 (Killed)" in errors and "not restarted; the last checkpoint stays" in errors


def test_a_slow_phase_is_no_hang(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "saves")
    code, errors = launch.finish()
    assert (code, errors) == (0, "")
    assert not (tmp_path / FAULT_FILE).exists()


def test_a_hung_run_that_is_told_to_stop_ends_and_is_not_started_again(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "stopped")
    launch_until(launch, attempts=1)
    time.sleep(0.5)
    started = time.monotonic()
    launch.process.send_signal(signal.SIGTERM)
    code, errors = launch.finish()
    assert code == 128 + signal.SIGTERM, errors
    assert time.monotonic() - started < 10 and len(launch.attempts()) == 1


def test_a_request_to_stop_ends_the_wait_for_a_restart(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "killed always", backoff_s=300.0)
    deadline = time.monotonic() + 60
    log = tmp_path / FAULT_LOG
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(launch.process.pid, signal.SIGTERM)
    code, _ = launch.finish()
    assert code == 128 + signal.SIGTERM


def test_a_link_in_the_place_of_a_report_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / FAULT_FILE).symlink_to(victim)
    code, errors = Launch(tmp_path, "killed").finish()
    assert code == 0 and victim.read_text() == "mine"
    assert "could not be written" in errors and "is a link" in errors
