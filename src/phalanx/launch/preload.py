"""A process that has loaded what ranks need, and of which they are forked: ranks that begin again load no library.

PyTorch and what is built on it take seconds of a core to load, for each rank and at each restart, and on a cluster thousands
of files from a shared file system. Loaded once a node, ranks start in milliseconds and share the memory of what was loaded.

Protocol: the supervisor sends one JSON object for each rank, with the descriptor of the store's socket where the rank has
one; the answer is the number of the rank's process. Ranks are children of the supervisor, as if it had started them itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.launch.parent import PARENT, STORE_SOCKET, die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_LOAD_S, _FORK_S = 600.0, 10.0
"""Most seconds to load the libraries, which may lie on a slow file system, and to fork a rank afterwards."""
_LOOK_S = 0.2
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")
"""Files by which the drivers of NVIDIA and AMD devices are reached."""


class RankProcess(Protocol):
    """A rank's process, as `subprocess.Popen` gives one."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""

    def wait(self) -> int:
        """Wait for the end and return the exit code."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has ended."""

    def kill(self) -> None:
        """Kill the process, unless it has ended."""


@dataclass(frozen=True)
class RankCommand:
    """What a rank runs: `python -m MODULE ARGUMENTS` with these variables."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: str | None
    """File for its errors, with nothing to read and its output thrown away; None shares the streams of the supervisor."""


def start_interpreter(command: RankCommand) -> RankProcess:
    """Start a rank as an interpreter of its own, which loads everything itself."""
    listener = command.environment.get(STORE_SOCKET)
    with contextlib.ExitStack() as opened:
        streams: dict[str, Any] = {}
        if command.log is not None:
            log = opened.enter_context(Path(command.log).open("wb"))
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": log}
        return subprocess.Popen(
            [sys.executable, "-m", command.module, *command.arguments],
            env=command.environment,
            process_group=0,
            pass_fds=() if listener is None else (int(listener),),
            **streams,
        )


class ForkedRank:
    """A child of this process that another one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has ended: its number may be another one's by then."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class RankTemplate:
    """The process with everything loaded, as its supervisor sees it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], ranks: int) -> None:
        """Start to load `modules`. environment: what libraries read as they are loaded, the same for all `ranks`."""
        self.ranks = ranks
        self._loaded = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.launch.preload", str(theirs.fileno()), *modules],
                env={**environment, PARENT: str(os.getpid())},
                pass_fds=(theirs.fileno(),),
                # Signals of a terminal are for the supervisor, which hands them on.
                process_group=0,
            )

    def start(self, command: RankCommand, given_up: Callable[[], bool] = lambda: False) -> ForkedRank | None:
        """Start a rank; return None where that is not possible, after which no other will be: the process is ended.

        given_up: asked whether to wait no longer for libraries that take long to load.
        """
        listener = command.environment.get(STORE_SOCKET)
        deadline = time.monotonic() + (_FORK_S if self._loaded else _LOAD_S)
        text = json.dumps(asdict(command)).encode()
        adopt_orphans(True)
        try:
            self._socket.sendall(len(text).to_bytes(4, "big"))
            # With the first byte of the text, so that the descriptor comes with the command that it is for.
            socket.send_fds(self._socket, [text[:1]], [] if listener is None else [int(listener)])
            self._socket.sendall(text[1:])
            while not select.select([self._socket], [], [], _LOOK_S)[0]:
                if given_up() or time.monotonic() > deadline:
                    raise TimeoutError
            answer = self._socket.recv(64)
        except OSError:
            answer = b""
        finally:
            adopt_orphans(False)
        if not answer:
            self.close()
            return None
        self._loaded = True
        return ForkedRank(int(answer))

    def close(self) -> None:
        """End the process; ranks forked of it go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def can_preload() -> bool:
    """Return whether ranks can be forked of another process and be children of this one all the same."""
    return sys.platform == "linux"


def adopt_orphans(adopt: bool) -> None:
    """Have processes below this one whose parents end become its children, or no longer."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def main() -> None:
    """Load the modules that the command line names and fork ranks; each rank goes on from here with its own command."""
    die_with_parent(signal.SIGKILL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    modules = sys.argv[2:]
    # It would look through all that is loaded again and again.
    gc.disable()
    for name in modules:
        # The rank says what is missing, where a person reads it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Left out of all garbage collection to come, which would copy every page of it into each rank.
    gc.collect()
    gc.freeze()
    gc.enable()
    # Python 3.12 warns of each fork of a process with threads. Those of libraries such as OpenBLAS end when it forks and
    # start anew where they are needed; where others are left a rank begins anew (`_become_rank`).
    warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning)
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    threads = len(list(Path("/proc/self/task").iterdir()))
    found = _fork_ranks(connection)
    if found is not None:
        _become_rank(*found, threads)


def _fork_ranks(connection: socket.socket) -> tuple[RankCommand, int | None] | None:
    """Fork ranks until the supervisor is gone, and return None; in each rank, return its command and the store's socket."""
    while True:
        # A message is the length of a command, and the command; with its first byte comes the store's socket, for rank 0.
        head = connection.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        text, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        text += connection.recv(int.from_bytes(head, "big") - 1, socket.MSG_WAITALL)
        listener = descriptors[0] if descriptors else None
        rank = _fork_orphan()
        if rank == 0:
            connection.close()
            return RankCommand(**json.loads(text)), listener
        if listener is not None:
            os.close(listener)
        connection.sendall(str(rank).encode())


def _fork_orphan() -> int:
    """Fork a process whose parent has ended, so that the supervisor adopts it; return its number, and 0 in itself."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle:
        os.close(writing)
        child = os.read(reading, 64)
        os.close(reading)
        # Only once the process in the middle is gone is the child the supervisor's.
        os.waitpid(middle, 0)
        return int(child)
    middle = os.getpid()
    # The child of a process that ends is adopted by the nearest process above that asked for it: the supervisor.
    number = os.fork()
    if number:
        os.write(writing, str(number).encode())
        # Nothing is cleaned up: all of it is the parent's.
        os._exit(0)
    os.close(reading)
    os.close(writing)
    while os.getppid() == middle:
        time.sleep(0.0005)
    return 0


def _become_rank(command: RankCommand, listener: int | None, threads: int) -> None:
    """Turn this process into what the supervisor would have started itself, and run the command.

    threads: of the process that this one was forked of.
    """
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(command.environment)
    if command.log is not None:
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor, stream in ((null, 0), (null, 1), (log, 2)):
            os.dup2(descriptor, stream)
        os.close(null)
        os.close(log)
    if listener is not None:
        os.environ[STORE_SOCKET] = str(listener)
    # A fork copies the locks of other threads as they were, and not the threads; a device that was open works in no fork.
    if threads > 1 or _opened_device():
        if listener is not None:
            os.set_inheritable(listener, True)
        os.execve(sys.executable, [sys.executable, "-m", command.module, *command.arguments], os.environ)
    sys.argv[1:] = command.arguments
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int) or not end.code:
            raise
        code = end.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        return
    # What a failed rank had open it has closed. Python would take a second or more to take apart all that is loaded, and
    # those that are to begin again wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _opened_device() -> bool:
    """Return whether a library that was loaded has opened a device."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            opened.append(os.readlink(descriptor))
    return any(name.startswith(_DEVICES) for name in opened)


if __name__ == "__main__":
    main()
