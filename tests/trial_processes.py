"""Processes of trials as the system sees them, for tests that kill what started them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def trial_processes(folder: Path) -> list[int]:
    """Numbers of the processes whose command names the folder of a study's trials."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command and b"phalanx.study.processes\0" in command:
                found.append(int(entry.name))
    return found


def wait_for(process: subprocess.Popen[str] | None, what: Callable[[], bool], seconds: float) -> None:
    """Wait until `what` holds, for `seconds` at most, while the process runs; None asks for none."""
    deadline = time.monotonic() + seconds
    while not what():
        ended = process is not None and process.poll() is not None
        assert not ended and time.monotonic() < deadline, process and process.communicate()
        time.sleep(0.02)
