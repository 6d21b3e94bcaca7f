"""One save from start to end: who writes what, the copy to host memory, the files, the manifest, publication.

Any rank may fail at any point; all ranks then fail alike, and nothing is published.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint import folders
from phalanx.checkpoint.folders import byte_view
from phalanx.checkpoint.manifest import (
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_NAME_LENGTH,
    Chunk,
    RankReport,
    StateRecord,
    TensorRecord,
    compute_checksum,
    count_bytes,
    render_manifest,
    render_state,
    step_name,
)
from phalanx.checkpoint.rank_group import RankGroup, as_checkpoint_error
from phalanx.checkpoint.shard_plan import Piece, SavedTensors, SavePlanner, describe_dtype
from phalanx.errors import CheckpointError

MAX_FILE_BYTES = 1 << 29
"""Tensor bytes of one file, unless a single piece has more. A power of two: page-locked memory comes in no other size."""
MAX_FILE_PIECES = MAX_HEADER_BYTES // (3 * MAX_NAME_LENGTH)
"""Keeps a file's header within what a reader accepts."""
ALIGNMENT = 64
"""Bytes; staged pieces start at multiples of it, so that they can be seen in their own dtype."""
NO_MEMORY = (MemoryError, OSError, RuntimeError)
"""What is raised where host memory cannot be had, by Python, the system and PyTorch."""


class SaveHandle:
    """One save. Its figures are final once `done` is true; `stall_seconds` is as soon as `save` has returned."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        """Where the checkpoint is once it is published."""
        self.stall_seconds = 0.0
        """Time the caller of `save` was kept, waiting for an earlier save included."""
        self.write_seconds = 0.0
        """Time from the start of the writing until the checkpoint was published."""
        self.bytes_written = 0
        """Tensor bytes that this rank wrote."""
        self.error: CheckpointError | None = None
        """Why the save failed; None while it runs and when it succeeded."""
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def finish(self, error: CheckpointError | None) -> None:
        """Note that the save has ended, and why it failed if it did; whoever carries it out calls this once."""
        self.error = error
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is published. Raises its CheckpointError, and TimeoutError after `timeout_s`."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"checkpoint of step {self.step} is still being written after {timeout_s} s")
        if self.error is not None:
            raise CheckpointError(str(self.error)) from self.error

    def join(self) -> None:
        """Return when the save has ended, well or not."""
        self._ended.wait()


@dataclass
class Save:
    """A save that has begun: what this rank has to write."""

    handle: SaveHandle
    state: bytes
    """Text of state.json, on rank 0."""
    files: list[list[Piece]]
    staged: list[list[Tensor]] | None = None
    """Each file's pieces in host memory; None to copy file by file while writing."""
    error: Exception | None = None
    """Why this rank cannot do its part, found before the writing."""
    report: RankReport = field(default_factory=lambda: RankReport([], {}))
    """What this rank wrote."""


