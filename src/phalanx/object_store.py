"""Reads, lists and writes the files at an fsspec address (`s3://`, `gs://`, `hf://`, `https://`, ...), with a time limit."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.errors import DataError

REQUEST = 2**23
"""Most bytes of one request: neighbouring blocks are asked for together."""
_REQUESTS = 16
"""Requests under way together while a file is fetched whole."""
_UNLISTED = ("http", "https")
"""Protocols of servers that need not tell what a folder holds."""
_FINAL = (FileNotFoundError, PermissionError, ImportError, NotImplementedError, ValueError)
"""Errors that asking again does not change."""
_NO_ACCESS = ("NoCredentialsError", "PartialCredentialsError", "GatedRepoError", "RepositoryNotFoundError")
_VERSIONS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "md5",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
"""What stores tell of a file that changes with its content; the first that is there is taken."""
T = TypeVar("T")


class StoreUnavailable(DataError):
    """A store of data does not answer within the time limit; what was read before is not affected."""


@dataclass(frozen=True)
class StoredFile:
    """What is known of a file before it is read."""

    size: int
    """Bytes."""
    version: str = ""
    """Changes with the content, as far as the store tells; empty where it does not."""

    @classmethod
    def of(cls, entry: dict[str, Any]) -> StoredFile:
        """Return what an entry of fsspec tells."""
        version = next((str(entry[name]) for name in _VERSIONS if entry.get(name)), "")
        return cls(int(entry.get("size") or 0), version)


class Store:
    """The files below one address, with a time limit on every answer."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Connect. Raises DataError for an address of no known protocol."""
        self.address = address
        self._timeout_s = timeout_s
        self._protocol = address.partition("://")[0]
        try:
            fsspec = importlib.import_module("fsspec.core")
        except ImportError:
            raise DataError(f'{address} needs fsspec: pip install "phalanx-train[remote]"') from None
        self._files, self._root = self._call("", lambda: fsspec.url_to_fs(address))

    def read(self, name: str) -> bytes:
        """Return a whole small file. Raises FileNotFoundError, and DataError where the store does not answer."""
        found: bytes = self._call(name, lambda: self._files.cat_file(f"{self._root}/{name}"))
        return found

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return bytes `first` to before `last` of each named file, fetched together. Raises DataError."""
        if not ranges:
            return []
        paths = [f"{self._root}/{name}" for name, _, _ in ranges]
        starts, ends = [first for _, first, _ in ranges], [last for _, _, last in ranges]
        what = ranges[0][0]
        try:
            found: list[bytes] = self._call(what, lambda: self._files.cat_ranges(paths, starts, ends, on_error="raise"))
        except FileNotFoundError as error:
            raise DataError(f"{self.address}/{what}: not there any more ({error}); put it back") from None
        for (name, first, last), part in zip(ranges, found, strict=True):
            if len(part) != last - first:
                raise DataError(
                    f"{self.address}/{name}: {len(part)} bytes found from byte {first} on, {last - first} expected"
                )
        return found

    def stream(self, name: str, size: int) -> Iterator[bytes]:
        """Yield all content of a file of `size` bytes, some requests at a time. Raises DataError."""
        starts = list(range(0, size, REQUEST))
        for begin in range(0, len(starts), _REQUESTS):
            group = starts[begin : begin + _REQUESTS]
            yield from self.read_ranges([(name, start, min(start + REQUEST, size)) for start in group])

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whole or not at all. Raises DataError."""
        self._change(name, lambda: self._files.pipe_file(f"{self._root}/{name}", content))

    def write_file(self, name: str, path: Path, allowance_s: float) -> None:
        """Copy the local file `path` there. allowance_s: seconds it may take beyond the time limit. Raises DataError."""
        self._change(name, lambda: self._files.put_file(str(path), f"{self._root}/{name}"), allowance_s)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; one that is not there is none. Raises DataError."""
        # Gone already, of an attempt whose answer was lost.
        with suppress(FileNotFoundError):
            # Others write there as well; some clients remember what they listed before.
            self._files.invalidate_cache()
            self._call(name, lambda: self._files.rm(f"{self._root}/{name}", recursive=True))

    def _change(self, name: str, work: Callable[[], None], allowance_s: float = 0.0) -> None:
        try:
            self._call(name, work, allowance_s)
        except FileNotFoundError as error:
            raise DataError(
                f"{self.address}/{name}: not found ({_shorten(error)}); create the bucket or folder"
            ) from None

    def list_files(self) -> dict[str, StoredFile] | None:
        """Return the files below the folder by their path from there; None where the protocol cannot tell."""
        if self._protocol in _UNLISTED:
            return None
        # Others write there as well; some clients remember what they listed before.
        self._files.invalidate_cache()
        entries = self._call("", lambda: self._files.find(self._root, detail=True))
        # Names begin with the path of the folder.
        return {name[len(self._root) + 1 :]: StoredFile.of(entry) for name, entry in entries.items()}

    def find_file(self, name: str) -> StoredFile | None:
        """Return what the store tells of one file; None where it is not there. Raises DataError."""
        try:
            entry = self._call(name, lambda: self._files.info(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        return StoredFile.of(entry) if entry.get("type") != "directory" else None

    def list_folders(self, name: str) -> list[str]:
        """Return the names of the folders in the folder `name`; none where it is not there."""
        try:
            entries = self._call(name, lambda: self._files.ls(f"{self._root}/{name}".rstrip("/"), detail=True))
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    def _call(self, name: str, work: Callable[[], T], allowance_s: float = 0.0) -> T:
        """Return what `work` gives, asked again until the time limit. Raises FileNotFoundError, DataError."""
        where = f"{self.address}/{name}".rstrip("/")
        deadline, pause = time.monotonic() + self._timeout_s + allowance_s, 0.25
        while True:
            try:
                return _call_within(deadline - time.monotonic(), work)
            except Exception as error:
                # Asking again helps against neither wrong credentials nor a missing package, only against time-outs.
                refused = isinstance(error, PermissionError) or type(error).__name__ in _NO_ACCESS
                if refused:
                    raise DataError(
                        f"{where}: access refused ({_shorten(error)}); set the credentials that fsspec takes for "
                        f"{self._protocol}://"
                    ) from None
                if isinstance(error, FileNotFoundError):
                    raise
                if isinstance(error, _FINAL):
                    raise DataError(
                        f'{where}: {_shorten(error)}; pip install "phalanx-train[remote]" brings s3:// and https://, other '
                        f"protocols need the fsspec package of their own"
                    ) from None
                if time.monotonic() + pause >= deadline:
                    raise StoreUnavailable(
                        f"{where}: the store did not answer within {self._timeout_s:g} s ({_shorten(error)}); check the "
                        f"address, the network and the store's endpoint, or raise remote.timeout_s"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 8.0)


def _call_within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` gives. Raises TimeoutError where that takes longer: clients may wait for ever."""
    done: queue.SimpleQueue[tuple[list[T], Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(([work()], None))
        except Exception as error:
            done.put(([], error))

    # A daemon: a request that never ends must not keep the process.
    threading.Thread(target=run, name="remote-request", daemon=True).start()
    try:
        values, error = done.get(timeout=max(seconds, 0.01))
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return values[0]


def _shorten(error: Exception) -> str:
    """Return the first line of an error, or its type where it says nothing."""
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
