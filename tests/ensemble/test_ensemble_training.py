"""Members that train side by side: which device each is on, and that none outlives the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.ensemble import train_members
from phalanx.ensemble.train_members import LOG, Recipe, train_side_by_side

MEMBERS = 5


@pytest.mark.parametrize(("devices", "taken"), [(0, {0}), (1, {0}), (2, {0, 1}), (8, {0, 1, 2})])
def test_members_share_the_devices_where_there_are_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, taken: set[int]
) -> None:
    """Three at a time, in place of training a process that says which device it was given."""
    shown = tmp_path / "python"
    shown.write_text(f"#!{sys.executable}\nimport os\nprint('device', os.environ['LOCAL_RANK'])\n")
    shown.chmod(0o755)
    monkeypatch.setattr(train_members.sys, "executable", str(shown))
    recipes = [Recipe(f"m{number}", tmp_path / "run.yaml", (), tmp_path / f"m{number}") for number in range(MEMBERS)]
    train_side_by_side(recipes, 3, 1, devices=devices)
    words = [(recipe.folder / LOG).read_text().split() for recipe in recipes]
    assert [word for word, _ in words] == ["device"] * MEMBERS
    assert {int(number) for _, number in words} == taken


COMMAND = """
import sys
from pathlib import Path
from phalanx.ensemble import train_members
train_members.sys.executable = sys.argv[1]
train_members.train_side_by_side([train_members.Recipe("m", Path("run.yaml"), (), Path(sys.argv[2]))], 1, 1)
"""
MEMBER = """#!{executable}
import os, signal, time
from phalanx.launch.parent import die_with_parent
die_with_parent(signal.SIGTERM)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; its new parent may not have buried it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_members_end_with_the_command_that_is_killed(tmp_path: Path) -> None:
    """In place of training a process that does what `phalanx train` does first."""
    member = tmp_path / "python"
    member.write_text(MEMBER.format(executable=sys.executable))
    member.chmod(0o755)
    log = tmp_path / "m" / LOG
    command = subprocess.Popen([sys.executable, "-c", COMMAND, str(member), str(tmp_path / "m")])
    try:
        while not log.exists() or not log.read_text().endswith("\n"):
            assert command.poll() is None
            time.sleep(0.02)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    member_pid = int(log.read_text())
    deadline = time.monotonic() + 20.0
    while not gone(member_pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = gone(member_pid)
    if not ended:
        os.kill(member_pid, signal.SIGKILL)
    assert ended
