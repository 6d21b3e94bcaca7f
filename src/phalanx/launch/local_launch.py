"""Starts the ranks of one command on this machine, as torchrun does for a node but without its seconds of start-up.

Every rank runs the same command with the variables torchrun would set. The first rank has the terminal. The others write
their errors to files; where one of them is the first to fail, the end of its file is shown.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from phalanx.hardware.host import KILLED_FOR_MEMORY, LESS_MEMORY, KillCount, available_cores, passive_waits
from phalanx.launch.parent import GRACE_S, ONE_WISH_S, PARENT, STOP_SIGNALS, is_ignored
from phalanx.printable import write_stderr

_STOPPED = tuple(128 + number for number in STOP_SIGNALS)
"""Exit codes of a rank that saved and stopped because it was told to; the other ranks are about to do the same."""
_BAD_USAGE = 2
"""Exit code of a command whose arguments or run file are wrong; every rank then finds the same."""
_PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)
_LAST_WORDS_S = 2.0
"""Seconds in which ranks may fail by themselves after another failed, and may end after a second request to stop."""
_DYING_S = 30.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped because another failed."""
_POLL_S = 0.05
_SHOWN_LINES = 20


def launch_ranks(
    arguments: Sequence[str], world_size: int, module: str = "phalanx", *, grace_s: float = GRACE_S
) -> int:
    """Run `phalanx ARGUMENTS` on `world_size` ranks and return the exit code of the first rank that failed, or 0.

    module: Python module to run in place of `phalanx`. grace_s: seconds after which ranks that were told to stop are killed.
    Each of STOP_SIGNALS reaches every rank once; ranks then save and stop. When a rank fails, the others are stopped. No
    rank outlives the call. Ranks find this process's number in the variable `parent.PARENT`.
    """
    # The store lives in this process, as under torchrun: its port cannot be taken by another process before rank 0 starts,
    # and the end of a rank does not end it. By itself it would listen at all addresses of this machine, where anybody who
    # reaches it may read and write.
    with loopback_socket() as listener:
        store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    folder = tempfile.TemporaryDirectory(prefix="phalanx-ranks-")
    with folder, RankProcesses(Path(folder.name), module, grace_s) as ranks:
        for rank in range(world_size):
            ranks.start(arguments, rank, world_size, store.port)
        failed = ranks.wait()
        if failed is None:
            return 0
        ranks.explain(failed)
        code = ranks.code(failed)
        assert code is not None
        # A process ended by a signal has its negative number here, and 128 + the number in a shell.
        return code if code >= 0 else 128 - code


