"""One process to a folder: a lock file says which process on which host has it.

The system's own file lock decides wherever it can, since it ends with its owner, however that ends. Between hosts of a
shared file system it may not reach; there a living owner is known by its heartbeat, a change of the lock file's time
stamp that the newcomer watches for, so that no two clocks are ever compared.

The library `filelock` (4.2) has each half, and not both in one: `FileLock` is the system's lock alone and names no owner;
`SoftFileLease` has a heartbeat, but lets a newcomer of the same host take the folder of a process that is stopped or waits
for a slow disk, and two trainers in one folder spoil its checkpoints; `StrictSoftFileLock` never takes over the folder of a
process that died on another host.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.errors import PhalanxError

HEARTBEATS_TO_MISS = 6
"""Heartbeats that a newcomer on another host waits for before it considers the owner dead."""

logger = logging.getLogger(__name__)
_held: dict[Path, int] = {}
"""Descriptor of each lock file that this process holds, by its resolved path."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    host: str
    pid: int
    since: str

    @classmethod
    def this_process(cls) -> Owner:
        """Return this process as an owner, from now on."""
        return cls(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"))


class FolderLock:
    """Holds the folder of the lock file `path` while the `with` block runs; the file is there as long.

    error: what is raised when the folder cannot be had. option: the command-line option that names another folder.
    heartbeat_s: seconds between signs of life, and between a newcomer's looks at a lock from another host.

    Entering raises `error` when another process has the folder, naming its host and pid. A lock whose owner is dead is
    taken over.
    """

    def __init__(self, path: Path, error: type[PhalanxError], option: str, *, heartbeat_s: float = 10.0) -> None:
        self.path = path
        self._error = error
        self._option = option
        self._heartbeat_s = heartbeat_s
        self._stopped = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @staticmethod
    def is_held(path: Path) -> bool:
        """Return whether this process holds the lock file `path`."""
        return path.resolve() in _held

    def acquire(self) -> None:
        """Take the lock for this process, making the folder where it is missing. Raises `error` when another has it."""
        if self.is_held(self.path):
            raise self._refusal(Owner(socket.gethostname(), os.getpid(), "earlier, in this very process"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._open_unless_owned()
        except OSError as error:
            raise self._error(
                f"{self.path} cannot be written: {error.strerror}; choose another {self._option}"
            ) from error
        # The descriptor stays open: the system's lock ends with it.
        _held[self.path.resolve()] = descriptor
        self._stopped.clear()
        self._heart = threading.Thread(target=self._beat, args=(descriptor,), name="lock-heartbeat", daemon=True)
        self._heart.start()

    def release(self) -> None:
        """Give the lock up; does nothing where this process does not hold it through this object."""
        descriptor = _held.get(self.path.resolve())
        if self._heart is None or descriptor is None:
            return
        self._stopped.set()
        self._heart.join()
        self._heart = None
        del _held[self.path.resolve()]
        # Removed before it is unlocked: a newcomer that locks the old file finds the name gone, and looks again.
        self.path.unlink(missing_ok=True)
        os.close(descriptor)

    def _open_unless_owned(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                exclusive = self._try_lock(descriptor)
                owner = _read_owner(descriptor)
                if owner is not None and self._is_alive(owner, descriptor, exclusive=exclusive):
                    raise self._refusal(owner)
                # a former owner may have removed the file between our opening and our locking it: look at the name again.
                if self.path.exists() and os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)
                    os.fsync(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _try_lock(self, descriptor: int) -> bool:
        """Lock the file and return True, or return False if this file system has no locks."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(_read_owner(descriptor)) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            return False
        return True

    def _is_alive(self, owner: Owner, descriptor: int, *, exclusive: bool) -> bool:
        if owner.host == socket.gethostname():
            return not exclusive and owner.pid != os.getpid() and process_exists(owner.pid)
        logger.warning(
            "%s names process %d on host %s; watching %.0f s for a sign of life",
            self.path,
            owner.pid,
            owner.host,
            HEARTBEATS_TO_MISS * self._heartbeat_s,
        )
        # Changes of the stamp count, not its age: clocks of two hosts may differ by more than a heartbeat.
        before = os.fstat(descriptor).st_mtime_ns
        for _ in range(HEARTBEATS_TO_MISS):
            time.sleep(self._heartbeat_s)
            if self._read_time_stamp() not in (before, None):
                return True
        return False

    def _read_time_stamp(self) -> int | None:
        """Return the lock file's time stamp in nanoseconds, None if it is gone."""
        # opened anew: network file systems answer a plain stat from their cache
        try:
            with self.path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _beat(self, descriptor: int) -> None:
        """Change the lock file's time stamp until the lock is released: the heartbeat that other hosts watch for."""
        while not self._stopped.wait(self._heartbeat_s):
            try:
                os.utime(descriptor)
            except OSError as error:
                logger.warning("%s: no sign of life can be given: %s", self.path, error.strerror)

    def _refusal(self, owner: Owner | None) -> PhalanxError:
        who = f"process {owner.pid} on host {owner.host} (since {owner.since})" if owner else "another process"
        return self._error(f"{self.path.parent} is in use by {who}; end it first, or choose another {self._option}")


def _read_owner(descriptor: int) -> Owner | None:
    """Return the owner that a lock file names; None if it is empty or says nothing that makes sense."""
    try:
        fields = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(str(fields["host"]), int(fields["pid"]), str(fields["since"]))
    except (ValueError, KeyError, TypeError):
        return None


def process_exists(pid: int) -> bool:
    """Return whether a process of this host has this number, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _forget_in_child() -> None:
    """Close the locks of the parent in a forked worker, which must not keep them alive after the parent's death."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
