"""Several structures as one graph without links between them, and how such a batch is read from shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.families.materials.data.array_files import Arrays, Int64Array, ragged_offsets, ragged_ranges
from phalanx.families.materials.data.graph_shards import LABEL_DTYPES, Located, Manifest, PreparedSource
from phalanx.families.materials.data.labels import KINDS
from phalanx.families.materials.data.structures import total_charges
from phalanx.families.materials.model_config import PROPERTY_HEADS, PROPERTY_LABELS

PER_ATOM = ("species_N", "positions_N3", "graph_N", "forces_N3", "charges_N", "atom_properties_NP", "node_features_NF")
"""Fields of a batch with a row for each atom; those of `edges_2E` and `PER_EDGE` are edges', of others structures'."""
PER_EDGE = ("shifts_E3", "edge_properties_EP", "edge_features_EF")
FEATURE_FIELDS = {
    "node_features": "node_features_NF",
    "edge_features": "edge_features_EF",
    "graph_features": "graph_features_GF",
}
"""Field of a batch by the array of a shard, of graphs whose nodes are no atoms."""
_FIELDS = {
    "energy": "energy_G",
    "forces": "forces_N3",
    "stress": "stress_G33",
    "charges": "charges_N",
    "dipole": "dipole_G3",
    "total_charge": "total_charge_G",
    "multiplicity": "multiplicity_G",
}
LABELS = ("energy_G", "forces_N3", "stress_G33", "charges_N", "dipole_G3", *PROPERTY_LABELS.values())
"""Fields of a batch that a model may learn. None where no source of the stream has it, which is then so on every rank
and in every step; NaN where a structure lacks it."""


@dataclass(frozen=True)
class GraphBatch:
    """G structures of one rank with N atoms and E directed edges in all; lengths in A, energies in eV, charges in e.

    Any of G, N and E may be 0: a rank may get fewer structures than it has micro-batches.
    """

    species_N: Tensor
    """int64: atomic numbers."""
    positions_N3: Tensor
    """float32."""
    graph_N: Tensor
    """int64: the structure of each atom, ascending."""
    edges_2E: Tensor
    """int64: source and target atom, ordered by target."""
    shifts_E3: Tensor
    """float32: edge vector = position[target] + shift - position[source]."""
    cells_G33: Tensor
    """float32: lattice vectors as rows, zeros in directions that are not periodic."""
    source_G: Tensor
    """int64: number of the source."""
    total_charge_G: Tensor | None
    """float32; see `total_charge`, and 0 where that does not know. None where no source has charges."""
    multiplicity_G: Tensor | None
    """float32: 2S + 1, and 1 where no label says. None where no source has it."""
    energy_G: Tensor | None
    """float64."""
    forces_N3: Tensor | None
    """float32."""
    stress_G33: Tensor | None
    """float32, tension positive."""
    charges_N: Tensor | None
    """float32."""
    dipole_G3: Tensor | None
    """float32."""
    properties_GP: Tensor | None
    """float64: one column for each property that was asked for."""
    atom_properties_NP: Tensor | None
    """float32: one column for each atom property that was asked for."""
    sample_indices: Tensor
    """int64 [G]: global sample numbers."""
    atoms: Int64Array
    """Atoms of each structure [G], on the host."""
    edges: Int64Array
    """Edges of each structure [G], on the host."""
    graphs_by_part: tuple[int, ...]
    """Structures of each planned micro-batch, in order."""
    tasks: tuple[str, ...]
    """Fields that `target_counts` counts, in order."""
    edge_properties_EP: Tensor | None = None
    """float32: one column for each edge property that was asked for."""
    node_features_NF: Tensor | None = None
    """float32, of graphs whose nodes are no atoms; None of structures."""
    edge_features_EF: Tensor | None = None
    """float32."""
    graph_features_GF: Tensor | None = None
    """float32."""
    counts: Tensor | None = None
    """Result of `target_counts`, int64 [T], where that was counted on reading."""
    bounded: bool = False
    """Whether the planned micro-batches keep to a budget of memory, so that no others will do."""

    def to(self, device: torch.device) -> GraphBatch:
        """Return the batch on `device`, copied without waiting when it lies in pinned memory."""
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in self._tensors()}
        return replace(self, **moved)

    def pinned(self) -> GraphBatch:
        """Return a copy in pinned memory, from which an accelerator copies on its own."""
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self._tensors()}
        return replace(self, **pinned)

    def split(self, parts: int) -> Iterator[GraphBatch]:
        """Yield `parts` micro-batches, in order: the planned ones, or where another number is asked for, runs of equal
        size.

        Those that keep to a budget are always the planned ones.
        """
        planned = self.bounded or parts == len(self.graphs_by_part)
        counts: Sequence[int] = self.graphs_by_part
        if not planned:
            # A structure belongs where its middle lies; twice that, so that whole numbers are compared.
            sizes = self.atoms + self.edges
            middles = 2 * np.cumsum(sizes) - sizes
            cuts = np.searchsorted(middles, np.arange(1, parts) * (2 * sizes.sum()) / parts)
            counts = np.diff(np.concatenate(([0], cuts, [len(sizes)]))).tolist()
        first = 0
        for count in counts:
            yield self.take_graphs(first, first + count)
            first += count

    def take_graphs(self, first: int, last: int) -> GraphBatch:
        """Return structures first..last-1, as views of the same memory where numbers need not change."""
        graphs = slice(first, last)
        first_atom, first_edge = int(self.atoms[:first].sum()), int(self.edges[:first].sum())
        atoms = slice(first_atom, first_atom + int(self.atoms[graphs].sum()))
        edges = slice(first_edge, first_edge + int(self.edges[graphs].sum()))
        changed: dict[str, Any] = {}
        for name, value in self._tensors():
            if name == "counts":
                changed[name] = None
            elif name == "edges_2E":
                changed[name] = value[:, edges] - first_atom
            elif name == "graph_N":
                changed[name] = value[atoms] - first
            else:
                changed[name] = value[atoms if name in PER_ATOM else edges if name in PER_EDGE else graphs]
        return replace(
            self, **changed, atoms=self.atoms[graphs], edges=self.edges[graphs], graphs_by_part=(last - first,)
        )

    def target_counts(self) -> Tensor:
        """Return the numbers that are there for each of `tasks`: int64 [T]; 3 a force, 9 a stress."""
        if self.counts is not None:
            return self.counts
        counts = torch.zeros(len(self.tasks), dtype=torch.int64, device=self.graph_N.device)
        for number, name in enumerate(self.tasks):
            label: Tensor | None = getattr(self, name)
            if label is not None:
                counts[number] = (~label.isnan()).sum()
        return counts

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return atomic numbers; and everything else that a model takes, by name."""
        named: dict[str, Any] = dict(self._tensors())
        for name in ("species_N", "sample_indices", "counts"):
            named.pop(name, None)
        named["max_atoms"] = int(self.atoms.max(initial=0))
        return self.species_N, named

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield name, value