class Saver:
    """Saves to `root`, one save at a time. Every method is called by all ranks."""

    def __init__(self, root: Path, ranks: RankGroup) -> None:
        self._root = root
        self._ranks = ranks
        self._planner = SavePlanner(ranks)
        self._staging = Staging()

    def plan_files(self, tensors: SavedTensors) -> list[list[Piece]]:
        """Return the pieces of each file that this rank writes for `tensors`. Raises CheckpointError on all ranks."""
        return list(group_by_file(self._planner.plan_save(tensors)))

    def reserve(self, files: Sequence[Sequence[Piece]]) -> None:
        """Have host memory ready to stage `files`. Raises what having no memory raises."""
        for block, pieces in enumerate(files):
            self._staging.reserve(block, pieces)

    def prepare(self, step: int, tensors: SavedTensors, state: dict[str, Any]) -> Save:
        """Decide what this rank writes, and make the folder to write to.

        Raises CheckpointError, on all ranks, for a state or a tensor that cannot be saved. A folder that cannot be made
        is for `complete` to report, as any other failure of the disk.
        """
        if step < 0:
            raise CheckpointError(f"step={step} cannot be saved; steps count from 0")
        text = self._ranks.on_first(lambda: render_state(state)) or b""
        save = Save(SaveHandle(step, self._root / step_name(step)), text, self.plan_files(tensors))
        # Decided here, before tensors may change: a background save plans nothing any more.
        save.handle.bytes_written = sum(piece.bytes for pieces in save.files for piece in pieces)
        try:
            self._ranks.on_first(lambda: folders.begin_folder(self._root, step))
        except (OSError, CheckpointError) as error:
            save.error = error
        return save

    def stage(self, save: Save) -> None:
        """Copy this rank's pieces to host memory; the caller may change its tensors afterwards."""
        if save.error is not None:
            return
        try:
            save.staged = [self._staging.copy(block, pieces) for block, pieces in enumerate(save.files)]
        except NO_MEMORY as error:
            # Not raised here: the other ranks, about to write, have to hear of it in `complete`.
            save.error = error

    def complete(self, save: Save) -> CheckpointError | None:
        """Write this rank's files and, on rank 0, publish when all ranks have; return why it failed, if it did."""
        start = time.perf_counter()
        error: CheckpointError | None = None
        try:
            self._write_and_publish(save)
        except Exception as failure:
            error = CheckpointError(
                f"checkpoint of step {save.handle.step} was not saved: {as_checkpoint_error(failure)}"
            )
            error.__cause__ = failure
        save.handle.write_seconds = time.perf_counter() - start
        return error

    def read_back(self, save: Save) -> None:
        """Read from storage what the ranks wrote for `save`, each rank its own. Raises CheckpointDamaged on all ranks alike
        where a byte is not the one that was written."""
        error: Exception | None = None
        try:
            with folders.CheckpointFolder(save.handle.path) as folder:
                _verify_report(folder, save)
        # Another rank's failure has to be heard of as well, whatever this one's is.
        except Exception as failure:
            error = failure
        self._ranks.agree(error)

    def _write_and_publish(self, save: Save) -> None:
        """Write this rank's files; publish where all ranks have. Raises on all ranks alike, leaving nothing behind."""
        folder = folders.writing_folder(self._root, save.handle.step)
        try:
            if save.error is None:
                for number, pieces in enumerate(save.files):
                    staged = save.staged[number] if save.staged is not None else self._staging.copy(0, pieces)
                    write_file(folder, data_file_name(self._ranks.rank, number), pieces, staged, save.report)
        except Exception as failure:
            save.error = failure
        try:
            self._ranks.agree(save.error)
            # Sizes and checksums alone travel, never tensors: rank 0 writes one manifest for all.
            reports = self._ranks.gather(save.report)
            self._ranks.on_first(lambda: self._publish(save, reports))
        # Also when somebody interrupts the process: nothing half-written is to stay.
        except BaseException:
            if self._ranks.first:
                folders.abandon_folder(self._root, save.handle.step)
            raise

    def _publish(self, save: Save, reports: list[RankReport]) -> None:
        state = StateRecord(bytes=len(save.state), crc32=compute_checksum(save.state))
        manifest = render_manifest(save.handle.step, state, self._planner.shapes, reports)
        if len(manifest) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"its table of contents has {len(manifest)} bytes, more than the {MAX_MANIFEST_BYTES} that are read; "
                "share parameters among fewer ranks"
            )
        folders.publish_folder(self._root, save.handle.step, manifest, save.state)


def _verify_report(folder: folders.CheckpointFolder, save: Save) -> None:
    """Verify every chunk that this rank wrote for `save`. Raises CheckpointDamaged."""
    dtypes = {piece.name: describe_dtype(piece.source.dtype) for pieces in save.files for piece in pieces}
    chunks = [
        (TensorRecord(name=name, dtype=dtypes[name], shape=[], chunks=[]), Chunk.model_validate_json(text))
        for name, texts in save.report.chunks.items()
        for text in texts
    ]
    for record in save.report.files:
        file = folder.open_data(record)
        try:
            # The memory that was written is still in the host's cache; what a disk made of it is not.
            file.forget_cached()
            for tensor, chunk in chunks:
                if chunk.file == record.name:
                    size = count_bytes(chunk.sizes, tensor.torch_dtype)
                    file.read_chunk(tensor, chunk, torch.empty(size, dtype=torch.uint8))
        finally:
            file.close()


