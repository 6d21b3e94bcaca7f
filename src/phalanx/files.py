"""Writing files so that a reader, or a crash, never meets half of one, and what JSON files can hold."""

from __future__ import annotations

import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import ConfigError, PhalanxError

TEMPORARY = ".writing-"
"""Beginning of the names of files that are not whole yet; a process that was killed may leave one."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends; a crash leaves the old one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` when the block ends; nothing stays where the block fails."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def replace_nonfinite(value: Any) -> Any:
    """Return the same plain value with None for numbers that JSON cannot hold (NaN, infinities)."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