@dataclass(frozen=True)
class Columns:
    """Labels and properties in a stream's batches; the same in all of them."""

    labels: tuple[str, ...]
    """Labels that at least one source has."""
    properties: dict[str, tuple[str, ...]]
    """Names of the properties of each of `PROPERTY_HEADS`."""
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class ShardRows:
    """Structures of a batch that lie in one shard."""

    source: int
    """Number of the source."""
    arrays: Arrays
    """The shard's, see `graph_shards`."""
    rows: Int64Array
    """Structures of the shard."""
    graphs: Int64Array
    """Their numbers in the batch."""


class Collator:
    """Reads structures of several sources into batches."""

    def __init__(self, sources: Sequence[PreparedSource], columns: Columns) -> None:
        self.sources = list(sources)
        self.columns = columns

    def __call__(self, found: Located, parts: Sequence[int], shards: Iterable[ShardRows] | None = None) -> GraphBatch:
        """Return the batch of these structures in this order.

        parts: how many of them each planned micro-batch takes. shards: where all of them are; None reads the files.
        """
        nodes, edges = ragged_offsets(found.atoms), ragged_offsets(found.edges)
        # Labels begin as NaN: what no source fills in is missing.
        graph_count, atom_count, edge_count = len(found.numbers), int(nodes[-1]), int(edges[-1])
        arrays: dict[str, npt.NDArray[Any]] = {
            "species_N": np.empty(atom_count, dtype=np.int64),
            "positions_N3": np.empty((atom_count, 3), dtype=np.float32),
            "cells_G33": np.empty((graph_count, 3, 3), dtype=np.float32),
            "edges_2E": np.empty((2, edge_count), dtype=np.int64),
            "shifts_E3": np.zeros((edge_count, 3), dtype=np.float32),
        }
        for name in self.columns.labels:
            shape = (atom_count if KINDS[name].per_atom else graph_count, *KINDS[name].shape)
            arrays[_FIELDS[name]] = np.full(shape, np.nan, dtype=LABEL_DTYPES[name])
        counts = (graph_count, atom_count, edge_count)
        for (head, names), count in zip(self.columns.properties.items(), counts, strict=True):
            if names:
                precision = np.float64 if head == "properties" else np.float32
                arrays[PROPERTY_LABELS[head]] = np.full((count, len(names)), np.nan, dtype=precision)
        widths = self.sources[0].manifest.statistics.features
        for (name, field), count in zip(FEATURE_FIELDS.items(), (atom_count, edge_count, graph_count), strict=True):
            if name in widths:
                arrays[field] = np.empty((count, len(widths[name])), dtype=np.float32)
        arrays["graph_N"] = np.repeat(np.arange(len(found.numbers), dtype=np.int64), found.atoms)
        arrays["source_G"] = found.source.astype(np.int64)
        for chosen in self._files(found) if shards is None else shards:
            _Filler(self.sources[chosen.source].manifest, chosen, nodes, edges).fill(arrays, self.columns)
        given, charges = arrays.get("total_charge_G"), arrays.get("charges_N")
        if given is not None or charges is not None:
            totals = total_charges(given, charges, arrays["graph_N"], len(found.numbers))
            # A sum may round to -0.
            arrays["total_charge_G"] = (np.nan_to_num(totals) + 0.0).astype(LABEL_DTYPES["total_charge"])
        if "multiplicity_G" in arrays:
            arrays["multiplicity_G"] = np.nan_to_num(arrays["multiplicity_G"], nan=1.0)
        tensors: dict[str, Any] = dict.fromkeys(("total_charge_G", "multiplicity_G", *LABELS))
        tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch = GraphBatch(
            **tensors,
            sample_indices=torch.from_numpy(found.numbers),
            atoms=found.atoms,
            edges=found.edges,
            graphs_by_part=tuple(parts),
            tasks=self.columns.tasks,
        )
        return replace(batch, counts=batch.target_counts())

    def _files(self, found: Located) -> Iterator[ShardRows]:
        for index, source in enumerate(self.sources):
            mine = np.flatnonzero(found.source == index)
            # Shard by shard: the structures of one file are copied together.
            shards, rows = source.locate(found.item[mine])
            for shard in np.unique(shards).tolist():
                chosen = shards == shard
                yield ShardRows(index, source.shard(shard), rows[chosen], mine[chosen])


