"""Processes of trials: limits, logs, and that none outlives its search."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.launch.parent import PARENT
from phalanx.study.processes.process import Worker, guarded_command, run_limited

CHILD = "import phalanx.launch.parent as p, time, os, sys\np.die_with_parent()\n"
SLEEPS = CHILD + "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
STARTS_ANOTHER = (
    CHILD
    + "import subprocess\nos.environ[p.PARENT] = str(os.getpid())\n"
    + "subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]]).wait()\n"
)


def wait_for(what: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_a_command_says_and_returns(tmp_path: Path) -> None:
    ended = run_limited([sys.executable, "-c", "print('a'); raise SystemExit(5)"], {}, tmp_path / "log", 60.0)
    assert (ended.code, ended.timed_out) == (5, False)
    assert (tmp_path / "log").read_text() == "a\n"


def test_a_command_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", STARTS_ANOTHER, str(pid_file), SLEEPS]
    ended = run_limited(command, {}, tmp_path / "log", 2.0)
    assert ended.timed_out and ended.code != 0
    wait_for(lambda: pid_file.exists() and gone(int(pid_file.read_text())))


def test_nothing_outlives_a_killed_search(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    search = (
        "import sys\nfrom pathlib import Path\nfrom phalanx.study.processes.process import run_limited\n"
        f"run_limited([sys.executable, '-c', {STARTS_ANOTHER!r}, {str(pid_file)!r}, {SLEEPS!r}], {{}}, "
        f"Path({str(tmp_path / 'log')!r}), 600.0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", search])
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    process.kill()
    process.wait()
    wait_for(lambda: gone(int(pid_file.read_text())), 5.0)


def test_a_process_whose_parent_is_gone_already_ends() -> None:
    environment = {**os.environ, PARENT: str(os.getppid())}
    done = subprocess.run(
        [sys.executable, "-c", CHILD + "print('lives')"], env=environment, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == b""


def test_a_foreign_program_is_told_to_quit(tmp_path: Path) -> None:
    quits = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGQUIT, lambda *_: sys.exit(open(sys.argv[1], 'w').write('q') - 1))\n"
    )
    starts = (
        "import os, subprocess, sys\nfrom phalanx.launch.parent import PARENT\n"
        "from phalanx.study.processes.process import guarded_command\n"
        "child = subprocess.Popen(guarded_command(sys.argv[1:]), env={**os.environ, PARENT: str(os.getpid())})\n"
        "print('ready', flush=True)\nchild.wait()\n"
    )
    program = [
        sys.executable,
        "-c",
        quits + "open(sys.argv[1] + '.up', 'w').close()\ntime.sleep(600)",
        str(tmp_path / "said"),
    ]
    process = subprocess.Popen([sys.executable, "-c", starts, *program], stdout=subprocess.PIPE)
    wait_for((tmp_path / "said.up").exists)
    process.kill()
    process.communicate()
    wait_for((tmp_path / "said").exists, 5.0)
    assert guarded_command(["srun"])[-1] == "srun"


def test_workers_are_told_apart() -> None:
    mine = Worker.this_process()
    assert mine.alive() and not Worker(mine.host, mine.pid, "1").alive()
