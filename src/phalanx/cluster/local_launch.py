"""Ranks of one command on this machine: what torchrun does for a node, without its seconds of start-up and its logs.

Every rank runs the same command with the variables torchrun would set. The first rank has the terminal; the others write
their errors to files, of which the end is shown when one of them is the first to fail.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a rank that was told to stop and did so in good order; the others are about to."""
_ORDERLY_S = 600.0
"""Seconds that the others then have: one of them may still write the checkpoint."""
_LAST_WORDS_S = 2.0
"""Seconds that ranks have after one failed, to fail by themselves."""
_GRACE_S = 30.0
"""Seconds that they have after they were told to stop because of it."""
_POLL_S = 0.05
_SHOWN_LINES = 20


def launch_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run `phalanx ARGUMENTS` on `ranks` ranks; returns the exit code of the first rank that failed, or 0.

    SIGTERM is passed on to every rank, as a terminal passes on Ctrl-C; ranks then stop in good order. When a rank fails
    the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
        logs = [Path(folder) / f"rank-{rank}" for rank in range(ranks)]
        port = _free_port()
        processes = [_start(arguments, rank, ranks, port, logs[rank]) for rank in range(ranks)]
        try:
            with _passing_on_signals(processes):
                failed = _wait(processes)
        finally:
            _end(processes)
        if failed is None:
            return 0
        if failed:
            _show(failed, logs[failed])
        code = processes[failed].returncode
        # A process ended by a signal has its negative number here, and 128 + the number in a shell.
        return code if code >= 0 else 128 - code


def _start(arguments: Sequence[str], rank: int, ranks: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "phalanx", *arguments]
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _passing_on_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """SIGTERM goes to every rank. A terminal's Ctrl-C has reached them already: they are in its foreground group."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None if sys.stdin.isatty() else pass_on(*_)),
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all ranks; the first one that failed, if any did. The others are then stopped."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            if codes[failed[0]] in _STOPPED:
                _wait_for_all(processes, _ORDERLY_S)
            else:
                # The failure of one may well be the reason of another's: let it say so.
                _wait_for_all(processes, _LAST_WORDS_S)
                for process in processes:
                    if process.poll() is None:
                        process.terminate()
                _wait_for_all(processes, _GRACE_S)
            return failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)


def _wait_for_all(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _show(rank: int, log: Path) -> None:
    """The end of what a rank that failed wrote."""
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    sys.stderr.write("\n".join([f"rank {rank} failed:", *lines]) + "\n")
