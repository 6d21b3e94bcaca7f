"""Pieces: a range of structures of one file, checked, given edges and left as one shard by a worker process."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from phalanx.errors import DataError
from phalanx.families.materials.data.manifest import SPLITS
from phalanx.families.materials.data.open import open_structures
from phalanx.families.materials.data.shards import Prepared, shard_arrays
from phalanx.families.materials.data.structures.arrays import write_arrays
from phalanx.families.materials.data.structures.checks import bond_ratios, check_lengths, check_structure
from phalanx.families.materials.data.structures.labels import labels_of, length_factor
from phalanx.families.materials.data.structures.neighbours import find_edges
from phalanx.families.materials.data.structures.structures import RawStructure, Structure, convert
from phalanx.families.materials.data_config import GraphData, GraphSource


@dataclass(frozen=True)
class Piece:
    """Structures start..stop-1 of one file, and the shard they become."""

    path: Path
    file: int
    """Number of the file among the inputs."""
    start: int
    stop: int
    out: Path


@dataclass(frozen=True)
class Job:
    """What all pieces of a source share."""

    source: GraphSource
    data: GraphData


def make_pieces(pieces: Sequence[Piece], job: Job, workers: int) -> Iterator[Piece]:
    """Make every piece in `workers` processes, 1 being this one; yields each as it is done.

    Raises DataError for what is wrong with a structure, and when a worker is killed; pieces that are done stay.
    """
    if workers == 1 or len(pieces) == 1:
        for piece in pieces:
            make_piece(piece, job)
            yield piece
        return
    held, leash = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server that all workers are forked from, where it does not run yet.
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(min(workers, len(pieces)), context, _start_worker, (held,))
    try:
        running: dict[Future[None], Piece] = {pool.submit(make_piece, piece, job): piece for piece in pieces}
        for future in as_completed(running):
            future.result()
            yield running[future]
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, mostly for lack of memory; what is done is kept: prepare again with fewer workers"
        ) from error
    finally:
        leash.close()
        pool.shutdown(cancel_futures=True)
        held.close()


def make_piece(piece: Piece, job: Job) -> None:
    """Read, check and write one piece. Raises DataError naming file and structure."""
    source, data = job.source, job.data
    labels, length = labels_of(source), length_factor(source)
    items: list[Prepared] = []
    splits: list[int] = []
    ratios: list[tuple[RawStructure, float]] = []
    for raw in open_structures(piece.path, source).read(piece.start, piece.stop):
        structure = convert(raw, labels, length, missing_allowed=source.missing_labels == "allow")
        edges = find_edges(structure.positions, structure.cell, structure.periodic, data.cutoff, data.max_neighbours)
        check_structure(structure, edges, source, data.cutoff)
        if len(edges):
            ratios.append((raw, float(np.median(bond_ratios(structure.species, edges)))))
        items.append(Prepared(structure, edges, piece.file))
        splits.append(_split(structure, job))
    if len(items) != piece.stop - piece.start:
        raise DataError(
            f"{piece.path}: {len(items)} structures found from {piece.start} on, {piece.stop - piece.start} expected; "
            f"the file changed or is truncated"
        )
    check_lengths(ratios, source)
    arrays = shard_arrays(items, source)
    write_arrays(piece.out, arrays | {"split": np.array(splits, dtype=np.uint8)})


def _split(structure: Structure, job: Job) -> int:
    """Which of SPLITS a structure belongs to: by the hash of its group, or of its atoms where it has none."""
    if job.source.group_by is None:
        parts = (structure.species, structure.positions.astype("<f4"), structure.cell.astype("<f4"))
        text = b"".join(part.tobytes() for part in parts)
    else:
        group = structure.raw.values.get(job.source.group_by)
        if group is None:
            raise structure.raw.wrong(f'it has no "{job.source.group_by}", which group_by asks for')
        text = str(group).encode()
    share = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") / 2.0**64
    if share < job.data.test_fraction:
        return SPLITS.index("test")
    held_out = share < job.data.test_fraction + job.data.validation_fraction
    return SPLITS.index("validation" if held_out else "train")


def _start_worker(leash: Connection) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(leash,), daemon=True).start()


def _end_with_parent(leash: Connection) -> None:
    leash.poll(None)
    os._exit(1)
