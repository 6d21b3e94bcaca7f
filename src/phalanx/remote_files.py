"""Folders of files at an fsspec address (`s3://`, `gs://`, `hf://`, `https://`, ...), read through a bounded cache on disk.

A remote folder is known by its manifest, which is fetched when the folder is opened into a local folder that stands for it;
for formats without a manifest of ours the caller says which files there are (`remote_folder`).
Large files are read block by block, or whole, when they are asked for; what was read is kept by content, so that ranks of a
machine, runs and copies of the data elsewhere share it. Local paths pass through unchanged. This module knows neither text,
fields, structures nor checkpoints.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from phalanx.errors import DataError
from phalanx.files import user_cache, whole_folder, write_atomically
from phalanx.object_store import REQUEST, Store, StoredFile

BLOCK = 2**17
"""Bytes fetched and kept at a time: a sample of tokens is a few kilobytes, and every one lies somewhere else."""
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-[0-9]{8,18}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class CacheLimits:
    """Where and how much of remote files is kept on this machine, and how long a store may take to answer."""

    folder: Path
    max_bytes: int = 16 * 10**9
    timeout_s: float = 60.0


@dataclass
class _Process:
    """What this process shares: the limits of its run, its open folders, and what it wrote since it last made room."""

    limits: CacheLimits
    folders: dict[Path, RemoteFolder]
    unswept: int


_PROCESS = _Process(CacheLimits(user_cache() / "remote"), {}, 0)


def use_cache(folder: str | None, max_gb: float, timeout_s: float) -> None:
    """Set the limits for folders that this process opens from now on. folder: None takes the user's cache."""
    root = user_cache() / "remote" if folder is None else Path(folder).expanduser()
    _PROCESS.limits = CacheLimits(root, int(max_gb * 1e9), timeout_s)


def is_remote(address: str) -> bool:
    """Return whether `address` names a place that is no path of this machine."""
    return "://" in address and not address.startswith("file://")


def local_path(address: str) -> Path:
    """Return the path that stands for `address`: itself where it is local, else the folder that holds its manifest.

    Files of a remote folder are not there: `remote_file` finds them. Raises DataError where the store does not answer, or no
    folder with a manifest is there.
    """
    if not is_remote(address):
        return Path(unquote(address.removeprefix("file://"))) if address.startswith("file://") else Path(address)
    path = _stand_in(address)
    if path not in _PROCESS.folders:
        _PROCESS.folders[path] = _open_prepared(address.rstrip("/"), path)
    return path


def remote_folder(address: str, texts: Mapping[str, bytes], files: Mapping[str, StoredFile]) -> Path:
    """Return the path that stands for the folder at `address`, whose content the caller knows.

    texts: small files that are to lie at that path. files: others, by their path from there. What was said of the same
    folder before still counts.
    """
    path = _stand_in(address)
    if path not in _PROCESS.folders:
        _PROCESS.folders[path] = RemoteFolder(address.rstrip("/"), path, _PROCESS.limits)
    folder = _PROCESS.folders[path]
    for name, stored in files.items():
        # Without a checksum of its content a file is kept under where it is from, and what the store says of it.
        key = hashlib.sha256(f"{folder.address}/{name} {stored.size} {stored.version}".encode()).hexdigest()
        folder.files[name] = RemoteFile(folder, name, stored.size, key, None)
    folder.write_texts(texts)
    return path


def opened_folder(address: str) -> Path | None:
    """Return the path that stands for a remote folder that this process opened before, else None."""
    path = _stand_in(address)
    return path if path in _PROCESS.folders else None


def open_store(address: str) -> Store:
    """Return the store at `address`, with the time limit of this process. Raises DataError."""
    return Store(address.rstrip("/"), _PROCESS.limits.timeout_s)


def _stand_in(address: str) -> Path:
    """Return the local path that stands for the folder at `address`."""
    digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:12]
    # The words of the address, so that messages that name the path can be read.
    words = [part for part in re.split(r"[^A-Za-z0-9._-]+", address) if part.strip(".")]
    return _PROCESS.limits.folder / "folders" / digest / "/".join(words)


