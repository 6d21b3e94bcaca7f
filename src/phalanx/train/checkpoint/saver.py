"""One save from start to end: who writes what, the copy to host memory, the files, the manifest, publication.

Any rank may fail at any point; all ranks then fail alike, and nothing is published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint import folders
from phalanx.train.checkpoint.handle import SaveHandle
from phalanx.train.checkpoint.manifest import MAX_MANIFEST_BYTES, Report, StateRecord, checksum, render_manifest
from phalanx.train.checkpoint.names import step_name
from phalanx.train.checkpoint.plan import Piece, SavedTensors, SavePlanning
from phalanx.train.checkpoint.rank_group import RankGroup, as_checkpoint_error
from phalanx.train.checkpoint.staging import Staging
from phalanx.train.checkpoint.state import render_state
from phalanx.train.checkpoint.writer import group_by_file, write_file

NO_MEMORY = (MemoryError, OSError, RuntimeError)
"""What is raised where host memory cannot be had, by Python, the system and PyTorch."""


@dataclass
class Save:
    """A save on its way: what this rank has to write."""

    handle: SaveHandle
    state: bytes
    """Text of state.json, on rank 0."""
    files: list[list[Piece]]
    staged: list[list[Tensor]] | None = None
    """Each file's pieces in host memory; None to copy file by file while writing."""
    error: Exception | None = None
    """Why this rank cannot do its part, found before the writing."""


class Saver:
    """Saves to `root`, one save at a time. Every method is called by all ranks."""

    def __init__(self, root: Path, ranks: RankGroup) -> None:
        self._root = root
        self._ranks = ranks
        self._planning = SavePlanning(ranks)
        self._staging = Staging()

    def plan(self, tensors: SavedTensors) -> list[list[Piece]]:
        """The files this rank writes for `tensors`, and the pieces in each. Raises CheckpointError on all ranks."""
        return list(group_by_file(self._planning.plan(tensors)))

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
        save = Save(SaveHandle(step, self._root / step_name(step)), text, self.plan(tensors))
        save.handle.bytes_written = sum(piece.bytes for pieces in save.files for piece in pieces)
        try:
            self._ranks.on_first(lambda: folders.begin(self._root, step))
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
            save.error = error  # no memory here; the other ranks, about to write, have to hear of it in `complete`

    def complete(self, save: Save) -> CheckpointError | None:
        """Write this rank's files and, on rank 0, publish when all ranks have; returns why it failed, if it did."""
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

    def _write_and_publish(self, save: Save) -> None:
        report = Report([], {})
        try:
            if save.error is None:
                report = self._write_files(save)
        except Exception as failure:
            save.error = failure
        try:
            self._ranks.agree(save.error)
            reports = self._ranks.gather(report)
            self._ranks.on_first(lambda: self._publish(save, reports))
        except BaseException:
            if self._ranks.first:
                folders.abandon(self._root, save.handle.step)
            raise

    def _write_files(self, save: Save) -> Report:
        report = Report([], {})
        folder = folders.writing_folder(self._root, save.handle.step)
        for number, pieces in enumerate(save.files):
            staged = save.staged[number] if save.staged is not None else self._staging.copy(0, pieces)
            name = f"rank-{self._ranks.rank:05d}-{number:03d}.safetensors"
            write_file(folder, name, pieces, staged, report)
        return report

    def _publish(self, save: Save, reports: list[Report]) -> None:
        state = StateRecord(bytes=len(save.state), crc32=checksum(save.state))
        manifest = render_manifest(save.handle.step, state, self._planning.shapes, reports)
        if len(manifest) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"its table of contents has {len(manifest)} bytes, more than the {MAX_MANIFEST_BYTES} that are read; "
                "share parameters among fewer ranks"
            )
        folders.publish(self._root, save.handle.step, manifest, save.state)
