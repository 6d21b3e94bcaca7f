"""Finding checkpoints and filling tensors from them, every byte verified, in whatever sharding the tensors have.

Changes nothing on disk and needs no lock, so a run may be read while it trains. A load that fails leaves the tensors partly
filled; a caller continues only with a load that succeeded.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.folders import (
    Checkpoint,
    CheckpointFolder,
    CheckpointText,
    DataFile,
    is_whole,
    list_published,
)
from phalanx.checkpoint.manifest import Manifest, TensorRecord, count_bytes, parse_step
from phalanx.checkpoint.rank_group import RankGroup
from phalanx.checkpoint.shard_plan import ChunkRead, SavedTensors, describe_dtype, plan_load
from phalanx.errors import CheckpointDamaged, CheckpointError
from phalanx.layout.place import Place, as_place

MAX_NAMED = 3
"""Tensors that one message lists before it only counts."""
MAX_READ_THREADS = 4

logger = logging.getLogger(__name__)


def open_checkpoints(
    path: Path,
    *,
    warn: Callable[[str], None] = logger.warning,
    timeout_s: float = 1800.0,
    one_rank: bool = False,
) -> CheckpointReader:
    """Return what `path` holds, for reading: a run directory, its checkpoints/ folder, or one checkpoint.

    warn: called on rank 0 with one line of text. timeout_s: seconds that one rank waits for another. one_rank: whether this
    process reads by itself, whatever other ranks there are; otherwise every rank calls this.
    """
    # A link to a run directory is the user's to set; inside of it none is followed.
    path = path.resolve()
    # A group of their own has a time limit of its own: reading may take longer than ranks may wait in a step.
    ranks = RankGroup(None) if one_rank else RankGroup.own(timeout_s)
    if parse_step(path.name) is not None:
        return CheckpointReader(path.parent, ranks, warn, only=path.name)
    inner = path / "checkpoints"
    return CheckpointReader(inner if inner.is_dir() else path, ranks, warn)


class CheckpointReader:
    """Checkpoints to load: all of the folder `root`, or the one called `only`.

    With several ranks every method is called by all of them, in the same order. warn: called on rank 0 with one line.
    """

    def __init__(self, root: Path, ranks: RankGroup, warn: Callable[[str], None], only: str | None = None) -> None:
        self.root = root
        self._ranks = ranks
        self._warn = warn
        self._only = only

    def list(self) -> Sequence[Checkpoint]:
        """Return whole checkpoints, newest first: manifest sound, every file there and as long as it should be."""
        self._await_save()
        return self._ranks.from_first(lambda: [found for found in self._published() if is_whole(found)])

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, if there is one."""
        self._await_save()
        return self._ranks.from_first(lambda: next((found for found in self._published() if is_whole(found)), None))

    def load(
        self,
        checkpoint: Checkpoint,
        tensors: SavedTensors,
        *,
        prefix: str = "",
        optional: str | None = None,
        only: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Fill `tensors` in place, in whatever sharding they have, and return the state.

        prefix: load only the tensors of the checkpoint whose names start with this; `tensors` must then be exactly those,
        over all ranks together. optional: what the names of tensors start with that all come or all stay away: where the
        checkpoint or `tensors` has none of them, they are left as they are. only: names of the tensors to load, in place of
        all that have the prefix; the same on every rank. Rank 0 reads the table of contents for all; each
        rank reads the chunks it needs, and verifies every byte. Raises on all ranks alike: CheckpointDamaged, a
        CheckpointError, naming file and tensor with the checksum expected and found, and CheckpointError naming tensors that
        do not fit.
        """
        self._await_save()
        path = checkpoint.path
        text = self._ranks.from_first(lambda: _read_text(path))
        manifest = text.parse_manifest()
        state = text.parse_state(manifest)
        # Before anything is read: a model that does not fit is then left as it was.
        records: Sequence[TensorRecord] = [record for record in manifest.tensors if record.name.startswith(prefix)]
        if only is not None:
            records = [record for record in records if record.name in only]
        if optional is not None:
            records, tensors = _without_lacking(records, tensors, optional)
        self._check_same_tensors(path, records, tensors, prefix)
        error: Exception | None = None
        try:
            with CheckpointFolder(path) as folder:
                _read_chunks(folder, manifest, plan_load(records, tensors))
        # Another rank's failure has to be heard of as well: `agree` raises this one or that one, on all ranks.
        except Exception as failure:
            error = failure
        self._ranks.agree(error)
        return state

    def load_newest_usable(
        self,
        tensors: SavedTensors,
        *,
        optional: str | None = None,
        check: Callable[[Checkpoint, dict[str, Any]], None] | None = None,
    ) -> tuple[Checkpoint, dict[str, Any]] | None:
        """Load the newest checkpoint that is not damaged, with a warning for each one passed over.

        optional: see `load`. check: called with a checkpoint and its state once `tensors` are filled; raises
        CheckpointDamaged, on all ranks alike, for one that is not to be used.

        Returns None if there is no checkpoint at all. Raises CheckpointError if there are some but none is usable, and if
        the newest sound one does not fit `tensors`: an older one would not fit either.
        """
        self._await_save()
        damages = []
        for checkpoint in self._ranks.from_first(self._published):
            try:
                state = self.load(checkpoint, tensors, optional=optional)
                if check is not None:
                    check(checkpoint, state)
                return checkpoint, state
            except CheckpointDamaged as damage:
                damages.append(str(damage))
                if self._ranks.first:
                    self._warn(f"checkpoint of step {checkpoint.step} is damaged, trying the one before: {damage}")
        if damages:
            raise CheckpointError(
                f"none of the {len(damages)} checkpoints in {self.root} is usable; newest: {damages[0]}"
            )
        return None

    def _await_save(self) -> None:
        """Return when no save of this process is running; a reader makes none."""

    def _published(self) -> Sequence[Checkpoint]:
        return [found for found in list_published(self.root) if self._only in (None, found.path.name)]

    def _check_same_tensors(
        self, path: Path, records: Sequence[TensorRecord], tensors: SavedTensors, prefix: str
    ) -> None:
        """Refuse, on all ranks alike, tensors that are not the ones in the checkpoint, naming some of each kind."""
        wanted = {name: as_place(tensor) for name, tensor in tensors.items()}
        formats = {name: f"{describe_dtype(place.local.dtype)}{list(place.shape)}" for name, place in wanted.items()}
        saved = {record.name: f"{record.dtype}{record.shape}" for record in records}
        # A rank of a pipeline wants a part of the tensors: one is unexpected only if no rank wants it.
        flags = torch.tensor([name in wanted for name in saved], dtype=torch.uint8)
        wanted_somewhere = self._ranks.any(flags).tolist()
        different = [
            f"{name} (saved {saved[name]}, wanted {format_})"
            for name, format_ in formats.items()
            if saved.get(name, format_) != format_
        ]
        found = {
            "missing from the checkpoint": [name for name in wanted if name not in saved],
            "in the checkpoint but not in this model": [
                name for name, here in zip(saved, wanted_somewhere, strict=True) if not here
            ],
            "of another dtype or shape": different,
            "on the meta device, allocate them first": [
                name for name, place in wanted.items() if place.local.device.type == "meta"
            ],
        }
        problems = [
            f"{len(names)} {what}: {', '.join(names[:MAX_NAMED])}{', ...' if len(names) > MAX_NAMED else ''}"
            for what, names in found.items()
            if names
        ]
        which = f" (names starting with {prefix!r})" if prefix else ""
        summary = f"{path} does not fit this model{which}: {'; '.join(problems)}. Use the run file it was saved with"
        self._ranks.agree(CheckpointError(summary) if problems else None)


def _without_lacking(
    records: Sequence[TensorRecord], tensors: SavedTensors, optional: str
) -> tuple[list[TensorRecord], SavedTensors]:
    """Return `records` and `tensors`, without those whose names start with `optional` unless both have some."""
    saved = any(record.name.startswith(optional) for record in records)
    # Every rank holds parameters, so all ranks come to the same answer.
    if saved and any(name.startswith(optional) for name in tensors):
        return list(records), tensors
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(optional)}
    return [record for record in records if not record.name.startswith(optional)], kept


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of the checkpoint at `path` whose names start with `prefix`: whole, on the CPU, in saved dtypes.

    For one process, which need not know names or shapes beforehand. Raises CheckpointDamaged when the checkpoint is not what
    was written, and CheckpointError when no tensor has that prefix.
    """
    with CheckpointFolder(path) as folder:
        manifest = folder.read_text().parse_manifest()
        folder.check_lengths(manifest)
        records = [record for record in manifest.tensors if record.name.startswith(prefix)]
        if not records:
            raise CheckpointError(f"{path} holds no tensor whose name starts with {prefix!r}")
        tensors = {record.name: torch.empty(record.shape, dtype=record.torch_dtype) for record in records}
        _read_chunks(folder, manifest, plan_load(records, tensors))
        return tensors


class TensorReader:
    """An opened checkpoint, for one process that wants its tensors one after another; close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        """Read the table of contents of the checkpoint at `path`. Raises CheckpointDamaged."""
        self._files = ExitStack()
        try:
            self._folder = self._files.enter_context(CheckpointFolder(path))
            self._manifest = self._folder.read_text().parse_manifest()
            self._folder.check_lengths(self._manifest)
        except BaseException:
            self._files.close()
            raise
        self.records: dict[str, TensorRecord] = {record.name: record for record in self._manifest.tensors}
        """Every tensor that is there, by name."""

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the rows `start` to `stop` of the tensor `name`, by default all: on the CPU, in the saved dtype.

        Raises CheckpointDamaged when they are not what was written.
        """
        record = self.records[name]
        rows = [] if not record.shape else [(record.shape[0] if stop is None else stop) - start]
        part = torch.empty(rows + record.shape[1:], dtype=record.torch_dtype)
        offsets = (start, *[0] * len(record.shape[1:])) if record.shape else ()
        place = Place(part, offsets, tuple(record.shape))
        _read_chunks(self._folder, self._manifest, plan_load([record], {name: place}))
        return part


def read_state(path: Path) -> dict[str, Any]:
    """Return the state (all that is not a tensor) of the checkpoint at `path`. Raises CheckpointDamaged."""
    text = _read_text(path)
    return text.parse_state(text.parse_manifest())


def verify_checkpoint(path: Path) -> None:
    """Read every byte of the checkpoint at `path`, for one process. Raises CheckpointDamaged where one is not as written."""
    with CheckpointFolder(path) as folder:
        text = folder.read_text()
        manifest = text.parse_manifest()
        text.parse_state(manifest)
        folder.check_lengths(manifest)
        verify_chunks(folder, manifest)


def verify_chunks(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Read every chunk of the data files in a folder, and no more of it. Raises CheckpointDamaged."""
    _read_chunks(folder, manifest, [ChunkRead(one, chunk, []) for one in manifest.tensors for chunk in one.chunks])


def _read_text(path: Path) -> CheckpointText:
    with CheckpointFolder(path) as folder:
        return folder.read_text()


def _read_chunks(folder: CheckpointFolder, manifest: Manifest, reads: Sequence[ChunkRead]) -> None:
    """Carry out `reads` on a few threads; reading, checksums and copies all release the interpreter's lock."""
    # Whoever reads that a file is missing wants to know what it held.
    names_of_file: dict[str, list[str]] = defaultdict(list)
    for read in reads:
        names_of_file[read.chunk.file].append(read.tensor.name)
    scratch = threading.local()
    with ExitStack() as opened:
        files: dict[str, DataFile] = {}
        for record in manifest.files:
            if names := names_of_file.get(record.name):
                try:
                    files[record.name] = folder.open_data(record)
                except CheckpointDamaged as damage:
                    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                    raise CheckpointDamaged(f"{damage}; it holds tensor {names[0]!r}{more}") from damage
                opened.callback(files[record.name].close)
        # Each rank has its own; more would only wait for the same disk.
        threads = min(MAX_READ_THREADS, os.cpu_count() or 1)
        pool = opened.enter_context(ThreadPoolExecutor(threads, "checkpoint-read"))
        try:
            for _ in pool.map(lambda read: _copy_chunk(files[read.chunk.file], read, scratch), reads):
                pass
        except BaseException:
            # Chunks that wait would be read for nothing, perhaps for minutes.
            pool.shutdown(cancel_futures=True)
            raise
    # The threads copied to accelerators on streams of their own choosing; what the caller starts next must see it all.
    for device in {copy.target.device for read in reads for copy in read.copies}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _copy_chunk(file: DataFile, read: ChunkRead, scratch: threading.local) -> None:
    """Read and verify a whole chunk, its checksum covers all of it, and copy the parts of it that this rank needs."""
    size = count_bytes(read.chunk.sizes, read.tensor.torch_dtype)
    # One buffer a thread: fresh memory for every chunk would cost more than the copy.
    memory: Tensor | None = getattr(scratch, "memory", None)
    if memory is None or memory.numel() < size:
        memory = scratch.memory = torch.empty(size, dtype=torch.uint8)
    data = memory[:size]
    file.read_chunk(read.tensor, read.chunk, data)
    stored = data.view(read.tensor.torch_dtype).view(read.chunk.sizes)
    with torch.no_grad():
        for copy in read.copies:
            part = stored
            for dim, (start, length) in enumerate(zip(copy.starts, copy.sizes, strict=True)):
                part = part.narrow(dim, start, length)
            copy.target.copy_(part)
