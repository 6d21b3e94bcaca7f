"""The folders of checkpoints on disk: their names, changed so that a kill at any moment does no harm, and reading them.

    step-00000120               a whole checkpoint
    step-00000120.writing       being written; worthless once its writer is gone
    step-00000120.replaced      the former checkpoint of a step saved again, until the new one has its name
    step-00000120.deleting      no longer kept
    step-00000120.superseded    of a run that resumed from an earlier step and passed this one; never deleted by Phalanx
    step-00000120.nonfinite     holds weights with which the next step was not finite; never deleted by Phalanx

A folder becomes a checkpoint by being renamed, and stops being one by being renamed; only folders that are no checkpoints
are ever changed or deleted. One process at a time does this: rank 0 of the run that holds run.lock.

What is read is not trusted: files are opened by plain name relative to the open folder, never through a link, and only if
they are regular files. All reading and writing of checkpoints on a file system is here.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_NESTED,
    MAX_STATE_BYTES,
    STATE_NAME,
    Chunk,
    FileRecord,
    Manifest,
    TensorRecord,
    compute_checksum,
    count_bytes,
    max_nested_of_table,
    parse_json,
    parse_manifest,
    parse_step,
    step_name,
)
from phalanx.errors import CheckpointDamaged

WRITING, REPLACED, DELETING, SUPERSEDED = ".writing", ".replaced", ".deleting", ".superseded"
NONFINITE = ".nonfinite"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A published checkpoint: the step it was taken after, and its folder."""

    step: int
    path: Path


def list_published(root: Path) -> list[Checkpoint]:
    """Return the checkpoint folders in `root`, newest first by step, never by time stamp, without opening them."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        # A link is never followed: what it points to may change behind the manifest's back.
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    found = [Checkpoint(step, root / name) for name in names if (step := parse_step(name)) is not None]
    # By step, not by time: copying a run directory changes time stamps.
    return sorted(found, reverse=True)


def writing_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies while it is written."""
    return root / (step_name(step) + WRITING)


def begin_folder(root: Path, step: int) -> None:
    """Make an empty folder to write the checkpoint of `step` to."""
    # Without `parents`: a run directory that was removed or unmounted must not be made anew here.
    root.mkdir(exist_ok=True)
    folder = writing_folder(root, step)
    # Of an attempt at the same step that failed: half of it could pass for part of the new one.
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def abandon_folder(root: Path, step: int) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(writing_folder(root, step), ignore_errors=True)


def publish_folder(root: Path, step: int, manifest: bytes, state: bytes) -> None:
    """Complete the folder of `step`, whose data files are already on disk, and give it its name.

    A former checkpoint of the same step makes way only when the new one is whole; `clear_up` puts it back if the
    process ends in between.
    """
    folder, final = writing_folder(root, step), root / step_name(step)
    write_durably(folder / STATE_NAME, state)
    # The manifest comes last: without it the folder is no checkpoint, whatever else it holds.
    write_durably(folder / MANIFEST_NAME, manifest)
    sync_path(folder)
    former = final.with_name(final.name + REPLACED)
    if final.exists():
        if former.exists():
            shutil.rmtree(former)
        final.rename(former)
    folder.rename(final)
    # A rename is on disk only when the folder above it is.
    sync_path(root)
    # Whatever cannot be removed now, `clear_up` removes at the next start.
    shutil.rmtree(former, ignore_errors=True)


