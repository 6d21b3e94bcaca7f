"""Structures a second that ranks read of ten million small ones: from prepared files, cold and warm, and from memory.

    python benchmarks/structure_store.py WORK --out benchmarks/results/materials/structure_store.json

writes shards of random structures of 3 to 6 atoms, all pairs of which are edges, with energies and forces, as `phalanx data
prepare-graphs` would leave them, into WORK (2.5 GB for ten million), and has 1, 2 and 4 ranks of this machine read
batches in the order of training, without reading ahead, a step after another. Cold: the system is asked to drop the files
from its page cache before (`posix_fadvise`); how much is still there is measured. Warm: all files were read just before.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_loading import machine
from phalanx.data.prepared_folder import file_record
from phalanx.families.materials.config import GraphData
from phalanx.families.materials.data.array_files import Arrays, ragged_offsets, ragged_ranges, write_arrays
from phalanx.families.materials.data.graph_batches import graph_columns
from phalanx.families.materials.data.graph_shards import (
    INDEX,
    Counts,
    Manifest,
    ShardRecord,
    Statistics,
    open_prepared,
    settings_of,
)
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.in_memory.structure_store import StructureStore
from phalanx.launch.fork_server import run_ranks

_SMALLEST, _LARGEST = 3, 6
"""Atoms of a structure."""
_LIMIT_S = 1200.0


def make_shard(structures: int, first: int) -> Arrays:
    """Return the arrays of one shard; first: number of its first structure."""
    random = np.random.default_rng(first)
    atoms = random.integers(_SMALLEST, _LARGEST + 1, structures)
    total = int(atoms.sum())
    # Each atom is the target of edges from all others of its structure.
    place = ragged_ranges(np.zeros_like(atoms), atoms)
    degree = np.repeat(atoms - 1, atoms)
    target = np.repeat(place, degree)
    other = ragged_ranges(np.zeros_like(degree), degree)
    return {
        "node_starts": ragged_offsets(atoms),
        "edge_starts": ragged_offsets(atoms * (atoms - 1)),
        "species": random.choice(np.array([1, 6, 7, 8], dtype=np.uint8), total),
        "positions": random.uniform(-2.0, 2.0, (total, 3)).astype("f4"),
        "cells": np.zeros((structures, 3, 3), dtype="f4"),
        "periodic": np.zeros((structures, 3), dtype=np.uint8),
        "source": (other + (other >= target)).astype(np.uint8),
        "target": target.astype(np.uint8),
        "energy": random.normal(-100.0, 5.0, structures),
        "forces": random.normal(0.0, 1.0, (total, 3)).astype("f4"),
        "origin": np.stack((np.zeros(structures, dtype=np.int64), first + np.arange(structures)), axis=1),
        "split": np.zeros(structures, dtype=np.uint8),
    }


def write_structures(folder: Path, structures: int, shard_structures: int) -> GraphData:
    """Write a prepared folder, unless it is there; return the `data` section that reads it."""
    source = {"name": "small", "path": "small.npz", "labels": {"energy": "eV", "forces": "eV/A"}}
    data = GraphData.model_validate(
        {"sources": [source], "prepared": str(folder), "validation_fraction": 0.0, "test_fraction": 0.0}
    )
    out = folder / "small"
    if (out / "manifest.json").exists():
        return data
    out.mkdir(parents=True)
    records, atoms, edges = [], [], []
    for number, first in enumerate(range(0, structures, shard_structures)):
        shard = make_shard(min(shard_structures, structures - first), first)
        path = out / f"shard-{number:05d}.safetensors"
        write_arrays(path, shard)
        atoms.append(np.diff(shard["node_starts"]).astype("i4"))
        edges.append(np.diff(shard["edge_starts"]).astype("i4"))
        counts = Counts(structures=len(atoms[-1]), atoms=int(atoms[-1].sum()), edges=int(edges[-1].sum()))
        records.append(ShardRecord(counts=counts, data=file_record(path)))
    none = np.empty(0, dtype=np.int64)
    index = {"atoms": np.concatenate(atoms), "edges": np.concatenate(edges), "validation": none, "test": none}
    write_arrays(out / INDEX, index | {"train": np.arange(structures, dtype=np.int64)})
    fields = ("structures", "atoms", "edges")
    totals = Counts(**{name: sum(getattr(record.counts, name) for record in records) for name in fields})
    empty = Counts(structures=0, atoms=0, edges=0)
    Manifest(
        source="small",
        settings=settings_of(data.sources[0], data),
        inputs=["small.npz"],
        plan="made by a benchmark",
        labels=["energy", "forces"],
        properties=[],
        atom_properties=[],
        totals=totals,
        splits={"train": totals, "validation": empty, "test": empty},
        index=file_record(out / INDEX),
        shards=records,
        statistics=Statistics(
            elements={1: 1},
            largest_atoms=_LARGEST,
            largest_edges=_LARGEST * (_LARGEST - 1),
            degrees=[0],
            labels={},
            reference_energies={},
            residual_std=None,
        ),
    ).write(out)
    return data


def drop_files(folder: Path) -> None:
    """Ask the system to forget the pages of all files of a folder."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_files(folder: Path) -> None:
    """Read all files of a folder once."""
    for path in folder.rglob("*.safetensors"):
        path.read_bytes()


