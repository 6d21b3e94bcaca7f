"""One part of the predictions over many structures: batches bounded by atoms, in arrays as an .npz source has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.errors import DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.array_files import Arrays, ragged_offsets
from phalanx.families.materials.data.labels import labels_of, length_factor
from phalanx.families.materials.data.structures import RawStructure, convert_structure
from phalanx.families.materials.evaluation.structure_predictor import GivenStructures, StructurePredictor
from phalanx.files import replace_file

_NAMES = {
    "energy_G": "energy",
    "forces_N3": "forces",
    "stress_G33": "stress",
    "charges_N": "charges",
    "dipole_G3": "dipole",
}
"""Names in the files, which are those of labels."""
_PER_ATOM = ("forces", "charges")


@dataclass(frozen=True)
class _Entry:
    """One structure, in angstrom."""

    species: npt.NDArray[np.int64]
    positions: npt.NDArray[np.float64]
    cell: npt.NDArray[np.float64]
    periodic: tuple[bool, bool, bool]
    charge: float = 0.0
    multiplicity: float = 1.0
    reason: str | None = None
    """Why it has no predictions; None where it can have them."""


@dataclass(frozen=True)
class Part:
    """Predictions of consecutive structures, in their order."""

    arrays: Arrays
    """`ptr`, `z`, `pos`, `cell` and `pbc` as in an .npz source, and what was predicted: NaN of structures without."""
    reasons: list[str]
    """Why structures have no predictions, one each."""

    def write(self, path: Path) -> None:
        """Write the part, whole or not at all. Raises OSError."""
        with replace_file(path) as file:
            np.savez(file, allow_pickle=False, **self.arrays)


def predict_part(
    predictor: StructurePredictor, structures: Iterable[tuple[RawStructure, GraphSource]], batch_atoms: int
) -> Part:
    """Return what is predicted of `structures`, some `batch_atoms` atoms at a time.

    A structure that cannot be computed (an unknown element, two atoms on one place) keeps its row, with NaN. Raises
    DataError where a file cannot be read on.
    """
    entries: list[_Entry] = []
    found: list[Arrays] = []
    waiting, atoms = 0, 0
    reasons: list[str] = []
    for raw, source in structures:
        entry = _convert(raw, source)
        entries.append(entry)
        waiting, atoms = waiting + 1, atoms + len(entry.species)
        if atoms >= batch_atoms:
            found.append(_predict(predictor, entries[-waiting:], reasons))
            waiting = atoms = 0
    if waiting:
        found.append(_predict(predictor, entries[-waiting:], reasons))
    given: Arrays = {
        "ptr": ragged_offsets(np.array([len(one.species) for one in entries], dtype=np.int64)),
        "z": np.concatenate([one.species for one in entries]).astype(np.uint8),
        "pos": np.concatenate([one.positions for one in entries]),
        "cell": np.stack([one.cell for one in entries]),
        "pbc": np.array([one.periodic for one in entries]),
    }
    return Part(given | _join(found), reasons)


def _convert(raw: RawStructure, source: GraphSource) -> _Entry:
    """Return a structure in angstrom, or with the reason why it is none."""
    try:
        sound = convert_structure(raw, labels_of(source), length_factor(source), missing_allowed=True)
    except DataError as error:
        nothing = np.empty(0, dtype=np.int64)
        return _Entry(nothing, np.empty((0, 3)), np.zeros((3, 3)), (False, False, False), reason=str(error))
    # As dynamics have them: shards round positions to float32.
    positions = np.asarray(raw.positions, dtype=np.float64) * length_factor(source)
    charge, multiplicity = (float(sound.labels.get(name, np.nan)) for name in ("total_charge", "multiplicity"))
    return _Entry(
        sound.species.astype(np.int64),
        positions,
        np.where(np.array(raw.periodic)[:, None], np.asarray(raw.cell, dtype=np.float64), 0.0) * length_factor(source),
        raw.periodic,
        0.0 if np.isnan(charge) else charge,
        1.0 if np.isnan(multiplicity) else multiplicity,
    )


def _predict(predictor: StructurePredictor, entries: Sequence[_Entry], reasons: list[str]) -> Arrays:
    """Return predictions of a batch by name, NaN of entries that have none; adds why to `reasons`."""
    sound = [one for one in entries if one.reason is None]
    values: Arrays = {}
    failed = []
    try:
        if sound:
            values = _predict_sound(predictor, sound)
    except DataError as error:
        # Which structure it is, halves tell.
        if len(sound) > 1:
            middle = len(entries) // 2
            return _join([_predict(predictor, half, reasons) for half in (entries[:middle], entries[middle:])])
        failed = [str(error)]
    reasons += [*(one.reason for one in entries if one.reason is not None), *failed]
    atoms = np.array([len(one.species) for one in entries])
    if not values:
        return {"energy": np.full(len(entries), np.nan), "forces": np.full((int(atoms.sum()), 3), np.nan)}
    kept_G = np.array([one.reason is None for one in entries])
    found: Arrays = {}
    for name, value in values.items():
        kept = np.repeat(kept_G, atoms) if name.removesuffix("_std") in _PER_ATOM else kept_G
        found[name] = np.full((len(kept), *value.shape[1:]), np.nan, dtype=value.dtype)
        found[name][kept] = value
    return found


def _predict_sound(predictor: StructurePredictor, entries: Sequence[_Entry]) -> Arrays:
    """Return predictions of structures that can be computed, by name."""
    atoms_G = torch.tensor([len(one.species) for one in entries])
    periodic_G3 = torch.tensor([one.periodic for one in entries])
    given = GivenStructures(
        species_N=torch.from_numpy(np.concatenate([one.species for one in entries])),
        positions_N3=torch.from_numpy(np.concatenate([one.positions for one in entries])),
        cells_G33=torch.from_numpy(np.stack([one.cell for one in entries])),
        periodic_G3=periodic_G3,
        graph_N=torch.arange(len(entries)).repeat_interleave(atoms_G),
        total_charge_G=torch.tensor([one.charge for one in entries], dtype=torch.float64),
        multiplicity_G=torch.tensor([one.multiplicity for one in entries], dtype=torch.float64),
    )
    found, stds = predictor.predict(given, stress=bool(periodic_G3.all(1).any()))
    values: dict[str, Any] = {name: getattr(found, field) for field, name in _NAMES.items()}
    values |= {f"{name}_std": std for name, std in stds.items()}
    return {name: value.detach().numpy(force=True) for name, value in values.items() if value is not None}


def _join(parts: Sequence[Arrays]) -> Arrays:
    """Return arrays one behind the other, with NaN where a part lacks one that another has."""
    shapes = {name: array.shape[1:] for part in parts for name, array in part.items()}
    rows = {name: "forces" if name.removesuffix("_std") in _PER_ATOM else "energy" for name in shapes}
    return {
        name: np.concatenate(
            [part[name] if name in part else np.full((len(part[rows[name]]), *shape), np.nan) for part in parts]
        )
        for name, shape in shapes.items()
    }


def count_reasons(reasons: Iterable[str], most: int = 20) -> dict[str, int]:
    """Return how often each reason was given, the first `most` of them."""
    return dict(Counter(reasons).most_common(most))