class _Filler:
    """Copies chosen structures of one shard to their places in a batch.

    By an index for each atom and edge: a copy for each structure would hold the interpreter, which the thread that trains
    needs, and takes longer for structures of a few hundred edges.
    """

    def __init__(self, manifest: Manifest, chosen: ShardRows, nodes: Int64Array, edges: Int64Array) -> None:
        """manifest: of the source. nodes, edges: where each structure's atoms and edges begin in the batch, and where the
        last one's end."""
        self._manifest = manifest
        self._arrays = chosen.arrays
        rows, graphs = chosen.rows, chosen.graphs
        self._rows = rows
        self._graphs = graphs
        self._nodes = nodes[graphs]
        self._atoms = _Rows.of(self._arrays["node_starts"], rows, nodes, graphs)
        self._edges = _Rows.of(self._arrays["edge_starts"], rows, edges, graphs)

    def fill(self, arrays: dict[str, npt.NDArray[Any]], columns: Columns) -> None:
        shard = self._arrays
        cells_G33 = arrays["cells_G33"][self._graphs] = shard["cells"][self._rows]
        self._atoms.copy(arrays["species_N"], shard["species"])
        self._atoms.copy(arrays["positions_N3"], shard["positions"])
        first_E = np.repeat(self._nodes, self._edges.lengths)
        for row, name in enumerate(("source", "target")):
            self._edges.put(arrays["edges_2E"][row], self._edges.taken(shard[name]) + first_E)
        if "images" in shard:
            images_E3 = self._edges.taken(shard["images"]).astype(np.float32)
            cells_E33 = np.repeat(cells_G33, self._edges.lengths, axis=0)
            self._edges.put(arrays["shifts_E3"], np.einsum("ei,eij->ej", images_E3, cells_E33))
        for name in columns.labels:
            if name in shard:
                self._put(arrays[_FIELDS[name]], shard[name], KINDS[name].per_atom)
        if "dipole" in columns.labels:
            # Sources prepared by older versions may have them, though they depend on the images that atoms are written as.
            periodic_G = shard["periodic"][self._rows].any(axis=1)
            arrays[_FIELDS["dipole"]][self._graphs[periodic_G]] = np.nan
        for head, names in columns.properties.items():
            there, field = getattr(self._manifest, head), PROPERTY_LABELS[head]
            for column, label in enumerate(names):
                if label in there:
                    values, to = shard[head][:, there.index(label)], arrays[field][:, column]
                    if field in PER_EDGE:
                        self._edges.copy(to, values)
                    else:
                        self._put(to, values, field in PER_ATOM)
        for name, field in FEATURE_FIELDS.items():
            if field in arrays and field in PER_EDGE:
                self._edges.copy(arrays[field], shard[name])
            elif field in arrays:
                self._put(arrays[field], shard[name], field in PER_ATOM)

    def _put(self, to: npt.NDArray[Any], numbers: npt.NDArray[Any], per_atom: bool) -> None:
        if per_atom:
            self._atoms.copy(to, numbers)
        else:
            to[self._graphs] = numbers[self._rows]


