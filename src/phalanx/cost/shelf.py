"""Results of slow functions in the user's cache, for later processes that run the same code.

Tracing the blocks of a model takes half of a plan's time, and gives the same for the same settings as long as neither this
package nor PyTorch changes: a digest of both is in the folder's name. Results lie there pickled, so it must be the user's
own. It only ever saves time: what cannot be read or written is computed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pickle
import platform
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.files import user_cache

MOST = 2000
"""Results a shelf holds; with more the older half goes."""
_DIGEST = 32
"""Bytes of a digest, with which each file begins."""

_open: Shelf | None = None


class Shelf:
    """Results by what `repr` says of their keys, which must be all that they depend on besides the code."""

    def __init__(self, folder: Path) -> None:
        """folder: of this code's results; made when the first one is kept."""
        self.folder = folder

    def find(self, keys: Iterable[Any]) -> dict[Any, Any]:
        """The results of those that are here and whole."""
        if not self._ours():
            return {}
        collects = gc.isenabled()
        # Thousands of small objects, none of which is garbage: looking for that takes longer than reading them.
        gc.disable()
        try:
            read = ((key, self._read(key)) for key in keys)
            return {key: result for key, result in read if result is not None}
        finally:
            if collects:
                gc.enable()

    def keep(self, results: Mapping[Any, Any]) -> None:
        """Keep these, for which there may be no room or no right: then not."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._ours():
                return
            self._make_room(len(results))
            for key, result in results.items():
                packed = zlib.compress(pickle.dumps((repr(key), result), pickle.HIGHEST_PROTOCOL), 1)
                # One that is not written to its end is told by its digest.
                self._path(key).write_bytes(hashlib.sha256(packed).digest() + packed)

    def _read(self, key: Any) -> Any:
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
            return None
        said, result = pickle.loads(zlib.decompress(content[_DIGEST:]))
        return result if said == repr(key) else None

    def _path(self, key: Any) -> Path:
        return self.folder / hashlib.sha256(repr(key).encode()).hexdigest()

    def _ours(self) -> bool:
        """Whether nobody else can have put anything here."""
        try:
            found = self.folder.stat()
        except OSError:
            return False
        return found.st_uid == os.getuid() and not found.st_mode & 0o022

    def _make_room(self, more: int) -> None:
        for other in self.folder.parent.glob(f"{self.folder.name.partition('-')[0]}-*"):
            if other != self.folder:
                # Of code that has changed since.
                shutil.rmtree(other, ignore_errors=True)
        files = sorted(self.folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: len(files) // 2] if len(files) + more > MOST else []:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def shelf() -> Iterator[None]:
    """Have results kept, and those of earlier processes found, in here."""
    global _open
    before, _open = _open, Shelf(user_cache() / f"traces-{_digest_of_code()}")
    try:
        yield
    finally:
        _open = before


def open_shelf() -> Shelf | None:
    """The one that is open, if any."""
    return _open


@cache
def _digest_of_code() -> str:
    found = hashlib.sha256(f"{torch.__version__} {platform.python_version()} {platform.machine()}".encode())
    folder = Path(phalanx.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        found.update(f"\0{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:24]
