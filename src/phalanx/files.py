"""Files that no reader, and no crash, meets half of: replaced as a whole, or logs of one JSON object a line.

A log may end in half a line, which a kill left, and may hold lines that a crash or a faulty disk has damaged. Neither keeps
the sound lines from being read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import ConfigError, PhalanxError

TEMPORARY = ".writing-"
"""Beginning of the names of files that are not whole yet; a process that was killed may leave one."""


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends; a crash leaves the old one."""
    # In the same folder: a rename is atomic within one file system only.
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            # Before the rename: after a loss of power the name would otherwise stand for an empty file.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` when the block ends; nothing stays where the block fails."""
    # Beside its place, so that the rename stays within one file system.
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` at the end; nothing stays where that fails.

    Raises ConfigError if `path` is already in use, PhalanxError if it cannot be written.
    """
    refuse_used(path)
    path = path.absolute()
    try:
        with whole_folder(path) as folder:
            yield folder
    except OSError as error:
        raise PhalanxError(f"{path} cannot be written: {error.strerror}; nothing was left there") from error


def refuse_used(path: Path) -> None:
    """Raise ConfigError if there is something at `path` that could be lost."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} already exists and is not an empty folder; give another name, or remove it first")


def open_own_file(path: Path) -> BinaryIO:
    """Open a file of a run's folder for reading. Raises PhalanxError for a link and for what is no regular file, without
    waiting for either, and OSError for what cannot be opened."""
    require_own(path, folder=False)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb")


def require_own(path: Path, *, folder: bool) -> None:
    """Refuse what stands in the place of a run's own file or folder: a link, whose target may be anyone's, and anything of
    another kind. Nothing there is fine. Raises PhalanxError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise PhalanxError(
            f"{path} is a link to {os.readlink(path)}; a run reads and writes nothing through links inside its folder: "
            f"remove it, or keep the whole run folder elsewhere and link that"
        )
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        raise PhalanxError(f"{path} is {kind_in_words(mode)}, not a {'folder' if folder else 'file'}; move it away")


def require_replaceable(file: Path) -> None:
    """Refuse to replace what is no file, such as a device, by one. Raises ConfigError."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is {kind_in_words(file.stat().st_mode)}: name the file to write")


def kind_in_words(mode: int) -> str:
    """Return what to call a file of this mode in a message."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFLNK: "a link",
    }
    return kinds.get(stat.S_IFMT(mode), "a file")


def clear_halves(folder: Path) -> None:
    """Remove the halves of files that killed processes left in `folder`."""
    for left in folder.glob(f"{TEMPORARY}*"):
        left.unlink()


def user_cache() -> Path:
    """Return the folder of what this user's processes keep for later ones, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`; a crash leaves the old file or the new one. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(text.encode("utf-8"))