def loopback_socket() -> socket.socket:
    """Return a listening TCP socket, at a free port, that only processes of this machine can reach."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    return listener


class RankProcesses:
    """The processes of all ranks, and the signals that reach them through this process.

    Each rank has a process group of its own. A terminal, or `timeout`, signals the whole group of a command: ranks
    in it would be signalled twice, directly and by this process, and the second signal ends a rank without a checkpoint.
    """

    def __init__(self, folder: Path, module: str, grace_s: float) -> None:
        self._folder = folder
        self._module = module
        self._grace_s = grace_s
        # The kernel counts its kills for memory; a rank's exit code says only that it was signal 9.
        self._kills = KillCount()
        # Keys in the store begin with this secret, so that no other user of the machine can write them.
        self._run_id = secrets.token_hex(16)
        self._out_of_patience = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._previous: dict[int, Any] = {}
        self._asked = 0
        self._asked_at = 0.0
        self._insisted = False

    def __enter__(self) -> RankProcesses:
        for number in _PASSED_ON:
            # nohup ignores SIGHUP for the ranks as well.
            if not is_ignored(number):
                self._previous[number] = signal.signal(number, self._pass_on)
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(self, arguments: Sequence[str], rank: int, world_size: int, port: int) -> None:
        """Start one rank; rank 0 shares this process's streams, and of the others only errors are kept."""
        settings: dict[str, Any] = {"env": _rank_environment(rank, world_size, port, self._run_id), "process_group": 0}
        command = [sys.executable, "-m", self._module, *arguments]
        # One rank on the terminal: the words of all would be as many copies of the same.
        if rank == 0:
            process = subprocess.Popen(command, **settings)
        else:
            with self._log(rank).open("wb") as log:
                null = subprocess.DEVNULL
                process = subprocess.Popen(command, stdin=null, stdout=null, stderr=log, **settings)
        self._processes.append(process)
        if self._asked:
            process.send_signal(self._asked)

    def code(self, rank: int) -> int | None:
        """Return the exit code of a rank, the negative number of the signal that ended it, or None while it runs."""
        return self._processes[rank].poll()

    def wait(self) -> int | None:
        """Wait for all ranks; return the first that failed, once the others are stopped, or None where all succeeded."""
        while (failed := self._first_failed()) is None:
            if all(process.returncode == 0 for process in self._processes):
                return None
            # Patience counts from the last request: a second kind of signal grants the time anew.
            self._out_of_patience = bool(self._asked) and time.monotonic() - self._asked_at > self._grace_s
            # Ranks may hang in a collective whose other end is gone: no signal that Python handles reaches them there.
            if self._insisted or self._out_of_patience:
                self._wait_for_all(_LAST_WORDS_S)
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        if self.code(failed) in _STOPPED:
            self._wait_for_all(self._grace_s)
            # Another rank may have failed to write the checkpoint, which is then the failure to report.
            worst = self._first_failed()
            assert worst is not None
            return worst
        # This line comes before those of the other ranks, which can only report a lost connection.
        self._say_who_was_killed(failed)
        # Another rank may know the reason: it gets time to print it.
        self._wait_for_all(_LAST_WORDS_S)
        # They may be writing a checkpoint: killed at once they could not clean up.
        self._signal(signal.SIGTERM)
        self._wait_for_all(_DYING_S)
        return failed

    def explain(self, failed: int) -> None:
        """Print the last lines of the failed rank, unless they are on the terminal already."""
        code = self.code(failed)
        assert code
        if code in _STOPPED or code == -self._asked:
            return
        # A wrong run file is wrong on every rank alike: the first has said so.
        if failed and not code == self.code(0) == _BAD_USAGE:
            last_lines = self._log(failed).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            if last_lines:
                write_stderr("\n".join([f"rank {failed} failed:", *last_lines]))

    def _say_who_was_killed(self, failed: int) -> None:
        code = self.code(failed)
        assert code
        if code > 0 or code == -self._asked:
            return
        words = f"rank {failed} was ended by signal {-code} ({signal.strsignal(-code)})"
        if self._out_of_patience:
            words = f"rank {failed} did not stop within {self._grace_s:g} s and was killed; the last checkpoint stays"
        elif -code == signal.SIGKILL and self._kills.grew():
            words = f"rank {failed} was {KILLED_FOR_MEMORY} (signal 9); {LESS_MEMORY}"
        write_stderr(words)

    def _first_failed(self) -> int | None:
        """Return the failed rank that tells most of those that ended at once: killed before failed before stopped."""
        codes = [process.poll() for process in self._processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        return min(failed, key=lambda rank: (codes[rank] in _STOPPED, (codes[rank] or 0) > 0), default=None)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes):
            if self._insisted:
                deadline = min(deadline, self._asked_at + _LAST_WORDS_S)
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number == self._asked
        if again and now - self._asked_at < ONE_WISH_S:
            return
        self._insisted = self._insisted or again
        self._asked, self._asked_at = number, now
        self._signal(number)
        # A rank suspended by SIGSTOP has to continue before it can act on the signal.
        self._signal(signal.SIGCONT)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Suspend the ranks with this process (Ctrl-Z) and continue them with it."""
        self._signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}"


def _rank_environment(rank: int, world_size: int, port: int, run_id: str) -> dict[str, str]:
    """Return the variables torchrun would set, and defaults for ranks of one machine, which the user's own go before."""
    wanted = {"OMP_NUM_THREADS": str(max(1, available_cores() // world_size)), **passive_waits(os.environ)}
    if "lo" in (name for _, name in socket.if_nameindex()):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {
        **wanted,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PARENT: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run_id,
    }
