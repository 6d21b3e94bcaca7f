"""Prepared folders: written once, whole or absent, and described by a manifest with a checksum of every file.

    manifest.json   what the folder holds; it is written last, so a folder with a manifest is complete
    ...             the files that it lists
    .work/          what an interrupted preparation has done so far

A family says what its manifest lists and how its files are made; everything about locks, interruptions, full disks and
altered files stands here. This module knows neither text, fields nor structures.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.errors import DataError
from phalanx.files import clear_halves, write_atomically
from phalanx.launch.parent import interrupts_ignored
from phalanx.locks import FolderLock
from phalanx.remote_files import remote_file

MANIFEST = "manifest.json"
Count = Annotated[int, Field(ge=0)]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_LOCK = ".prepare.lock"
_WORK = ".work"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ModelT = TypeVar("ModelT", bound=BaseModel)


class Part(BaseModel):
    """Part of a manifest: unknown fields are refused, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FileRecord(Part):
    """One file: its name in the folder, its size and its checksum."""

    name: _FileName
    bytes: Count
    sha256: _Sha256


class FolderManifest(Part):
    """The manifest of a folder, which is whole once it is there."""

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, after all files that it lists."""
        write_atomically(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")


class PlannedManifest(Protocol):
    """A manifest that says which preparation it is the result of."""

    @property
    def plan(self) -> str:
        """Return a hash of the inputs and options."""

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`."""


ManifestT = TypeVar("ManifestT", bound=PlannedManifest)


def prepare_once(
    out: Path,
    plan: str,
    *,
    read: Callable[[Path], ManifestT],
    build: Callable[[Path], tuple[ManifestT, Sequence[Path]]],
    results: Sequence[str],
    option: str,
    otherwise: str,
    again: str,
) -> ManifestT:
    """Prepare the folder `out` unless that is done already, and return its manifest.

    plan: a hash of all that the result depends on; an interrupted preparation is resumed where its plan is the same.
    read: reads and checks the manifest of a folder. build: makes the files in the work folder that it is given, keeping
    there what a later call can resume from, and returns the manifest with the files that belong into `out`. results:
    patterns of the names of those files. option: what names `out`, an option or a field of the run file. otherwise: what
    `out` holds where its plan is another one, after "FOLDER". again: how to resume, as in "run the same command again".

    Raises DataError where `out` holds other data or files, is in use by another process, or cannot be written.
    """

    def read_finished() -> ManifestT | None:
        if not (out / MANIFEST).exists():
            return None
        manifest = read(out)
        if manifest.plan != plan:
            raise DataError(f"{out} {otherwise}; delete it or choose another {option}")
        # A process that was killed between the manifest and the end left its work folder.
        shutil.rmtree(out / _WORK, ignore_errors=True)
        return manifest

    try:
        manifest = read_finished()
        if manifest is not None:
            return manifest
        if out.exists() and not out.is_dir():
            raise DataError(f"{out} is a file; choose another {option}")
        # Two preparations of one folder would write the same work files.
        with FolderLock(out / _LOCK, DataError, option):
            # Another process may have done it all before this one got the lock.
            manifest = read_finished()
            if manifest is not None:
                return manifest
            work = _claim_work_folder(out, plan, results, option)
            try:
                manifest, files = build(work)
            finally:
                # Where one worker fails, the others are ended in the midst of a file: what they hold of a full disk goes.
                clear_halves(work)
            _publish_results(out, work, manifest, files)
            return manifest
    except OSError as error:
        remedy = "make room" if error.errno in _NO_ROOM else "put that right"
        raise DataError(
            f"{error.filename or out}: {error.strerror or error}; {remedy} and {again}, which goes on with what is done, "
            f"or choose another {option}"
        ) from error


def _claim_work_folder(out: Path, plan: str, results: Sequence[str], option: str) -> Path:
    """Return the work folder of `out`: with what was done under the same plan, or emptied of what another plan left."""
    work = out / _WORK
    marker = work / "plan"
    # An interrupted call may have moved some of the results already.
    moved = [path for pattern in results for path in out.glob(pattern)] if work.exists() else []
    if marker.exists() and marker.read_text() == plan:
        clear_halves(work)
        for path in moved:
            path.replace(work / path.name)
        return work
    if work.exists():
        shutil.rmtree(work)
        for path in moved:
            path.unlink()
    elif others := sorted(path.name for path in out.iterdir() if not path.name.startswith(".")):
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise DataError(f"{out} holds other files ({shown}); choose another {option}, or an empty folder")
    work.mkdir()
    write_atomically(marker, plan)
    return work


