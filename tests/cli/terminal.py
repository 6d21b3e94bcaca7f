"""`phalanx` in a process of its own: with pipes, or on a real terminal of a given width."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LONGEST_S = 120.0


def start(*arguments: str, **settings: Any) -> subprocess.Popen[bytes]:
    """Start `phalanx ARGUMENTS` from these sources, in the repository root."""
    wanted = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **settings.pop("env", {})}
    environment = {name: value for name, value in wanted.items() if value is not None}
    return subprocess.Popen([sys.executable, "-m", "phalanx", *arguments], cwd=ROOT, env=environment, **settings)


def run_in_terminal(
    columns: int,
    *arguments: str,
    typed: str = "",
    enough: Callable[[str], bool] = lambda shown: False,
    **settings: str,
) -> tuple[int, str]:
    """Run `phalanx ARGUMENTS` in a terminal `columns` wide. Returns the exit code and all that appears on it.

    typed: what somebody types ahead there. enough: says of what has appeared so far whether to interrupt it, once.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    unset = {"COLUMNS": None, "NO_COLOR": None, "FORCE_COLOR": None}
    environment = {**unset, "TERM": "xterm-256color", **settings}
    child = start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    # what never is enough must not go on for ever
    end = threading.Timer(_LONGEST_S, child.kill)
    end.start()
    os.write(ours, typed.encode())
    shown, interrupted = b"", False
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
            if not interrupted and enough(shown.decode(errors="ignore")):
                interrupted = True
                child.send_signal(signal.SIGINT)
    except OSError as error:
        # Linux ends a closed terminal so.
        if error.errno != errno.EIO:
            raise
    end.cancel()
    os.close(ours)
    return child.wait(), shown.decode().replace("\r\n", "\n")
