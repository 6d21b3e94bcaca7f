"""Writing this rank's part of a checkpoint: safetensors files, and what the manifest has to say about them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from phalanx.train.checkpoint.files import byte_view, sync_path
from phalanx.train.checkpoint.manifest import MAX_HEADER_BYTES, MAX_NAME_LENGTH, FileRecord, Report, checksum
from phalanx.train.checkpoint.plan import Piece

MAX_FILE_BYTES = 1 << 29
"""Tensor bytes of one file, unless a single piece has more. A power of two: page-locked memory comes in no other size."""
MAX_FILE_PIECES = MAX_HEADER_BYTES // (3 * MAX_NAME_LENGTH)
"""Keeps a file's header within what a reader accepts."""


def group_by_file(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Deal `pieces`, in order, into the files that will hold them."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (size + piece.bytes > MAX_FILE_BYTES or len(group) == MAX_FILE_PIECES):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.bytes
    if group:
        yield group


def write_file(folder: Path, name: str, pieces: Sequence[Piece], staged: Sequence[Tensor], report: Report) -> None:
    """Write one data file, wait until it is on disk, and add it to `report`.

    staged: each piece's bytes (uint8, one dim, on the CPU). The checksums are taken from this memory before it is
    written, so they also cover the way to the disk.
    """
    for piece, data in zip(pieces, staged, strict=True):
        words = {
            "offsets": piece.offsets,
            "sizes": piece.sizes,
            "file": name,
            "key": piece.key,
            "crc32": checksum(byte_view(data)),
        }
        report.chunks.setdefault(piece.name, []).append(json.dumps(words))
    tensors = {
        piece.key: data.view(piece.source.dtype).view(piece.sizes) for piece, data in zip(pieces, staged, strict=True)
    }
    path = folder / name
    save_file(tensors, path)
    # The library makes files that only their owner may read; a checkpoint is as readable as its folder.
    path.chmod(folder.stat().st_mode & 0o666)
    sync_path(path)
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
        size = os.fstat(file.fileno()).st_size
    report.files.append(FileRecord(name=name, bytes=size, header_bytes=len(header), header_crc32=checksum(header)))