def data_file_name(rank: int, number: int) -> str:
    """Return the name of a rank's file: no two ranks ever write the same one, so none waits for another."""
    return f"rank-{rank:05d}-{number:03d}.safetensors"


def group_by_file(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Assign `pieces`, in order, to the files that will hold them."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        # One file's pieces are staged at once: its size bounds the memory of a save that is not in the background.
        if group and (size + piece.bytes > MAX_FILE_BYTES or len(group) == MAX_FILE_PIECES):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.bytes
    if group:
        yield group


def write_file(folder: Path, name: str, pieces: Sequence[Piece], staged: Sequence[Tensor], report: RankReport) -> None:
    """Write one data file, wait until it is on disk, and add it to `report`.

    staged: each piece's bytes (uint8 [bytes], on the CPU). The checksums are taken from this memory before it is written, so
    that they also cover the way to the disk.
    """
    for piece, data in zip(pieces, staged, strict=True):
        entry = {
            "offsets": piece.offsets,
            "sizes": piece.sizes,
            "file": name,
            "key": piece.key,
            "crc32": compute_checksum(byte_view(data)),
        }
        report.chunks.setdefault(piece.name, []).append(json.dumps(entry))
    tensors = {
        piece.key: data.view(piece.source.dtype).view(piece.sizes) for piece, data in zip(pieces, staged, strict=True)
    }
    report.files.append(folders.write_data_file(folder / name, tensors))


class Staging:
    """Numbered blocks of host memory; each holds the pieces of one file until that file is written.

    They are kept from save to save: the first touch of each page of fresh memory costs several times the copy itself.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def copy(self, block: int, pieces: Sequence[Piece]) -> list[Tensor]:
        """Copy `pieces` into `block`; return each one's bytes (uint8 [bytes]), valid until the block's next use.

        The copies are complete when this returns: whatever happens to the pieces' sources later does not show.
        """
        starts = _piece_starts(pieces)
        memory = self._block(block, pieces)
        staged = [memory[start : start + piece.bytes] for start, piece in zip(starts, pieces, strict=False)]
        with torch.no_grad():
            for piece, target in zip(pieces, staged, strict=True):
                typed = target.view(piece.source.dtype).view(piece.sizes)
                # Copies from an accelerator overlap each other; all of them are waited for at once, below.
                typed.copy_(piece.source, non_blocking=True)
        for device in {piece.source.device for piece in pieces if piece.source.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return staged

    def reserve(self, block: int, pieces: Sequence[Piece]) -> None:
        """Have the memory for `pieces` ready, down to its last page."""
        self._block(block, pieces).zero_()

    def _block(self, block: int, pieces: Sequence[Piece]) -> Tensor:
        size = _piece_starts(pieces)[-1]
        # Copies from an accelerator are asynchronous only into page-locked memory.
        pinned = any(piece.source.device.type != "cpu" for piece in pieces)
        memory = self._blocks.get(block)
        if memory is None or memory.numel() < size or memory.is_pinned() != pinned:
            # The old block goes first: both at once may be more than the host has.
            memory = None
            self._blocks.pop(block, None)
            memory = self._blocks[block] = _allocate_host(size, pinned=pinned)
        return memory


def _piece_starts(pieces: Sequence[Piece]) -> list[int]:
    """Return where in its block each piece starts, and after them the size of the block, in bytes."""
    starts = [0]
    for piece in pieces:
        starts.append(-(-(starts[-1] + piece.bytes) // ALIGNMENT) * ALIGNMENT)
    return starts


def _allocate_host(size: int, *, pinned: bool) -> Tensor:
    """Return uninitialised bytes: page-locked for copies from an accelerator, else in huge pages where possible."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages answers EINVAL; ordinary pages serve as well.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
