"""Ranks of one machine as one command: signals reach each of them once, and the one that tells most is explained.

The ranks are probes that do what their scenario says; the launcher and its signals are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from listening import listening_at
from phalanx.hardware.host import KillCount
from phalanx.launch import local_launch
from phalanx.launch.parent import STOP_SIGNALS

PROBE = """#!{python} -SE
import os, signal, sys, time

scenario, folder = sys.argv[-2:]
rank = int(os.environ["RANK"])

def on_signal(number, frame):
    with open(os.path.join(folder, "signals-%d" % rank), "a") as file:
        file.write("%d\\n" % number)
    if scenario != "stubborn":
        time.sleep(0.4)
        sys.exit(128 + number)

for name in ("INT", "TERM", "HUP", "USR1", "USR2"):
    signal.signal(signal.Signals["SIG" + name], on_signal)
open(os.path.join(folder, "ready-%d" % rank), "w").close()
if scenario == "ends":
    sys.exit(0)
if scenario == "shared":
    print("error: no such field", file=sys.stderr if rank else sys.stdout)
    sys.exit(2)
if scenario == "fails" and rank == 1:
    print("the disk is full", file=sys.stderr)
    sys.exit(1)
if scenario == "stopped" and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if scenario == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.02)
"""
LAUNCH = """
import sys
from phalanx.launch import local_launch
sys.executable = sys.argv[1]
# The probes say nothing after another has failed.
local_launch._LAST_WORDS_S = 0.2
sys.exit(local_launch.launch_ranks(sys.argv[3:], 2, grace_s=float(sys.argv[2])))
"""


class Launch:
    """A launcher with two probes, in a process group of its own."""

    def __init__(self, folder: Path, scenario: str, grace_s: float = 600.0) -> None:
        self.folder = folder
        probe = folder / "probe"
        probe.write_text(PROBE.format(python=sys.executable))
        probe.chmod(0o755)
        command = [sys.executable, "-c", LAUNCH, str(probe), str(grace_s), scenario, str(folder)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def ready(self) -> None:
        self._until(lambda: all((self.folder / f"ready-{rank}").exists() for rank in (0, 1)))

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def signals(self) -> list[list[int]]:
        """The signals that each rank has seen."""
        files = [self.folder / f"signals-{rank}" for rank in (0, 1)]
        return [[int(line) for line in file.read_text().split()] if file.exists() else [] for file in files]

    def saw(self, count: int) -> None:
        self._until(lambda: all(len(seen) >= count for seen in self.signals()))

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.stderr
            time.sleep(0.02)


WISHES = [(number, group) for number in STOP_SIGNALS for group in (False, True)]


@pytest.fixture(scope="module")
def wished(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Launch]:
    """A launcher for each way to ask it to stop, which all were asked at once."""
    launches = {wish: Launch(tmp_path_factory.mktemp("wish"), "trains") for wish in WISHES}
    for (number, group), launch in launches.items():
        launch.ready()
        if group:
            # A terminal signals the group; `timeout` the process and the group.
            os.killpg(launch.process.pid, number)
        os.kill(launch.process.pid, number)
    return launches


@pytest.mark.parametrize(("number", "group"), WISHES)
def test_one_wish_to_stop_reaches_each_rank_once(
    wished: dict[tuple[int, bool], Launch], number: signal.Signals, group: bool
) -> None:
    launch = wished[number, group]
    code, errors = launch.finish()
    assert (code, errors) == (128 + number, "")
    assert launch.signals() == [[number], [number]]


def test_a_rank_that_was_stopped_goes_on_to_stop_in_good_order(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "stopped")
    launch.ready()
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.finish() == (128 + signal.SIGTERM, "")
    assert launch.signals() == [[signal.SIGTERM], [signal.SIGTERM]]


def test_ranks_that_do_not_stop_are_killed_after_the_grace_time(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "stubborn", grace_s=1.0)
    launch.ready()
    os.kill(launch.process.pid, signal.SIGTERM)
    code, errors = launch.finish()
    assert code == 128 + signal.SIGKILL
    assert "did not stop within 1 s and was killed; the last checkpoint stays" in errors
    assert launch.signals() == [[signal.SIGTERM], [signal.SIGTERM]]


def test_the_store_is_out_of_reach_of_other_machines(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "trains")
    launch.ready()
    assert listening_at(launch.process.pid) == {"127.0.0.1"}
    os.kill(launch.process.pid, signal.SIGTERM)
    launch.finish()


@pytest.mark.parametrize(
    ("counted", "said"), [(1, "ran out (signal 9); lower layout.microbatch"), (0, "by signal 9 (Killed)")]
)
def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_others(
    tmp_path: Path, counted: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "probe"
    probe.write_text(PROBE.format(python=sys.executable))
    probe.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(probe))
    monkeypatch.setattr(local_launch, "_LAST_WORDS_S", 0.2)
    monkeypatch.setattr(KillCount, "_read_count", lambda count: counted * (tmp_path / "ready-1").exists())
    assert local_launch.launch_ranks(["killed", str(tmp_path)], 2) == 128 + signal.SIGKILL
    assert said in capfd.readouterr().err


def test_a_second_wish_ends_ranks_that_do_not_stop(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "stubborn")
    launch.ready()
    os.kill(launch.process.pid, signal.SIGINT)
    launch.saw(1)
    time.sleep(1.2)
    os.kill(launch.process.pid, signal.SIGINT)
    launch.saw(2)
    code, _ = launch.finish()
    assert code == 128 + signal.SIGKILL
    assert launch.signals() == [[signal.SIGINT] * 2] * 2


@pytest.mark.parametrize(
    ("scenario", "code", "said"),
    [
        ("fails", 1, "rank 1 failed:\nthe disk is full\n"),
        ("killed", 137, "rank 1 was ended by signal 9 (Killed)\n"),
        ("shared", 2, ""),
        ("ends", 0, ""),
    ],
)
def test_what_the_terminal_has_not_heard_is_said_once(tmp_path: Path, scenario: str, code: int, said: str) -> None:
    launch = Launch(tmp_path, scenario)
    assert launch.finish() == (code, said)
    if scenario in ("fails", "killed"):
        assert launch.signals() == [[signal.SIGTERM], []]