def remote_file(path: Path) -> RemoteFile | None:
    """Return the remote file that `path` stands for; None where it is a file of this machine."""
    for parent in path.parents:
        folder = _PROCESS.folders.get(parent)
        if folder is not None:
            return folder.files.get(path.relative_to(parent).as_posix())
    return None


def is_file(path: Path) -> bool:
    """Return whether `path` is a file, or stands for a remote one."""
    return path.is_file() or remote_file(path) is not None


def is_kept_elsewhere(path: Path) -> bool:
    """Return whether `path` stands for remote data: to verify it as a run begins would read all of it."""
    return _PROCESS.limits.folder / "folders" in path.parents


def local_copy(path: Path) -> Path:
    """Return `path`, or a local copy of the whole file where it stands for a remote one."""
    remote = remote_file(path)
    return path if remote is None else remote.fetch()


def weights_path(address: str) -> Path:
    """Return the run directory or checkpoint at `address`: itself where it is local, else a copy of the newest checkpoint.

    address: of a run directory, its checkpoints/ folder, or one checkpoint. Files beside the checkpoints that say what the
    weights are for come with it. Raises DataError where the store does not answer or no checkpoint is there.
    """
    if not is_remote(address):
        return local_path(address)
    limits = _PROCESS.limits
    address = address.rstrip("/")
    top, _, name = address.rpartition("/")
    if not _STEP.fullmatch(name):
        store = Store(address, limits.timeout_s)
        found = [(f"{inner}{one}", one) for inner in ("checkpoints/", "") for one in store.list_folders(inner)]
        steps = sorted(
            ((one, place) for place, one in found if _STEP.fullmatch(one)), key=lambda pair: int(pair[0][5:])
        )
        # A folder without its manifest was not uploaded whole.
        whole = (place for _, place in reversed(steps) if store.find_file(f"{place}/{_MANIFEST}") is not None)
        newest = next(whole, None)
        if newest is None:
            raise DataError(f"{address}: no checkpoint there; name a run directory or one step-... folder of it")
        top, _, name = f"{address}/{newest}".rpartition("/")
    root = limits.folder / "runs" / hashlib.sha256(top.encode()).hexdigest()[:12]
    target = root / "checkpoints" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whole or absent, as checkpoints are; checkpoints verify what is read of them themselves.
    with _lock_folder(root / ".lock"):
        if not target.exists():
            _fetch_checkpoint(Store(f"{top}/{name}", limits.timeout_s), target)
            # Small files that belong to the weights.
            store = Store(top.removesuffix("/checkpoints"), limits.timeout_s)
            for name in ("tokenizer/tokenizer.json", "elements.json"):
                # Not every family has each.
                with suppress(FileNotFoundError):
                    write_atomically(root / name, store.read(name).decode())
    return target


def _fetch_checkpoint(store: Store, target: Path) -> None:
    """Copy the checkpoint at `store` to the folder `target`, which appears when it is whole."""
    try:
        manifest = store.read(_MANIFEST)
        listed = json.loads(manifest)
        sizes = {str(file["name"]): int(file["bytes"]) for file in listed["files"]}
        sizes["state.json"] = int(listed["state"]["bytes"])
    except FileNotFoundError:
        raise DataError(
            f"{store.address}: no checkpoint there; name a run directory or one step-... folder of it"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{store.address}/{_MANIFEST}: not of a checkpoint ({error}); copy the checkpoint again"
        ) from None
    with whole_folder(target) as halves:
        (halves / _MANIFEST).write_bytes(manifest)
        for name, size in sizes.items():
            if not _FILE_NAME.fullmatch(name):
                raise DataError(
                    f"{store.address}/{_MANIFEST}: {name!r} is no name of a file; copy the checkpoint again"
                )
            with (halves / name).open("wb") as out:
                for part in store.stream(name, size):
                    out.write(part)


