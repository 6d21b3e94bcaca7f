"""From files of structures to shards: in parallel, and restartable after any interruption.

The files of a source are cut into pieces of a fixed number of structures; each piece becomes one shard in a work folder;
when all are there an index and a manifest are written and everything is moved into place. The result depends on the files
and the settings alone, not on the number of workers nor on how often the work was interrupted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from phalanx.data.prepared_folder import Progress, file_record, prepare_once, worker_processes
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphData, GraphSource, SplitFiles
from phalanx.families.materials.data.array_files import Arrays, Int64Array, map_arrays, write_arrays
from phalanx.families.materials.data.given_graphs import convert_graph
from phalanx.families.materials.data.graph_shards import (
    INDEX,
    SPLITS,
    Counts,
    Manifest,
    Prepared,
    ShardRecord,
    Split,
    check_settings,
    read_manifest,
    settings_of,
    shard_arrays,
)
from phalanx.families.materials.data.graph_statistics import gather_statistics
from phalanx.families.materials.data.labels import labels_of, length_factor
from phalanx.families.materials.data.neighbours import find_edges
from phalanx.families.materials.data.split_files import LEFT_OUT, check_groups, list_files, read_splits
from phalanx.families.materials.data.structure_files import find_files, open_structures
from phalanx.families.materials.data.structures import (
    RawStructure,
    bond_ratios,
    check_lengths,
    check_structure,
    convert_structure,
)
from phalanx.families.materials.evaluation.dispersion import D3Dispersion
from phalanx.hardware.host import available_cores

PIECE_STRUCTURES = 8192
"""Structures of a shard: some seconds of one worker."""
_SAMPLE_BYTES = 2**16


def prepare_graphs(
    data: GraphData,
    *,
    workers: int | None = None,
    piece_structures: int = PIECE_STRUCTURES,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Manifest]:
    """Prepare every source of `data` that is not prepared yet into its folder in `data.prepared`; returns the manifests.

    workers: processes; None takes all cores. Stopped in any way, the same call goes on with the pieces that are done.

    Raises:
        ConfigError: a unit that is not known or does not fit its label.
        DataError: no files, a structure that cannot be used (named by file and place), a folder with other data or in
            use by another process, no room to write.
    """
    return {
        source.name: _prepare_source(source, data, workers or available_cores(), piece_structures, progress)
        for source in data.sources
    }


def fingerprint_files(files: Sequence[Path], split: SplitFiles | None = None) -> list[tuple[str, int, str]]:
    """Return name, bytes and a hash of every file of structures, and of those that say their splits."""
    described = []
    # What ADIOS2 writes is a folder, whose profile of the writing is no content.
    stored = [sorted(path.glob("*[0-9x]")) if path.is_dir() else [path] for path in files]
    for path in itertools.chain.from_iterable(stored):
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(_SAMPLE_BYTES)
            # Head, tail and size: data sets of terabytes are not read twice to notice a change.
            file.seek(max(0, size - _SAMPLE_BYTES))
            described.append((path.name, size, hashlib.sha256(head + file.read()).hexdigest()))
    for path in [] if split is None else list_files(split):
        content = path.read_bytes()
        described.append((path.name, len(content), hashlib.sha256(content).hexdigest()))
    return described


def _divide_files(
    source: GraphSource, files: Sequence[Path], lengths: Sequence[int], piece_structures: int, work: Path
) -> list[Piece]:
    """Divide files of `lengths` structures into pieces, each with its shard in the folder `work`."""
    # Of one number of structures, whatever the number of workers: an interrupted preparation finds them again.
    pieces: list[Piece] = []
    splits = None if source.split is None else read_splits(source.split, sum(lengths)).tobytes()
    first = 0
    for number, (path, structures) in enumerate(zip(files, lengths, strict=True)):
        for start in range(0, structures, piece_structures):
            stop = min(structures, start + piece_structures)
            given = None if splits is None else splits[first + start : first + stop]
            # Where all are left out there is nothing to read.
            if given is None or any(one != LEFT_OUT for one in given):
                out = work / f"shard-{len(pieces):05d}.safetensors"
                pieces.append(Piece(path, number, start, stop, out, given))
        first += structures
    return pieces


def _prepare_source(
    source: GraphSource, data: GraphData, workers: int, piece_structures: int, progress: Progress
) -> Manifest:
    """Prepare one source into its folder, unless that is done already."""
    labels_of(source)
    length_factor(source)
    files = find_files(source.path)
    # The plan hashes all that the result depends on, as far as can be told without reading all of the files.
    planned = json.dumps([settings_of(source, data), piece_structures, fingerprint_files(files, source.split)])
    plan = hashlib.sha256(planned.encode()).hexdigest()

    def read_prepared(folder: Path) -> Manifest:
        manifest = read_manifest(folder)
        check_settings(folder, manifest, source, data)
        return manifest

    def build(work: Path) -> tuple[Manifest, list[Path]]:
        lengths = [len(open_structures(path, source)) for path in files]
        if not sum(lengths):
            raise DataError(f"{source.path}: it holds no structures")
        pieces = _divide_files(source, files, lengths, piece_structures, work)
        missing = [piece for piece in pieces if not piece.out.exists()]
        done = len(pieces) - len(missing)
        for _ in make_pieces(missing, Job(source, data), workers):
            done += 1
            progress("preparing", done, len(pieces))
        shards = [piece.out for piece in pieces]
        manifest = _write_index(source, data, files, plan, work, shards)
        manifest = manifest.model_copy(update={"left_out": sum(lengths) - manifest.totals.structures})
        return manifest, [*shards, work / INDEX]

    return prepare_once(
        Path(data.prepared) / source.name,
        plan,
        read=read_prepared,
        build=build,
        results=("shard-*.safetensors", INDEX),
        option="data.prepared",
        otherwise="was prepared from other files",
        again="prepare again",
    )


def _write_index(
    source: GraphSource, data: GraphData, files: list[Path], plan: str, work: Path, shards: list[Path]
) -> Manifest:
    """Write the index of finished shards and describe them all."""
    opened = [map_arrays(path) for path in shards]
    atoms = np.concatenate([np.diff(shard["node_starts"]) for shard in opened])
    edges = np.concatenate([np.diff(shard["edge_starts"]) for shard in opened])
    split = np.concatenate([shard["split"] for shard in opened])
    if source.split is not None and source.group_by is not None:
        check_groups(split, np.concatenate([shard["group"] for shard in opened]), source.split, source.group_by)
    members: dict[Split, Int64Array] = {name: np.flatnonzero(split == number) for number, name in enumerate(SPLITS)}
    if not len(members["train"]):
        raise DataError(
            f"{source.path}: every structure fell into validation or test; lower data.validation_fraction and test_fraction"
        )
    # Members of splits lie in the index, so that opening a split reads no shard.
    lists: Arrays = dict(members.items())
    write_arrays(work / INDEX, {"atoms": atoms.astype("i4"), "edges": edges.astype("i4")} | lists)
    return Manifest(
        source=source.name,
        settings=settings_of(source, data),
        inputs=[str(path) for path in files],
        plan=plan,
        labels=list(source.labels),
        properties=list(source.properties),
        atom_properties=list(source.atom_properties),
        edge_properties=list(source.edge_properties),
        totals=Counts(structures=len(atoms), atoms=int(atoms.sum()), edges=int(edges.sum())),
        splits={
            name: Counts(structures=len(items), atoms=int(atoms[items].sum()), edges=int(edges[items].sum()))
            for name, items in members.items()
        },
        index=file_record(work / INDEX),
        shards=[
            ShardRecord(
                counts=Counts(
                    structures=len(shard["split"]),
                    atoms=int(shard["node_starts"][-1]),
                    edges=int(shard["edge_starts"][-1]),
                ),
                data=file_record(path),
            )
            for path, shard in zip(shards, opened, strict=True)
        ],
        statistics=gather_statistics(opened, source),
    )


@dataclass(frozen=True)
class Piece:
    """Structures start..stop-1 of one file, and the shard they become."""

    path: Path
    file: int
    """Number of the file among the inputs."""
    start: int
    stop: int
    out: Path
    splits: bytes | None = None
    """Number of the given split of each structure, or `LEFT_OUT`; None draws them."""


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
    count, again = min(workers, len(pieces)), "prepare again with fewer workers"
    # This module, which takes seconds to import, is imported once, by the server that all workers are forked from.
    with worker_processes(count, preload=[__name__], again=again) as pool:
        running: dict[Future[None], Piece] = {pool.submit(make_piece, piece, job): piece for piece in pieces}
        for future in as_completed(running):
            future.result()
            yield running[future]


def make_piece(piece: Piece, job: Job) -> None:
    """Read, check and write one piece. Raises DataError naming file and structure."""
    source, data = job.source, job.data
    labels, length = labels_of(source), length_factor(source)
    dispersion = None if source.dispersion is None else D3Dispersion(source.dispersion, torch.device("cpu"))
    items: list[Prepared] = []
    splits: list[int] = []
    groups: list[int] = []
    read = 0
    ratios: list[tuple[RawStructure, float]] = []
    for raw in open_structures(piece.path, source).read(piece.start, piece.stop):
        read += 1
        given = None if piece.splits is None or read > len(piece.splits) else piece.splits[read - 1]
        # Not even checked: data sets come with lists of structures that are broken.
        if given == LEFT_OUT:
            continue
        if source.graph is not None:
            structure, edges = convert_graph(raw, labels, source, source.graph, data.cutoff)
        else:
            structure = convert_structure(raw, labels, length, missing_allowed=source.missing_labels == "allow")
            edges = find_edges(
                structure.positions, structure.cell, structure.periodic, data.cutoff, data.max_neighbours
            )
            check_structure(structure, edges, source, data.cutoff)
        if len(edges) and source.graph is None:
            ratios.append((raw, float(np.median(bond_ratios(structure.species, edges)))))
        items.append(Prepared(structure if dispersion is None else dispersion.take_off(structure), edges, piece.file))
        if source.group_by is None:
            parts = (structure.species, structure.positions.astype("<f4"), structure.cell.astype("<f4"))
            content = b"".join(part.tobytes() for part in parts)
            # Graphs without positions differ in their features alone.
            content += b"".join(part.astype("<f4").tobytes() for part in structure.features.values())
        else:
            group = structure.raw.values.get(source.group_by)
            if group is None:
                raise structure.raw.wrong(f'it has no "{source.group_by}", which group_by asks for')
            content = str(group).encode()
        # The split follows from content, not from order: a source that grows keeps the splits of what it had, and duplicates
        # stay together.
        digest = hashlib.sha256(content).digest()[:8]
        if given is not None:
            splits.append(given)
            groups.append(int.from_bytes(digest, "little", signed=True))
            continue
        share = int.from_bytes(digest, "little") / 2.0**64
        held_out = data.test_fraction + data.validation_fraction
        split: Split = "test" if share < data.test_fraction else "validation" if share < held_out else "train"
        splits.append(SPLITS.index(split))
    if read != piece.stop - piece.start:
        raise DataError(
            f"{piece.path}: {read} structures found from {piece.start} on, {piece.stop - piece.start} expected; "
            f"the file changed or is truncated"
        )
    check_lengths(ratios, source)
    arrays = shard_arrays(items, source) | {"split": np.array(splits, dtype=np.uint8)}
    # Whether given splits keep groups together is seen when all pieces are there.
    if groups:
        arrays["group"] = np.array(groups, dtype=np.int64)
    write_arrays(piece.out, arrays)
