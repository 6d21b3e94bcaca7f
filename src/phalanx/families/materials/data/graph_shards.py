"""Shards of prepared structures: how one is laid out, written, and read back without copying more than is asked for.

A shard holds G structures with N atoms and E edges in all (units eV, A, e):

    node_starts [G+1], edge_starts [G+1]           where each structure's atoms and edges begin
    species [N], positions [N, 3], cells [G, 3, 3], periodic [G, 3]
    source [E], target [E]                         atoms counted within their structure
    images [E, 3]                                  absent in a shard without a periodic structure
    energy [G], forces [N, 3], stress [G, 3, 3], charges [N], dipole [G, 3], total_charge [G], multiplicity [G],
    properties [G, P], atom_properties [N, P], edge_properties [E, P]
                                                   NaN where missing; those that the source has
    node_features [N, F], edge_features [E, F], graph_features [G, F]
                                                   of a source of graphs whose nodes are no atoms
    origin [G, 2]                                  number of the file and of the structure in it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from phalanx.data.prepared_folder import (
    Count,
    FileRecord,
    FolderManifest,
    Part,
    check_content,
    check_size,
    check_still_whole,
    read_checked,
)
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphData, GraphSource
from phalanx.families.materials.data.array_files import (
    Arrays,
    Int64Array,
    map_arrays,
    ragged_offsets,
    smallest_integers,
)
from phalanx.families.materials.data.labels import KINDS
from phalanx.families.materials.data.neighbours import Edges
from phalanx.families.materials.data.structures import Structure
from phalanx.families.materials.model_config import PROPERTY_HEADS
from phalanx.remote_files import local_copy, local_path, remote_file

LABEL_DTYPES = {"energy": "f8"} | dict.fromkeys(
    ("forces", "stress", "charges", "dipole", "total_charge", "multiplicity"), "f4"
)
"""Total energies keep float64: a float32 resolves one of 10^5 eV to 8 meV only."""


@dataclass(frozen=True)
class Prepared:
    """A structure that passed all checks, with its edges."""

    structure: Structure
    edges: Edges
    file: int
    """Number of its file among the inputs."""


def shard_arrays(items: Sequence[Prepared], source: GraphSource) -> Arrays:
    """Return the arrays of a shard of these structures."""
    structures = [item.structure for item in items]
    arrays: Arrays = {
        "node_starts": ragged_offsets(np.array([len(s.species) for s in structures])),
        "edge_starts": ragged_offsets(np.array([len(item.edges) for item in items])),
        "species": np.concatenate([s.species for s in structures]),
        "positions": np.concatenate([s.positions for s in structures]).astype("f4"),
        "cells": np.stack([s.cell for s in structures]).astype("f4"),
        "periodic": np.array([s.periodic for s in structures], dtype=np.uint8),
        "source": smallest_integers(np.concatenate([item.edges.source for item in items]), signed=False),
        "target": smallest_integers(np.concatenate([item.edges.target for item in items]), signed=False),
        # For messages that name a structure by its file.
        "origin": np.array([(item.file, item.structure.raw.number) for item in items], dtype=np.int64),
    }
    # Molecules have no images: three integers an edge that need not be written.
    if arrays["periodic"].any():
        arrays["images"] = smallest_integers(np.concatenate([item.edges.images for item in items]), signed=True)
    for name in source.labels:
        join = np.concatenate if KINDS[name].per_atom else np.stack
        arrays[name] = join([s.labels[name] for s in structures]).astype(LABEL_DTYPES[name])
    if source.properties:
        arrays["properties"] = np.array(
            [[s.labels[name] for name in source.properties] for s in structures], dtype="f8"
        )
    if source.atom_properties:
        columns = [np.concatenate([s.labels[name] for s in structures]) for name in source.atom_properties]
        arrays["atom_properties"] = np.stack(columns, axis=1).astype("f4")
    if source.edge_properties:
        columns = [np.concatenate([s.labels[name] for s in structures]) for name in source.edge_properties]
        arrays["edge_properties"] = np.stack(columns, axis=1).astype("f4")
    for feature in structures[0].features:
        widths = {s.features[feature].shape[1]: s for s in structures}
        if len(widths) > 1:
            one, other = list(widths)[:2]
            raise widths[other].raw.wrong(f"its {feature} are {other} numbers, those of the first are {one}")
        arrays[feature] = np.concatenate([s.features[feature] for s in structures]).astype("f4")
    return arrays


class PreparedSource:
    """One split of a folder of prepared structures. Items are numbered 0.. within the split."""

    def __init__(self, folder: Path, split: Split) -> None:
        """Open the index; shards are opened when read. Raises DataError for a missing, truncated or altered file."""
        self.path = folder
        self.split = split
        self.manifest = read_manifest(folder)
        # Sizes of all structures are in memory; structures themselves stay in the files until they are read.
        index = map_arrays(local_copy(check_size(folder, self.manifest.index)))
        self._atoms, self._edges, self._items = index["atoms"], index["edges"], index[split]
        for shard in self.manifest.shards:
            check_size(folder, shard.data)
        self._firsts = ragged_offsets(np.array([shard.counts.structures for shard in self.manifest.shards]))
        if len(self._items) != self.manifest.splits[split].structures or len(self._atoms) != self._firsts[-1]:
            raise DataError(
                f"{folder / INDEX}: it does not list the structures that the manifest counts; prepare again"
            )
        self._open: dict[int, Arrays] = {}
        self.fingerprint = f"{self.manifest.fingerprint}/{split}"

    def __len__(self) -> int:
        return len(self._items)

    def sizes(self, items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return atoms [n] and edges [n] of these items, from the index alone."""
        numbers = self._items[items]
        return self._atoms[numbers].astype(np.int64), self._edges[numbers].astype(np.int64)

    def locate(self, items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return for each item its shard [n] and its row in that shard [n]."""
        numbers = self._items[items]
        shard = np.searchsorted(self._firsts, numbers, side="right") - 1
        return shard, numbers - self._firsts[shard]

    def shard(self, number: int) -> Arrays:
        """Return the arrays of one shard, memory-mapped. Raises DataError for a file cut short since it was opened."""
        record = self.manifest.shards[number].data
        remote = remote_file(self.path / record.name)
        if remote is not None:
            # Not kept open: the cache could then not give its room to another shard.
            return map_arrays(remote.fetch())
        if number not in self._open:
            self._open[number] = map_arrays(self.path / record.name)
        check_still_whole(self.path / record.name, record.bytes)
        return self._open[number]

    def hold_index(self) -> None:
        """Copy the index from its file to memory."""
        self._atoms, self._edges, self._items = (np.array(part) for part in (self._atoms, self._edges, self._items))

    @property
    def index_bytes(self) -> int:
        """Return the bytes of the index."""
        return self._atoms.nbytes + self._edges.nbytes + self._items.nbytes

    def close_shards(self) -> None:
        """Give up the files of shards that are open; what is read later opens them again."""
        self._open.clear()

    def name(self, item: int) -> str:
        """Return the file and place that an item was read from."""
        shard, row = (int(part[0]) for part in self.locate(np.array([item])))
        file, number = self.shard(shard)["origin"][row].tolist()
        return f"{self.manifest.inputs[file]}: structure {number}"

    def verify(self) -> None:
        """Compare the checksums of every file. Raises DataError naming one that was altered."""
        for record in (self.manifest.index, *(shard.data for shard in self.manifest.shards)):
            check_content(self.path, record)


def open_prepared(data: GraphData, split: Split) -> list[PreparedSource]:
    """Open the `split` of each source. Raises DataError where one is not prepared, or not as `data` says."""
    opened = []
    for source in data.sources:
        folder = prepared_folder(data, source)
        check_settings(folder, read_manifest(folder), source, data)
        opened.append(PreparedSource(folder, split))
    return opened


def prepared_folder(data: GraphData, source: GraphSource) -> Path:
    """Return the folder of a prepared source; see `remote_files.local_path` where `data.prepared` is an address."""
    return local_path(f"{data.prepared.rstrip('/')}/{source.name}")


def spread_evenly(sources: Sequence[PreparedSource], samples: int | None) -> Located:
    """Return items spread evenly over each source, as many of each as its share of all; numbered through all sources.

    samples: items over all sources; None takes all.
    """
    total = sum(len(source) for source in sources)
    parts: list[Located] = []
    first = 0
    for number, source in enumerate(sources):
        wanted = total if samples is None else max(1, samples * len(source) // max(total, 1))
        count = min(len(source), wanted)
        # Spread over the source, not its first structures: files often are sorted by size or composition.
        item = np.unique(np.linspace(0, max(len(source) - 1, 0), count).round().astype(np.int64))
        parts.append(Located(first + item, np.full_like(item, number), item, *source.sizes(item)))
        first += len(source)
    return Located(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))


MANIFEST = "manifest.json"
INDEX = "index.safetensors"
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Counts(Part):
    """Number of structures, atoms and edges."""

    structures: Count
    atoms: Count
    edges: Count
    """Directed edges."""


class ShardRecord(Part):
    """One shard."""

    counts: Counts
    data: FileRecord


class LabelStatistics(Part):
    """One label or property over the training split, in eV, A and e."""

    numbers: Count
    """Numbers that are there: 3 a force."""
    mean: float
    std: float
    """Population standard deviation; of the energy it includes the spread of sizes."""
    largest: float
    """Largest absolute value."""


class Statistics(Part):
    """Statistics of the training split, for a model that is about to begin."""

    elements: dict[int, int]
    """Atoms of each atomic number."""
    largest_atoms: Count
    """Atoms of the largest structure, over all splits."""
    largest_edges: Count
    """Edges of the structure with most, over all splits."""
    degrees: list[Count]
    """Atoms with 0, 1, 2, ... incoming edges."""
    labels: dict[str, LabelStatistics]
    features: dict[str, list[LabelStatistics]] = Field(default_factory=dict)
    """Each number of `node_features`, `edge_features` and `graph_features`, of graphs whose nodes are no atoms."""
    reference_energies: dict[int, float]
    """Energy in eV of an atom of each element, by least squares over the energies; empty without energies."""
    residual_std: float | None
    """Standard deviation in eV an atom of energies minus the reference energies."""
    total_charges: dict[int, int] = Field(default_factory=dict)
    """Structures of each total charge, over all splits, of a source with charges or total charges; see `total_charge`."""
    taken_for_neutral: Count = 0
    """Structures of such a source that say nothing of their total charge."""


class Manifest(FolderManifest):
    """Everything a reader needs to know about a folder of prepared structures."""

    format: Literal["phalanx-graphs"] = "phalanx-graphs"
    version: Literal[1] = 1
    source: str
    settings: dict[str, Any]
    """Settings that the result depends on besides the files: see `settings_of`."""
    inputs: list[str]
    """Files read, in order."""
    plan: str
    """A hash of the settings and of the files' names, sizes and samples of their content."""
    labels: list[str]
    """Labels there are, in order."""
    properties: list[str]
    """Properties there are: the columns of the shards' `properties`."""
    atom_properties: list[str]
    """The columns of the shards' `atom_properties`."""
    edge_properties: list[str] = Field(default_factory=list)
    """The columns of the shards' `edge_properties`."""
    totals: Counts
    splits: dict[Split, Counts]
    index: FileRecord
    shards: list[ShardRecord]
    statistics: Statistics
    left_out: Count = 0
    """Structures of the files that no list of `split` names, and that are not here."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of all data: equal exactly where a run would read the same."""
        # By content, not by path: a prepared folder may move.
        content = [self.index.sha256, *(shard.data.sha256 for shard in self.shards)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def settings_of(source: GraphSource, data: GraphData) -> dict[str, Any]:
    """Return what a prepared source depends on besides its files, as plain data."""
    # What is only refused or not changes nothing of what is prepared.
    unused = {
        name for name in ("arrays", "dispersion", "graph", "edge_properties", "split") if not getattr(source, name)
    }
    kept = source.model_dump(mode="json", exclude={"name", "path", "weight", "charge_sum"} | unused)
    for head in ("labels", *PROPERTY_HEADS):
        for label in kept.get(head, {}).values():
            # Numbers have no classes: folders that were prepared before there were any stay what they are.
            if not label["classes"]:
                del label["classes"]
            # Likewise before a stress could be given otherwise.
            if label["given_as"] == "stress":
                del label["given_as"]
            if label["components"] is None:
                del label["components"]
    shared = {"cutoff", "max_neighbours", "validation_fraction", "test_fraction"}
    return kept | data.model_dump(mode="json", include=shared)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`. Raises DataError naming the file and what is wrong with it."""
    missing = "prepare the source first: phalanx data prepare-graphs RUN"
    return read_checked(folder / MANIFEST, Manifest, missing=missing, malformed="prepare the source again")


def check_settings(folder: Path, manifest: Manifest, source: GraphSource, data: GraphData) -> None:
    """Refuse a folder prepared under other settings. Raises DataError naming the first that differs."""
    wanted = settings_of(source, data)
    for field in sorted(wanted.keys() | manifest.settings.keys()):
        if wanted.get(field) != manifest.settings.get(field):
            raise DataError(
                f"{folder} was prepared with {field}={json.dumps(manifest.settings.get(field))}, source {source.name} now "
                f"asks for {json.dumps(wanted.get(field))}; choose another data.prepared, or delete that folder"
            )


@dataclass(frozen=True)
class Located:
    """Samples, and what is known of them without reading them."""

    numbers: Int64Array
    """Global sample numbers [n]."""
    source: Int64Array
    """[n]."""
    item: Int64Array
    """[n]: item of that source."""
    atoms: Int64Array
    """[n]."""
    edges: Int64Array
    """[n]."""

    def take(self, rows: Int64Array) -> Located:
        """Return the samples at these places, in this order."""
        return Located(*(values[rows] for values in vars(self).values()))