def supersede_later(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Take checkpoints later than `step` out of the listing: the run resumed from before them."""
    for checkpoint in list_published(root):
        if checkpoint.step > step:
            # Kept, not deleted: whoever resumed from an earlier step may have done so by mistake.
            aside = rename_aside(checkpoint, SUPERSEDED)
            warn(f"{checkpoint.path} is of a later step than the one just saved, {step}; kept as {aside.name}")


def rename_aside(checkpoint: Checkpoint, suffix: str) -> Path:
    """Take a checkpoint out of the listing without deleting it; return its new path."""
    wanted = checkpoint.path.with_name(checkpoint.path.name + suffix)
    # A step may be set aside more than once.
    aside, count = wanted, 1
    while aside.exists():
        count += 1
        aside = wanted.with_name(f"{wanted.name}-{count}")
    checkpoint.path.rename(aside)
    return aside


def find_old(
    root: Path, *, keep_last: int, keep_every: int | None, counts: Callable[[Checkpoint], bool]
) -> list[Checkpoint]:
    """Return the checkpoints that are neither among the newest `keep_last` nor at a multiple of `keep_every` steps.

    counts: whether a checkpoint counts among the newest; one that is damaged must not push out a whole one.
    """
    listed, kept = list_published(root), 0
    for index, checkpoint in enumerate(listed):
        kept += counts(checkpoint)
        if kept == keep_last:
            return [old for old in listed[index + 1 :] if keep_every is None or old.step % keep_every]
    return []


def delete_checkpoints(old: Sequence[Checkpoint]) -> None:
    """Delete checkpoints. Raises OSError."""
    for checkpoint in old:
        # Deleting takes many system calls; renamed first, a half-deleted folder is never taken for a checkpoint.
        doomed = checkpoint.path.with_name(checkpoint.path.name + DELETING)
        if doomed.exists():
            shutil.rmtree(doomed)
        checkpoint.path.rename(doomed)
        shutil.rmtree(doomed)


def clear_up(root: Path) -> None:
    """Undo or complete what a killed process left half done. Only for a process that owns the run directory."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        name, _, suffix = path.name.partition(".")
        if parse_step(name) is None or path.is_symlink():
            continue
        if f".{suffix}" == REPLACED and not (root / name).exists():
            path.rename(root / name)
            logger.warning("%s was being replaced when its writer ended; put back", root / name)
        elif f".{suffix}" in (WRITING, REPLACED, DELETING):
            shutil.rmtree(path)
            logger.warning("removed %s, left by a process that has ended", path)


@dataclass(frozen=True)
class CheckpointText:
    """The text of a checkpoint's two JSON files, which any rank can check for itself."""

    path: Path
    manifest_text: bytes
    state_text: bytes

    def parse_manifest(self) -> Manifest:
        """Return the table of contents. Raises CheckpointDamaged."""
        try:
            manifest = parse_manifest(self.manifest_text)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.path / MANIFEST_NAME}: {error}") from error
        # A folder may be read under any name; only the name of another step's checkpoint is a contradiction.
        if parse_step(self.path.name) not in (None, manifest.step):
            raise CheckpointDamaged(
                f"{self.path / MANIFEST_NAME}: step={manifest.step}; this is the checkpoint of another step than the "
                f"folder's name says"
            )
        return manifest

    def parse_state(self, manifest: Manifest) -> dict[str, Any]:
        """Return all that is not a tensor, checked against the manifest's checksum. Raises CheckpointDamaged."""
        where, record = self.path / STATE_NAME, manifest.state
        if len(self.state_text) != record.bytes:
            raise CheckpointDamaged(f"{where}: {record.bytes} bytes expected, found {len(self.state_text)}")
        found = compute_checksum(self.state_text)
        if found != record.crc32:
            raise CheckpointDamaged(f"{where}: checksum expected {record.crc32}, found {found}")
        try:
            state = parse_json(self.state_text, max_nested=MAX_NESTED)
        except ValueError as error:
            raise CheckpointDamaged(f"{where}: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointDamaged(f"{where}: a JSON object is expected, found a {type(state).__name__}")
        return state


class CheckpointFolder:
    """An open checkpoint folder; every failure names the file and raises CheckpointDamaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointDamaged(f"{path} is not a checkpoint folder that can be read: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def open_file(self, name: str) -> int:
        """Return a descriptor of the regular file `name`, for reading."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            self._check_kind(name, status)
            # Should the file be exchanged in between: no link is followed, and a pipe keeps nobody waiting.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(name, flags, dir_fd=self._fd)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{self.path / name} is missing") from error
        except OSError as error:
            raise CheckpointDamaged(f"{self.path / name} cannot be read: {error.strerror}") from error

    def read_small(self, name: str, limit: int) -> bytes:
        """Return all of file `name`, which may be at most `limit` bytes long."""
        descriptor = self.open_file(name)
        try:
            size = os.fstat(descriptor).st_size
            # By its length, before anything is read: a file made up by somebody may claim a terabyte.
            if size > limit:
                raise CheckpointDamaged(
                    f"{self.path / name} is {size} bytes, more than the {limit} it may have; refused"
                )
            content = bytearray(size)
            read_exactly(descriptor, memoryview(content), 0, self.path / name)
            return bytes(content)
        finally:
            os.close(descriptor)

    def read_text(self) -> CheckpointText:
        """Return the two JSON files, unchecked."""
        manifest = self.read_small(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        return CheckpointText(self.path, manifest, self.read_small(STATE_NAME, MAX_STATE_BYTES))

    def check_lengths(self, manifest: Manifest) -> None:
        """Refuse a folder in which a file is missing or has another length than the manifest says."""
        # One listing instead of a call for each file: folders of large runs hold thousands, on slow shared disks.
        with os.scandir(self._fd) as entries:
            found = {entry.name: entry for entry in entries}
        for name, size in [(STATE_NAME, manifest.state.bytes), *((file.name, file.bytes) for file in manifest.files)]:
            entry = found.get(name)
            if entry is None:
                raise CheckpointDamaged(f"{self.path / name} is missing")
            status = entry.stat(follow_symlinks=False)
            self._check_kind(name, status)
            self._check_length(name, size, status.st_size)

    def _check_kind(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise CheckpointDamaged(f"{self.path / name} is {kind}; refused")

    def _check_length(self, name: str, expected: int, found: int) -> None:
        if found != expected:
            raise CheckpointDamaged(f"{self.path / name}: {expected} bytes expected, found {found}")

    def open_data(self, record: FileRecord) -> DataFile:
        """Return the data file that `record` describes, its length and header checked."""
        descriptor = self.open_file(record.name)
        try:
            self._check_length(record.name, record.bytes, os.fstat(descriptor).st_size)
            return DataFile(self.path / record.name, descriptor, record)
        except BaseException:
            os.close(descriptor)
            raise


def is_whole(checkpoint: Checkpoint) -> bool:
    """Return whether the manifest of a checkpoint is sound, and every file there and as long as it should be."""
    try:
        with CheckpointFolder(checkpoint.path) as folder:
            folder.check_lengths(folder.read_text().parse_manifest())
    except CheckpointDamaged as damage:
        logger.info("not listed: %s", damage)
        return False
    return True


class DataFile:
    """One open safetensors file. What is read is checked against the manifest; several threads may read at once."""

    def __init__(self, path: Path, descriptor: int, record: FileRecord) -> None:
        self.path = path
        self._fd = descriptor
        self._start = record.header_bytes
        # The header is safetensors' own: where each key's data begin and end, in bytes from the header's end. It is checked
        # once: every chunk's place is then known to lie in the file.
        header = bytearray(record.header_bytes)
        read_exactly(descriptor, memoryview(header), 0, path)
        found = compute_checksum(bytes(header))
        if found != record.header_crc32:
            raise CheckpointDamaged(f"{path}: header checksum expected {record.header_crc32}, found {found}")
        length = int.from_bytes(header[:8], "little")
        if length != record.header_bytes - 8:
            raise CheckpointDamaged(
                f"{path}: header of {record.header_bytes - 8} bytes expected, the file claims {length}"
            )
        try:
            entries = parse_json(bytes(header[8:]), max_nested=max_nested_of_table(header))
            spans = {key: entry["data_offsets"] for key, entry in entries.items() if key != "__metadata__"}
            for begin, end in spans.values():
                if not (type(begin) is type(end) is int and 0 <= begin <= end <= record.bytes - record.header_bytes):
                    raise ValueError(f"data at {begin} to {end}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{path}: the header is not that of a safetensors file: {error}") from error
        self._entries = {key: (begin, end) for key, (begin, end) in spans.items()}

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def forget_cached(self) -> None:
        """Have what is read next come from storage, as far as the host forgets what it keeps of the file in memory."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_chunk(self, tensor: TensorRecord, chunk: Chunk, into: Tensor) -> None:
        """Fill `into` (uint8 [bytes of the chunk], on the CPU) with `chunk` of `tensor`, and verify its checksum."""
        size = count_bytes(chunk.sizes, tensor.torch_dtype)
        where = f"{self.path}: tensor {tensor.name!r}, chunk at {chunk.offsets}"
        entry = self._entries.get(chunk.key)
        begin, end = entry if entry is not None else (0, 0)
        if entry is None or end - begin != size:
            raise CheckpointDamaged(f"{where}: {size} bytes under key {chunk.key!r} expected, found {end - begin}")
        # Read straight into the caller's memory, and verified there: what was checked is what is used.
        buffer = byte_view(into)
        read_exactly(self._fd, buffer, self._start + begin, self.path)
        found = compute_checksum(buffer)
        if found != chunk.crc32:
            raise CheckpointDamaged(f"{where}: checksum expected {chunk.crc32}, found {found}")


def byte_view(memory: Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor on the CPU, not copied."""
    return memory.numpy().data


def read_exactly(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from byte `offset` of an open file. Raises CheckpointDamaged when the file ends before."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointDamaged(f"{path} ends at byte {offset + done}, {len(buffer) - done} bytes too early")
        done += count


def write_data_file(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write a safetensors file of `tensors`, wait until it is on disk, and return its length and its header's checksum."""
    save_file(tensors, path)
    # The library makes files that only their owner may read; a checkpoint is as readable as its folder.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync_path(path)
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
        size = os.fstat(file.fileno()).st_size
    return FileRecord(name=path.name, bytes=size, header_bytes=len(header), header_crc32=compute_checksum(header))


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
