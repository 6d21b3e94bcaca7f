"""The manifest of a folder of prepared structures of one source.

manifest.json              this file's content; it comes last, so a folder with a manifest is complete
index.safetensors          atoms [G] and edges [G] of every structure, and for each split the numbers of its structures
shard-00000.safetensors    structures one after the other as ragged arrays, see `shards`
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from phalanx.data.prepared_folder import Count, FileRecord, Part
from phalanx.errors import DataError
from phalanx.families.materials.data_config import GraphData, GraphSource
from phalanx.files import write_atomically

MANIFEST = "manifest.json"
INDEX = "index.safetensors"
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Counts(Part):
    """How much there is."""

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
    """What a model may want to know of the training split before it begins."""

    elements: dict[int, int]
    """Atoms of each atomic number."""
    largest_atoms: Count
    """Atoms of the largest structure, over all splits."""
    largest_edges: Count
    """Edges of the structure with most, over all splits."""
    degrees: list[Count]
    """Atoms with 0, 1, 2, ... incoming edges."""
    labels: dict[str, LabelStatistics]
    reference_energies: dict[int, float]
    """Energy in eV of an atom of each element, by least squares over the energies; empty without energies."""
    residual_std: float | None
    """Standard deviation in eV an atom of energies minus the reference energies."""
    total_charges: dict[int, int] = Field(default_factory=dict)
    """Structures of each total charge, over all splits, of a source with charges or total charges; see `total_charge`."""
    taken_for_neutral: Count = 0
    """Structures of such a source that say nothing of their total charge."""


class Manifest(Part):
    """Everything a reader needs to know about a folder of prepared structures."""

    format: Literal["phalanx-graphs"] = "phalanx-graphs"
    version: Literal[1] = 1
    source: str
    settings: dict[str, Any]
    """What the result depends on besides the files: see `settings_of`."""
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
    totals: Counts
    splits: dict[Split, Counts]
    index: FileRecord
    shards: list[ShardRecord]
    statistics: Statistics

    def write(self, folder: Path) -> None:
        """Write it into `folder`."""
        write_atomically(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")

    @property
    def fingerprint(self) -> str:
        """A hash of all data: equal exactly where a run would read the same."""
        content = [self.index.sha256, *(shard.data.sha256 for shard in self.shards)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def settings_of(source: GraphSource, data: GraphData) -> dict[str, Any]:
    """What a prepared source depends on besides its files, as plain data."""
    # What is only refused or not changes nothing of what is prepared.
    kept = source.model_dump(mode="json", exclude={"name", "path", "weight", "charge_sum"})
    shared = {"cutoff", "max_neighbours", "validation_fraction", "test_fraction"}
    return kept | data.model_dump(mode="json", include=shared)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`. Raises DataError naming the file and what is wrong with it."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; prepare the source first: phalanx data prepare-graphs RUN"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise DataError(f"{path}: {where}: {first['msg']}; prepare the source again") from None


def check_settings(folder: Path, manifest: Manifest, source: GraphSource, data: GraphData) -> None:
    """Refuse a folder prepared under other settings. Raises DataError naming the first that differs."""
    wanted = settings_of(source, data)
    for field in sorted(wanted.keys() | manifest.settings.keys()):
        if wanted.get(field) != manifest.settings.get(field):
            raise DataError(
                f"{folder} was prepared with {field}={json.dumps(manifest.settings.get(field))}, source {source.name} now "
                f"asks for {json.dumps(wanted.get(field))}; choose another data.prepared, or delete that folder"
            )
