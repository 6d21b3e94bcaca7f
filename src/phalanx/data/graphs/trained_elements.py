"""The elements that a run learns from: a file of its directory, for those who use the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from phalanx.data.graphs.manifest import Statistics
from phalanx.errors import CheckpointError
from phalanx.files import write_atomically

FILE = "elements.json"


def elements_of(training: Iterable[Statistics], start: Path | None) -> frozenset[int] | None:
    """Atomic numbers of these training splits, and of what the run's weights were trained on before.

    start: the run directory or checkpoint that they come from. None where that does not say what it was trained on.
    """
    earlier = frozenset() if start is None else trained_elements(start)
    if earlier is None:
        return None
    return earlier.union(*(known.elements for known in training))


def write_elements(elements: frozenset[int], run_dir: Path) -> None:
    """Put them into the run directory."""
    write_atomically(run_dir / FILE, json.dumps({"atomic_numbers": sorted(elements)}) + "\n")


def trained_elements(path: Path) -> frozenset[int] | None:
    """Atomic numbers that the run with this directory, or this checkpoint, was trained on; None where it does not say.

    Raises CheckpointError for a file that cannot be read.
    """
    places = (path / FILE, path.parent.parent / FILE)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return None
    try:
        return frozenset(map(int, json.loads(file.read_text())["atomic_numbers"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: this is no list of atomic numbers ({error}); take the file away") from None
