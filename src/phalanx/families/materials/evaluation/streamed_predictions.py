"""Predictions over any number of structures, streamed to a folder of parts that are whole or absent.

A killed call is made again and goes on with the parts that are missing, on any number of ranks. Ranks share nothing but
the folder: each makes its own parts, then those that others have not finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from pydantic import Field

from phalanx.checkpoint.manifest import MANIFEST_NAME
from phalanx.data.prepared_folder import (
    MANIFEST,
    Count,
    FileRecord,
    FolderManifest,
    Progress,
    file_record,
    prepare_once,
    read_checked,
)
from phalanx.data.prepared_folder import Part as ManifestPart
from phalanx.ensemble.members import ALONE, Share
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.prepare_structures import fingerprint_files
from phalanx.families.materials.evaluation.prediction_parts import Part, count_reasons, predict_part
from phalanx.families.materials.evaluation.structure_pools import PoolPlace, PoolSequence, find_pools
from phalanx.families.materials.evaluation.structure_predictor import StructurePredictor
from phalanx.files import write_atomically


class PartRecord(ManifestPart):
    """One part: its file, and what it holds."""

    file: FileRecord
    structures: Count
    atoms: Count
    without: Count
    """Structures that could not be computed, and have NaN."""
    reasons: dict[str, int] = Field(default_factory=dict)
    """Why, and how often: the most frequent ones."""


class PredictionManifest(FolderManifest):
    """What a folder of predictions holds."""

    format: Literal["phalanx-predictions"] = "phalanx-predictions"
    checkpoint: str
    branch: str
    inputs: list[str]
    """Files and folders, in order; rows of parts are their structures in this order."""
    plan: str
    """A hash of model, inputs and options."""
    structures: Count
    atoms: Count
    without: Count
    parts: list[PartRecord]


@dataclass(frozen=True)
class PredictionOptions:
    """What is predicted of, and in what portions."""

    pools: Sequence[str]
    """Files, patterns and prepared folders."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a source, of all files."""
    part_structures: int = 8192
    batch_atoms: int = 4096


def stream_predictions(
    predictor: StructurePredictor, options: PredictionOptions, out: Path, progress: Progress, share: Share = ALONE
) -> PredictionManifest | None:
    """Write predictions of all structures to `out` and return what is there; None on ranks other than the first.

    share: this rank among those that share the structures; all call it, and see the same folder.

    Raises DataError for files that cannot be read, a folder with other content and a full disk, and ConfigError for a branch
    that was taught no energies.
    """
    refusal = predictor.explain_untaught("energy")
    if refusal is not None:
        raise ConfigError(refusal)
    run = predictor.network.run
    places = find_pools(options.pools, run.model.cutoff, run.data.max_neighbours, options.fields)
    if share.rank:
        work, lengths = _agree(share, None)
        if work is not None:
            for _ in _make_parts(predictor, options, PoolSequence(places, lengths), sum(lengths), work, share):
                pass
        return None
    plan, told = _plan(predictor, options, places), []

    def build(work: Path) -> tuple[PredictionManifest, list[Path]]:
        lengths = [len(place.open()) for place in places]
        if not sum(lengths):
            raise DataError(f"{', '.join(options.pools)}: there are no structures")
        told.append(True)
        _agree(share, (work, lengths))
        total = -(-sum(lengths) // options.part_structures)
        for done in _make_parts(predictor, options, PoolSequence(places, lengths), sum(lengths), work, share):
            progress("predicting", done, total)
        parts = [read_checked(_record(work, part), PartRecord, missing="run again") for part in range(total)]
        manifest = PredictionManifest(
            checkpoint=str(predictor.network.where),
            branch=predictor.branch_name,
            inputs=[str(place.path) for place in places],
            plan=plan,
            structures=sum(part.structures for part in parts),
            atoms=sum(part.atoms for part in parts),
            without=sum(part.without for part in parts),
            parts=parts,
        )
        return manifest, [work / part.file.name for part in parts]

    manifest = prepare_once(
        out,
        plan,
        read=lambda folder: read_checked(folder / MANIFEST, PredictionManifest, missing="predict again"),
        build=build,
        results=("part-*.npz",),
        option="--out",
        otherwise="holds predictions of another model, of other files or with other options",
        again="run the same command again",
    )
    if not told:
        _agree(share, (None, []))
    return manifest


def _agree(share: Share, told: tuple[Path | None, list[int]] | None) -> tuple[Path | None, list[int]]:
    """Return what the first rank tells all: the work folder, None where all is done, and structures of each pool."""
    words = [told]
    if share.ranks > 1:
        dist.broadcast_object_list(words, src=0)
    assert words[0] is not None
    return words[0]


def _plan(predictor: StructurePredictor, options: PredictionOptions, places: Sequence[PoolPlace]) -> str:
    """Return a hash of all that predictions depend on."""
    networks = [predictor.network] if predictor.ensemble is None else predictor.ensemble.members
    # A checkpoint's manifest has the checksums of its tensors.
    weights = [hashlib.sha256((network.where / MANIFEST_NAME).read_bytes()).hexdigest() for network in networks]
    files = [str(place.path) if place.prepared else str(fingerprint_files([place.path])) for place in places]
    planned = [weights, predictor.branch_name, str(predictor.network.model.dtype), files, dict(options.fields)]
    return hashlib.sha256(json.dumps([*planned, options.part_structures]).encode()).hexdigest()


def _make_parts(
    predictor: StructurePredictor,
    options: PredictionOptions,
    structures: PoolSequence,
    count: int,
    work: Path,
    share: Share,
) -> Iterator[int]:
    """Make the parts that are missing; yields how many there are after each."""
    total = -(-count // options.part_structures)
    own = range(share.rank, total, share.ranks)
    # Others' from behind: whoever is slower, or is gone, meets who is faster.
    others = [part for part in reversed(range(total)) if part not in own]
    for part in (*own, *others):
        # The first rank moves all parts in place when they are there.
        if _record(work, part).exists() or not work.exists():
            continue
        start = part * options.part_structures
        stop = min(start + options.part_structures, count)
        found = predict_part(predictor, structures.read(start, stop), options.batch_atoms)
        if len(found.arrays["ptr"]) != stop - start + 1:
            raise DataError(f"{', '.join(options.pools)}: structures are gone since their number was read; run again")
        try:
            _write_part(found, work, part)
        except OSError:
            # The first rank may have moved all parts, this one included, in place meanwhile.
            if work.exists():
                raise
            return
        yield sum(1 for _ in work.glob("part-*.json"))


def _write_part(found: Part, work: Path, part: int) -> None:
    """Write a part and, when it is whole, its record. Raises OSError."""
    path = work / f"part-{part:06d}.npz"
    found.write(path)
    record = PartRecord(
        file=file_record(path),
        structures=len(found.arrays["ptr"]) - 1,
        atoms=len(found.arrays["z"]),
        without=len(found.reasons),
        reasons=count_reasons(found.reasons),
    )
    write_atomically(_record(work, part), record.model_dump_json())


def _record(work: Path, part: int) -> Path:
    return work / f"part-{part:06d}.json"
