"""The elements that each branch of a run learns from: a file of its directory, for those who use the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.errors import CheckpointError
from phalanx.families.materials.data.array_files import Int64Array, ragged_ranges
from phalanx.families.materials.data.graph_shards import Located, PreparedSource, Statistics
from phalanx.families.materials.data.structures import ELEMENTS
from phalanx.families.materials.model_config import Branch
from phalanx.files import write_atomically

FILE = "elements.json"


@dataclass(frozen=True)
class TrainedElements:
    """Atomic numbers that a model was trained on."""

    everywhere: frozenset[int]
    """Elements of all training structures."""
    by_branch: Mapping[str, frozenset[int]] | None
    """Elements of each branch's; None where a run of an older version does not tell them apart."""

    def of(self, branch: str) -> frozenset[int]:
        """Return the elements that the branch of that name knows. A branch that the record lacks begins with heads of all
        branches."""
        return self.everywhere if self.by_branch is None else self.by_branch.get(branch, self.everywhere)

    def branches_with(self, element: int) -> list[str]:
        """Return the branches whose training structures have an element."""
        return [name for name, elements in (self.by_branch or {}).items() if element in elements]


def elements_of(
    training: Sequence[Statistics], branches: Sequence[Branch], start: Path | None = None
) -> TrainedElements | None:
    """Return atomic numbers of these training splits, and of what the run's weights were trained on before.

    training: of each source. branches: the model's, one for each source or a single one for all. start: the run directory or
    checkpoint that the weights come from. None where that does not say what it was trained on.
    """
    known = [frozenset(source.elements) for source in training]
    # A single branch takes all sources.
    parts = [frozenset[int]().union(*known)] if len(branches) == 1 else known
    found = dict(zip((branch.name for branch in branches), parts, strict=True))
    if start is not None:
        earlier = trained_elements(start)
        if earlier is None:
            return None
        for branch in branches:
            # Where a branch names reference energies, elements that it does not name have 0 now, and are new to it.
            before, named = earlier.of(branch.name), frozenset(map(int, branch.reference_energies))
            found[branch.name] |= before & named if named else before
    return TrainedElements(frozenset[int]().union(*found.values()), found)


def write_elements(elements: TrainedElements, run_dir: Path) -> None:
    """Put them into the run directory."""
    content: dict[str, object] = {"atomic_numbers": sorted(elements.everywhere)}
    if elements.by_branch is not None:
        content["branches"] = {name: sorted(known) for name, known in elements.by_branch.items()}
    write_atomically(run_dir / FILE, json.dumps(content) + "\n")


def trained_elements(path: Path) -> TrainedElements | None:
    """Return what the run with this directory, or this checkpoint, was trained on; None where it does not say.

    Raises CheckpointError for a file that cannot be read.
    """
    # A checkpoint lies two folders below its run.
    places = (path / FILE, path.parent.parent / FILE)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return None
    try:
        content = json.loads(file.read_text())
        everywhere = frozenset(map(int, content["atomic_numbers"]))
        branches = content.get("branches")
        if branches is not None:
            branches = {str(name): frozenset(map(int, known)) for name, known in branches.items()}
        return TrainedElements(everywhere, branches)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: this is no list of atomic numbers ({error}); take the file away") from None


def untrained_in(source: PreparedSource, items: Int64Array, trained: frozenset[int]) -> dict[int, int]:
    """Count these structures by each element of theirs that is not among those trained on."""
    shards, rows = source.locate(items)
    structures = np.zeros(ELEMENTS + 1, dtype=np.int64)
    for shard in np.unique(shards).tolist():
        arrays, chosen = source.shard(shard), rows[shards == shard]
        starts = arrays["node_starts"]
        lengths = starts[chosen + 1] - starts[chosen]
        species = arrays["species"][ragged_ranges(starts[chosen], lengths)].astype(np.int64)
        # An element counts once in a structure, however many atoms of it there are.
        pairs = np.unique(np.repeat(np.arange(len(chosen)), lengths) * (ELEMENTS + 1) + species)
        structures += np.bincount(pairs % (ELEMENTS + 1), minlength=ELEMENTS + 1)
    present = np.flatnonzero(structures).tolist()
    return {element: int(structures[element]) for element in present if element not in trained}


def untrained_by_source(
    sources: Sequence[PreparedSource], found: Located, branches: Sequence[str], known: Sequence[TrainedElements]
) -> dict[str, dict[int, int]]:
    """Return `untrained_in` of each source with such structures, by its name.

    found: the structures. branches: their names. known: of one model or more, each of which must know an element.
    """
    counts = {}
    for number, source in enumerate(sources):
        # A single branch takes all sources; several are the sources, by number.
        branch = branches[0] if len(branches) == 1 else branches[number]
        trained = frozenset.intersection(*(one.of(branch) for one in known))
        if elements := untrained_in(source, found.item[found.source == number], trained):
            counts[source.manifest.source] = elements
    return counts


def untrained_in_words(found: Mapping[str, Mapping[int, int]]) -> list[str]:
    """Return a sentence for each source with structures of elements that its branch was not trained on."""
    return [
        f"{source}: {structures:,} of these structures {'has' if structures == 1 else 'have'} atomic number {element}, "
        f"which no training structure of the branch has; the errors count {'it' if structures == 1 else 'them'}"
        for source, elements in found.items()
        for element, structures in elements.items()
    ]