def _publish_results(out: Path, work: Path, manifest: PlannedManifest, files: Sequence[Path]) -> None:
    """Move `files` from the work folder into `out`, write the manifest that completes it, and remove the work folder."""
    # Both folders lie in one file system, so each file appears whole; the manifest comes after all of them.
    for file in files:
        file.replace(out / file.name)
    manifest.write(out)
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def worker_processes(
    count: int, *, start: Callable[[], None] | None = None, preload: Sequence[str] = (), again: str
) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of `count` processes that outlive neither the block nor this process, however these end.

    start: what each process calls first, picklable. preload: modules imported once, by the server that processes are
    forked from. again: how to resume after a process was killed, as in "run the same command again". Raises DataError for
    that.
    """
    # Only this process holds the writing end: workers wake and end when it closes, even if this process is killed.
    held, leash = multiprocessing.Pipe(duplex=False)
    # Not fork: threads of torch and numpy do not survive it.
    context = multiprocessing.get_context("forkserver")
    if preload:
        context.set_forkserver_preload(list(preload))
    # Workers are forked from a server process, whose setting they inherit.
    with interrupts_ignored():
        forkserver.ensure_running()
    pool = ProcessPoolExecutor(count, context, _start_worker, (held, start))
    try:
        yield pool
        pool.shutdown()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process was killed, mostly for lack of memory; what is done is kept: {again}"
        ) from error
    finally:
        # Ends workers in the midst of a piece: its file is only put in place when it is whole.
        leash.close()
        pool.shutdown(cancel_futures=True)
        held.close()


def _start_worker(leash: Connection, start: Callable[[], None] | None) -> None:
    """Leave Ctrl-C to the parent, and end when the parent does."""

    def end_with_parent() -> None:
        # Nothing is ever sent: this wakes when the parent's end is closed, however that came about.
        leash.poll(None)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if start is not None:
        start()


SAMPLE = "sample.json"


class SampleManifest(Part):
    """What `phalanx data sample` wrote into a folder."""

    format: Literal["phalanx-sample"] = "phalanx-sample"
    kind: str
    seed: int
    files: list[FileRecord]


def write_sample(
    folder: Path, kind: str, seed: int, names: Sequence[str], make: Callable[[Path], None]
) -> SampleManifest:
    """Have `make` write the files `names` and put them, with a record of their checksums, into `folder`; return the record.

    make: called with a folder to write to, from which files move when all of them are whole. Raises DataError where one is
    there already or cannot be written.
    """
    present = next((folder / name for name in names if (folder / name).exists()), None)
    if present is not None:
        raise DataError(f"{present} is already there; remove it or name another folder")
    work = folder / _WORK
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        make(work)
        manifest = SampleManifest(kind=kind, seed=seed, files=[file_record(work / name) for name in names])
        for name in names:
            # The record comes last: files without it are of an interrupted call.
            (work / name).replace(folder / name)
        write_atomically(folder / SAMPLE, manifest.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror or error}; name another --out DIR") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def read_checked(path: Path, model: type[ModelT], *, missing: str, malformed: str | None = None) -> ModelT:
    """Read the JSON file `path` as `model`. missing, malformed: what a message advises in either case.

    Raises DataError naming the file and the first field that is wrong.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; {missing}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise DataError(f"{path}: {where}: {first['msg']}" + (f"; {malformed}" if malformed else "")) from None


def file_record(path: Path) -> FileRecord:
    """Return name, size and checksum of a file that was just written."""
    with path.open("rb") as file:
        # SHA-256, not a CRC: files may be altered on purpose as well as by a faulty disk.
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(name=path.name, bytes=path.stat().st_size, sha256=digest)


def check_size(folder: Path, record: FileRecord) -> Path:
    """Return the path of a file of `folder`. Raises DataError where it is missing or not as long as the manifest says."""
    path = folder / record.name
    # Lengths of remote files were compared when their folder was opened.
    if remote_file(path) is not None:
        return path
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; the manifest lists it with {record.bytes} bytes") from error
    if found != record.bytes:
        raise DataError(f"{path}: {found} bytes found, {record.bytes} expected; the file is truncated or altered")
    return path


def check_still_whole(path: Path, length: int) -> None:
    """Raise DataError unless a mapped file still has its `length` bytes; call this each time before reading the map.

    Reading a map beyond the end of its file ends the process by a signal, without a word.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; it was there when the run began") from error
    if found < length:
        raise DataError(f"{path}: {found} bytes found, {length} expected; the file was cut short while it was read")


def check_content(folder: Path, record: FileRecord) -> None:
    """Read a whole file of `folder`. Raises DataError where its checksum is not the manifest's."""
    path = check_size(folder, record)
    remote = remote_file(path)
    if remote is not None:
        remote.verify()
        return
    found = file_record(path).sha256
    if found != record.sha256:
        raise DataError(f"{path}: sha256 {found} found, {record.sha256} expected; the file was altered")
