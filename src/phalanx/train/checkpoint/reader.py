"""Filling tensors from a checkpoint, every byte verified, in whatever sharding the tensors have.

A load that fails leaves the tensors partly filled; a caller goes on only with a load that succeeded.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.layout.place import Place, as_place
from phalanx.train.checkpoint.damage import CheckpointDamaged
from phalanx.train.checkpoint.files import CheckpointFolder, Contents, DataFile
from phalanx.train.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, nbytes
from phalanx.train.checkpoint.plan import Copy, SavedTensors, plan_load
from phalanx.train.checkpoint.rank_group import RankGroup

Read = tuple[TensorRecord, Chunk, list[Copy]]
NAMED_IN_MESSAGE = 3
"""Tensors that one message lists before it only counts."""


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of the checkpoint at `path` whose name starts with `prefix`, whole, on the CPU, in its saved dtype.

    On one process, without knowing names or shapes beforehand. Raises CheckpointDamaged when the checkpoint is not what
    was written, and CheckpointError when no tensor has that prefix.
    """
    with CheckpointFolder(path) as folder:
        manifest = folder.read_contents().manifest()
        folder.check_lengths(manifest)
        records = [record for record in manifest.tensors if record.name.startswith(prefix)]
        if not records:
            raise CheckpointError(f"{path} holds no tensor whose name starts with {prefix!r}")
        tensors = {record.name: torch.empty(record.shape, dtype=record.torch_dtype) for record in records}
        _read(folder, manifest, plan_load(records, tensors))
        return tensors


def read_state(path: Path) -> dict[str, Any]:
    """The state (all that is not a tensor) of the checkpoint at `path`. Raises CheckpointDamaged."""
    contents = _read_contents(path)
    return contents.state(contents.manifest())


def load_tensors(path: Path, tensors: SavedTensors, prefix: str, ranks: RankGroup) -> dict[str, Any]:
    """Fill `tensors` in place on every rank from the checkpoint at `path`, and return its state.

    The tensors of all ranks together must be those in the checkpoint whose names start with `prefix`. Rank 0 reads the
    table of contents for all; each rank reads the chunks it needs. Raises on all ranks alike: CheckpointDamaged, or
    CheckpointError when the checkpoint belongs to another model.
    """
    contents = ranks.from_first(lambda: _read_contents(path))
    manifest = contents.manifest()
    state = contents.state(manifest)
    records = [record for record in manifest.tensors if record.name.startswith(prefix)]
    _check_belongs(path, records, tensors, prefix, ranks)
    error: Exception | None = None
    try:
        with CheckpointFolder(path) as folder:
            _read(folder, manifest, plan_load(records, tensors))
    except Exception as failure:  # another rank's failure has to be heard of as well: agree() raises this one or that
        error = failure
    ranks.agree(error)
    return state


def _read_contents(path: Path) -> Contents:
    with CheckpointFolder(path) as folder:
        return folder.read_contents()


def _check_belongs(
    path: Path, records: list[TensorRecord], tensors: SavedTensors, prefix: str, ranks: RankGroup
) -> None:
    """Refuse, on all ranks alike, tensors that are not the ones in the checkpoint."""
    places = {name: as_place(tensor) for name, tensor in tensors.items()}
    saved = {record.name: record for record in records}
    wanted_somewhere = ranks.any(torch.tensor([record.name in tensors for record in records], dtype=torch.uint8))
    unexpected = [record.name for record, wanted in zip(records, wanted_somewhere.tolist(), strict=True) if not wanted]
    missing = [name for name in tensors if name not in saved]
    different = [
        f"{name} (saved {record.dtype}{record.shape}, wanted {_describe(tensor)})"
        for name, tensor in places.items()
        if (record := saved.get(name)) is not None and _describe(tensor) != f"{record.dtype}{record.shape}"
    ]
    meta = [name for name, place in places.items() if place.local.device.type == "meta"]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:NAMED_IN_MESSAGE])}{', ...' if len(names) > NAMED_IN_MESSAGE else ''}"
        for what, names in (
            ("missing from the checkpoint", missing),
            ("in the checkpoint but not in this model", unexpected),
            ("of another dtype or shape", different),
            ("on the meta device, allocate them first", meta),
        )
        if names
    ]
    wanted = f" (names starting with {prefix!r})" if prefix else ""
    summary = f"{path} does not fit this model{wanted}: {'; '.join(problems)}. Use the run file it was saved with"
    ranks.agree(CheckpointError(summary) if problems else None)


def _describe(place: Place) -> str:
    return f"{str(place.local.dtype).removeprefix('torch.')}{list(place.shape)}"


def _read(folder: CheckpointFolder, manifest: Manifest, reads: Iterable[Read]) -> None:
    """Carry out `reads` on a few threads; reading, checksums and copies all leave the interpreter free."""
    reads = list(reads)
    held: dict[str, list[str]] = defaultdict(list)
    for record, chunk, _ in reads:
        held[chunk.file].append(record.name)
    scratch = threading.local()
    with ExitStack() as opened:
        files: dict[str, DataFile] = {}
        for entry in manifest.files:
            if entry.name in held:
                files[entry.name] = _open(folder, entry, held[entry.name])
                opened.callback(files[entry.name].close)
        pool = opened.enter_context(ThreadPoolExecutor(min(4, os.cpu_count() or 1), "checkpoint-read"))
        try:
            for _ in pool.map(lambda read: _read_chunk(files[read[1].file], read, scratch), reads):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    # The threads copied to accelerators on streams of their own choosing; what the caller starts next must see it all.
    for device in {copy.target.device for _, _, copies in reads for copy in copies}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _open(folder: CheckpointFolder, entry: FileRecord, held: Sequence[str]) -> DataFile:
    try:
        return folder.open_data(entry)
    except CheckpointDamaged as damage:
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise CheckpointDamaged(f"{damage}; it holds tensor {held[0]!r}{more}") from damage


def _read_chunk(file: DataFile, read: Read, scratch: threading.local) -> None:
    record, chunk, copies = read
    size = nbytes(chunk.sizes, record.torch_dtype)
    memory: Tensor | None = getattr(scratch, "memory", None)
    if memory is None or memory.numel() < size:
        memory = scratch.memory = torch.empty(size, dtype=torch.uint8)
    data = memory[:size]
    file.read(record, chunk, data)
    stored = data.view(record.torch_dtype).view(chunk.sizes)
    with torch.no_grad():
        for copy in copies:
            part = stored
            for dim, (start, length) in enumerate(zip(copy.starts, copy.sizes, strict=True)):
                part = part.narrow(dim, start, length)
            copy.target.copy_(part)