def replace_nonfinite(value: Any) -> Any:
    """Return the same plain value with None for numbers that JSON cannot hold (NaN, infinities)."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


MAX_LINE_BYTES = 1 << 22
"""A longer line is damaged: no metrics or event, samples included, has as much to say."""
_TAIL_BYTES = 8192
"""Bytes that are read of a file of which only the last record is wanted."""
_SHOWN = 5
"""Damaged lines that a message names before it only counts them."""


@dataclass(frozen=True)
class SoundLine:
    """A line that holds a JSON object."""

    number: int
    """From 1."""
    text: bytes
    """Without its end."""
    record: dict[str, Any]


@dataclass(frozen=True)
class DamagedLine:
    """A line that does not hold one, or holds one that its file should not."""

    number: int
    text: bytes
    problem: str
    """What is wrong with it, as it follows "the line"."""


@dataclass(frozen=True)
class JsonLinesFile:
    """What a file of JSON lines holds."""

    path: Path
    sound: list[SoundLine]
    damaged: list[DamagedLine]
    torn: DamagedLine | None
    """A last line without its end that is no whole object, as a kill leaves it."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """Return the objects, in the order of their lines."""
        return [line.record for line in self.sound]

    def describe_damage(self) -> str:
        """Return how many lines are damaged, which, and what is wrong with the first; at least one is."""
        count = len(self.damaged)
        numbers = ", ".join(f"{line.number:,}" for line in self.damaged[:_SHOWN])
        more = f" and {count - _SHOWN:,} more" if count > _SHOWN else ""
        words = f"{count:,} damaged line{'s' if count > 1 else ''} ({numbers}{more})"
        return f"{self.path.name}: {words}; {'the first' if count > 1 else 'it'} {self.damaged[0].problem}"


def read_json_lines(path: Path, problem_of: Callable[[dict[str, Any]], str | None] = lambda _: None) -> JsonLinesFile:
    """Read a file of JSON lines.

    problem_of: says what is wrong with an object that is not what such a file holds, or None. Raises PhalanxError for what
    is no regular file, and FileNotFoundError.
    """
    sound: list[SoundLine] = []
    damaged: list[DamagedLine] = []
    torn = None
    with open_own_file(path) as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            whole = text.endswith(b"\n")
            if not whole and len(text) > MAX_LINE_BYTES:
                # Skipped piece by piece: a file without line ends may be larger than memory.
                while part := file.readline(MAX_LINE_BYTES):
                    if part.endswith(b"\n"):
                        break
                damaged.append(DamagedLine(number, text[:1000], f"is longer than {MAX_LINE_BYTES:,} bytes"))
                continue
            found = _parse_object(text.rstrip(b"\n"))
            problem = found if isinstance(found, str) else problem_of(found)
            if not isinstance(found, str) and problem is None:
                sound.append(SoundLine(number, text.rstrip(b"\n"), found))
            elif whole or not isinstance(found, str):
                damaged.append(DamagedLine(number, text.rstrip(b"\n"), str(problem)))
            else:
                torn = DamagedLine(number, text, found)
    return JsonLinesFile(path, sound, damaged, torn)


def read_last_record(path: Path, problem_of: Callable[[dict[str, Any]], str | None]) -> dict[str, Any] | None:
    """Return the last sound record near the end of a file that may be growing; None where there is none.

    problem_of: as for `read_json_lines`.
    """
    with open_own_file(path) as file:
        # The file may be large and grow: its end is enough.
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).split(b"\n")
    # the last piece is empty, or a line that is being written; the first one may be torn by the seek
    for line in reversed(lines[:-1]):
        found = _parse_object(line)
        if not isinstance(found, str) and problem_of(found) is None:
            return found
    return None


def require_step(record: dict[str, Any]) -> str | None:
    """Return what is wrong with an object that must say of which step it is, or None."""
    step = record.get("step")
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
        return None
    return f"has step {step!r:.80}, not a whole number from 0"


def _parse_object(text: bytes) -> dict[str, Any] | str:
    """Return the JSON object that `text` holds, or what is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        return "is nested too deeply"
    except ValueError:
        return "is not JSON"
    return value if isinstance(value, dict) else "is not a JSON object"


class JsonLines:
    """A file of one JSON object a line, written line by line.

    A line that the disk has no room for waits in memory and is written before the next one: training is worth more than
    its log. Any thread may append.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        """Why lines wait; None while there are none."""
        self.removed = False
        """Whether somebody removed the file while it was written: its earlier lines are lost."""
        self._file: FileIO | None = None
        self._waiting = b""
        self._lock = threading.Lock()

    def drop_after(self, step: int, *, keep: str | None = None) -> str | None:
        """Drop objects of later steps than `step`, but for those of kind `keep`, and a last line torn by a kill.

        Damaged lines are moved to a file of their own beside this one. Returns one line that says so, or None.
        """
        self.close()
        if not self.path.exists():
            return None
        found = read_json_lines(self.path, require_step)
        stays = [
            line for line in found.sound if line.record["step"] <= step or (keep and line.record.get("kind") == keep)
        ]
        kept = b"".join(line.text + b"\n" for line in stays)
        aside = self.path.with_name(f"{self.path.name}.damaged")
        if found.damaged:
            require_own(aside, folder=False)
            with aside.open("ab") as file:
                file.writelines(line.text + b"\n" for line in found.damaged)
        # Most runs resume at their last line: nothing is rewritten then.
        if len(kept) != self.path.stat().st_size:
            with replace_file(self.path) as file:
                file.write(kept)
        return f"{found.describe_damage()}; moved to {aside}" if found.damaged else None

    def append(self, record: dict[str, Any]) -> None:
        """Add one object; it has reached the operating system when this returns, unless `failure` says why not."""
        with self._lock:
            self._waiting += json.dumps(record).encode() + b"\n"
            self._write()

    def sync(self) -> None:
        """Force what was appended onto the disk, so that no checkpoint is newer than its metrics. Raises OSError."""
        with self._lock:
            self._write()
            if self.failure is not None:
                raise self.failure
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        """Write what waits, as far as it goes."""
        try:
            while self._waiting:
                # A file that was removed can still be written, but nobody would ever read it.
                if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
                    self._file.close()
                    self._file = None
                    self.removed = True
                if self._file is None:
                    # Without a buffer of Python's, which would lose or repeat what it could not write.
                    self._file = FileIO(self.path, "a", opener=_open_no_link)
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.failure = None
        except OSError as error:
            self.failure = error


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