def _open_prepared(address: str, path: Path) -> RemoteFolder:
    """Return the prepared folder at `address`; its manifest is fetched to `path`. Raises DataError, see `local_path`."""
    folder = RemoteFolder(address, path, _PROCESS.limits)
    try:
        text = folder.store.read(_MANIFEST)
        records = list(_file_records(json.loads(text)))
    except FileNotFoundError:
        raise DataError(
            f"{address}: no {_MANIFEST} there; name a folder that `phalanx data` prepared, copied whole to the store"
        ) from None
    except ValueError as error:
        raise DataError(f"{address}/{_MANIFEST} is no JSON ({error}); copy the prepared folder again") from None
    folder.files = {name: RemoteFile(folder, name, size, sha256, sha256) for name, size, sha256 in records}
    listed = folder.store.list_files()
    for file in folder.files.values() if listed is not None else ():
        # As when a local folder is opened: what is missing is found now, and not after days.
        found = (listed or {}).get(file.name)
        if found is None or found.size != file.size:
            what = "nothing" if found is None else f"{found.size} bytes"
            raise DataError(f"{file}: {what} found, {file.size} bytes expected; copy the prepared folder again")
    folder.write_texts({_MANIFEST: text})
    return folder


class RemoteFolder:
    """A folder at an address, with the files that are known to be there."""

    def __init__(self, address: str, path: Path, limits: CacheLimits) -> None:
        """Connect to the store. path: what stands for the folder on this machine. Raises DataError."""
        self.address = address
        self.path = path
        self.limits = limits
        self.store = Store(address, limits.timeout_s)
        self.files: dict[str, RemoteFile] = {}

    def write_texts(self, texts: Mapping[str, bytes]) -> None:
        """Put small files where the folder's path stands for it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, content in texts.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / name, content.decode())

    def read_ranges(self, wanted: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
        """Return bytes `first` to before `last` of files of this folder; blocks that are not kept are fetched together.

        Raises StoreUnavailable where some are missing and the store does not answer.
        """
        needed = [[(file, block) for block in range(first // BLOCK, -(-last // BLOCK))] for file, first, last in wanted]
        blocks = {key: key[0].kept_block(key[1]) for keys in needed for key in keys}
        missing = sorted((key for key, kept in blocks.items() if kept is None), key=lambda key: (key[0].name, key[1]))
        blocks.update(self._fetch_blocks(missing))
        found = []
        for (_, first, last), keys in zip(wanted, needed, strict=True):
            begin = first // BLOCK * BLOCK
            found.append(b"".join(blocks[key] or b"" for key in keys)[first - begin : last - begin])
        return found

    def _fetch_blocks(self, keys: list[tuple[RemoteFile, int]]) -> dict[tuple[RemoteFile, int], bytes]:
        """Fetch these blocks, in order of their places, and keep them."""
        runs: list[tuple[RemoteFile, int, int]] = []
        for file, block in keys:
            first, last = block * BLOCK, min((block + 1) * BLOCK, file.size)
            if runs and runs[-1][0] is file and runs[-1][2] == first and last - runs[-1][1] <= REQUEST:
                runs[-1] = (file, runs[-1][1], last)
            else:
                runs.append((file, first, last))
        fetched = self.store.read_ranges([(file.name, first, last) for file, first, last in runs])
        found: dict[tuple[RemoteFile, int], bytes] = {}
        for (file, first, _), content in zip(runs, fetched, strict=True):
            for start in range(0, len(content), BLOCK):
                part = content[start : start + BLOCK]
                number = (first + start) // BLOCK
                file.keep_block(number, part)
                found[file, number] = part
        return found


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """One file of a remote folder."""

    folder: RemoteFolder
    name: str
    size: int
    """Bytes."""
    key: str
    """What no other content is kept under."""
    sha256: str | None
    """Checksum of the content; None where nothing says it."""

    def __str__(self) -> str:
        return f"{self.folder.address}/{self.name}"

    def read(self, first: int, last: int) -> bytes:
        """Return bytes from `first` to before `last`. Raises StoreUnavailable; see `RemoteFolder.read_ranges`."""
        return self.folder.read_ranges([(self, first, last)])[0]

    def fetch(self) -> Path:
        """Return a local copy of the whole file, checked against its checksum. Raises DataError."""
        return keep_file(self.key, Path(self.name).name, self.size, self._checked_content, self.folder.limits)

    def verify(self) -> None:
        """Read the whole file from the store. Raises DataError where its checksum is not the one that is known."""
        for _ in self._checked_content():
            pass

    def kept_block(self, number: int) -> bytes | None:
        """Return a block that is kept on this machine, or None."""
        path = self._block(number)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        # After a power failure a file may have its length and not its content.
        checksum, content = content[:4], content[4:]
        whole = len(content) == min(BLOCK, self.size - number * BLOCK)
        return content if whole and zlib.crc32(content).to_bytes(4, "little") == checksum else None

    def keep_block(self, number: int, content: bytes) -> None:
        """Keep a block on this machine; a disk that is full keeps none, and the block is fetched again when needed."""
        path = self._block(number)
        halves = path.with_name(f".{number}.{os.getpid()}.{threading.get_ident()}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            halves.write_bytes(zlib.crc32(content).to_bytes(4, "little") + content)
            halves.replace(path)
        _make_room(self.folder.limits, len(content))

    def _block(self, number: int) -> Path:
        return self.folder.limits.folder / "blocks" / self.key[:2] / self.key / str(number)

    def _checked_content(self) -> Iterator[bytes]:
        """Yield all content. Raises DataError at its end where the checksum is not the one that is known."""
        digest = hashlib.sha256()
        for part in self.folder.store.stream(self.name, self.size):
            digest.update(part)
            yield part
        if self.sha256 is not None and digest.hexdigest() != self.sha256:
            raise DataError(f"{self}: sha256 {digest.hexdigest()} found, {self.sha256} expected; the file was altered")


def _file_records(node: Any) -> Iterator[tuple[str, int, str]]:
    """Yield name, size and checksum of all files that a manifest lists, wherever in it."""
    if isinstance(node, dict):
        name, size, sha256 = node.get("name"), node.get("bytes"), node.get("sha256")
        if isinstance(name, str) and isinstance(size, int) and isinstance(sha256, str):
            # They become names of files here.
            if not _FILE_NAME.fullmatch(name) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
                raise ValueError(f"{name!r} is no record of a file")
            yield name, size, sha256
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _file_records(item)


def keep_file(
    key: str, name: str, size: int, content: Callable[[], Iterator[bytes]], limits: CacheLimits | None = None
) -> Path:
    """Return a file of `size` bytes that is kept in the cache, made of `content` where it is not there.

    key: a hash that no other content has. name: of the file. limits: by default those of the run.
    """
    limits = limits or _PROCESS.limits
    path = limits.folder / "files" / key[:2] / key / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # One rank of a machine makes it; the others wait.
    with _lock_folder(path.parent / ".lock"):
        if not (path.exists() and path.stat().st_size == size):
            halves = path.with_name(".halves")
            with halves.open("wb") as out:
                out.writelines(content())
            halves.replace(path)
            _make_room(limits, size)
        # What was used last is kept longest.
        path.touch()
    return path


@contextmanager
def _lock_folder(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_room(limits: CacheLimits, written: int) -> None:
    """Delete what was used longest ago, where more is kept than the limits allow. written: bytes kept just now."""
    _PROCESS.unswept += written
    # Looking through the folder takes a while: done once in a 32nd of its size, by every process that writes.
    if _PROCESS.unswept < limits.max_bytes // 32:
        return
    _PROCESS.unswept = 0
    kept: list[tuple[float, int, Path]] = []
    for kind in ("blocks", "files"):
        for path in (limits.folder / kind).glob("*/*/*"):
            # Another process may have deleted it.
            with suppress(OSError):
                status = path.stat()
                kept.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= limits.max_bytes * 0.9:
            break
        with suppress(OSError):
            # A file that is mapped stays readable until it is closed.
            path.unlink()
        total -= size