def read_batches(data: GraphData, store: str, batch: int, steps: int) -> dict[str, Any]:
    """Return what one rank takes to read `steps` batches; batch: structures of each rank's share on average."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sources = open_prepared(data, "train")
    start = time.perf_counter()
    held = StructureStore(sources, reader=rank) if store == "memory" else None
    opened = time.perf_counter() - start
    stream = GraphBatchStream(
        graph_order(sources, data, seed=0, global_batch=batch * ranks),
        graph_columns(sources),
        rank=rank,
        ranks=ranks,
        store=held,
        prefetch=0,
    )
    read = 0
    dist.barrier()
    start, before = time.perf_counter(), time.process_time()
    for _ in range(steps):
        read += len(stream.next().atoms)
    # What a rank takes before others are done is not the time of all.
    dist.barrier()
    return {
        "structures": read,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - before,
        "seconds_to_open": opened,
        "largest_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "store_bytes": None if held is None else held.bytes,
    }


def resident_share(folder: Path) -> float:
    """Return the share of the files' pages that are in memory, by reading without waiting for a disk (`RWF_NOWAIT`)."""
    there = asked = 0
    buffer = [bytearray(1)]
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            # One page in 64.
            for offset in range(0, path.stat().st_size, 64 * mmap.PAGESIZE):
                asked += 1
                try:
                    there += os.preadv(file.fileno(), buffer, offset, os.RWF_NOWAIT)
                except BlockingIOError:
                    continue
    return there / asked


def measure(data: GraphData, way: str, ranks: int, batch: int, steps: int, repeats: int) -> dict[str, Any]:
    """Read in one way on some ranks, several times."""
    folder, found = Path(data.prepared), []
    for _ in range(repeats):
        share = None
        if way == "files, cold":
            drop_files(folder)
            share = resident_share(folder)
        elif way == "files, warm":
            warm_files(folder)
            share = resident_share(folder)
        store = "memory" if way == "memory" else "files"
        of_ranks: Sequence[dict[str, Any]] = run_ranks(
            read_batches, ranks, data, store, batch, steps, timeout_s=_LIMIT_S
        )
        structures = sum(one["structures"] for one in of_ranks)
        found.append(
            {
                "structures_per_second": structures / max(one["seconds"] for one in of_ranks),
                "structures_per_cpu_second": structures / sum(one["cpu_seconds"] for one in of_ranks),
                "share_of_files_in_page_cache_before": share,
                "load_average": os.getloadavg()[0],
                "ranks": of_ranks,
            }
        )
    return {"way": way, "ranks": ranks, "repeats": found}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the best repeat of each way."""
    lines = [f"{'way':12} {'ranks':>5} {'structures/s':>13} {'per CPU second':>15} {'opened in s':>12}"]
    for row in rows:
        best = max(row["repeats"], key=lambda one: one["structures_per_second"])
        opened = max(one["seconds_to_open"] for one in best["ranks"])
        lines.append(
            f"{row['way']:12} {row['ranks']:5} {best['structures_per_second']:13,.0f} "
            f"{best['structures_per_cpu_second']:15,.0f} {opened:12.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("work", type=Path, help="folder for the structures, outside the tree; delete it afterwards")
    parser.add_argument("--structures", type=int, default=10_000_000)
    parser.add_argument("--shard-structures", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=512, help="structures of a rank in a step, on average")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    data = write_structures(arguments.work, arguments.structures, arguments.shard_structures)
    rows = []
    for ranks in arguments.ranks:
        for way in ("files, cold", "files, warm", "memory"):
            rows.append(measure(data, way, ranks, arguments.batch, arguments.steps, arguments.repeats))
            print(table(rows[-1:]), flush=True)
    print(table(rows))
    command = (
        f"python benchmarks/structure_store.py WORK --structures {arguments.structures} --shard-structures "
        f"{arguments.shard_structures} --batch {arguments.batch} --steps {arguments.steps} --repeats {arguments.repeats} "
        f"--ranks {' '.join(map(str, arguments.ranks))}"
    )
    results = {"command": command, "date": time.strftime("%Y-%m-%d"), **about, "rows": rows}
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