@dataclass(frozen=True)
class _Rows:
    """Rows of a shard's arrays, and the rows of a batch's arrays that they go to."""

    lengths: Int64Array
    """Rows of each structure."""
    source: Int64Array
    to: Int64Array | slice

    @classmethod
    def of(cls, starts: Int64Array, rows: Int64Array, places: Int64Array, graphs: Int64Array) -> _Rows:
        """Return the atoms, or the edges, of structures `rows`, which are `graphs` of the batch. starts, places: where each
        structure's begin in the shard and in the batch."""
        lengths = starts[rows + 1] - starts[rows]
        source = ragged_ranges(starts[rows], lengths)
        if len(graphs) == len(places) - 1:
            return cls(lengths, source, slice(None))
        return cls(lengths, source, ragged_ranges(places[graphs], lengths))

    def taken(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the shard's rows."""
        return numbers.take(self.source, axis=0)

    def put(self, to: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> None:
        """Write rows in this order to their places."""
        to[self.to] = numbers

    def copy(self, to: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> None:
        """Copy rows from the shard to the batch."""
        self.put(to, self.taken(numbers))


def graph_columns(
    sources: Sequence[PreparedSource],
    *,
    tasks: Sequence[str] | None = None,
    properties: Mapping[str, Sequence[str]] | None = None,
    all_needed: bool = True,
) -> Columns:
    """Return what batches of these sources hold.

    tasks: fields of `batches.LABELS` in the order in which a model's losses come; None takes all there are. properties:
    names in the order of a model's heads, by head (`PROPERTY_HEADS`); None takes all there are, in order. all_needed: if
    a property or task that no source has is refused; else it is missing in every batch.

    Raises ConfigError for what is refused.
    """
    manifests = [source.manifest for source in sources]
    labels = dict.fromkeys(name for manifest in manifests for name in manifest.labels)
    chosen: dict[str, tuple[str, ...]] = {}
    for head in PROPERTY_HEADS:
        known = list(dict.fromkeys(name for manifest in manifests for name in getattr(manifest, head)))
        asked = known if properties is None else properties.get(head, ())
        missing = [name for name in asked if name not in known]
        if missing and all_needed:
            raise ConfigError(
                f"model.{head} asks for {missing[0]}, which no source of data has; they have {', '.join(known) or 'none'}"
            )
        chosen[head] = tuple(asked)
    # A field is called after its label and its shape: energy_G is the label energy.
    there = [name for name in LABELS if name.rsplit("_", 1)[0] in labels]
    there += [PROPERTY_LABELS[head] for head in PROPERTY_HEADS if chosen[head]]
    unlabelled = [name for name in tasks or () if name not in there]
    if unlabelled and all_needed:
        raise ConfigError(
            f"the model learns {unlabelled[0].rsplit('_', 1)[0]}, which no source of data has a label for; "
            f"add it to data.sources.NAME.labels or take it out of the model"
        )
    return Columns(tuple(labels), chosen, tuple(there if tasks is None else tasks))
