"""A trained network, or an ensemble of them, as an ASE calculator: dynamics, relaxations and all else that ASE does.

    atoms.calc = PhalanxCalculator("runs/materials-xtb")
    atoms.calc = PhalanxCalculator("ensembles/xtb")          # with atoms.calc.results["forces_uncertainty"]

Neighbours are found on the device, anew for each geometry. Forces are minus the derivative of the energy, so that dynamics
conserve it as far as the time step allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.errors import DataError, PhalanxError
from phalanx.families.materials.data.structures import agreed_total
from phalanx.families.materials.evaluation.structure_predictor import GivenStructures, StructurePredictor
from phalanx.families.materials.model.losses import Predictions

try:
    from ase import Atoms
    from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
    from ase.outputs import Properties
    from ase.stress import full_3x3_to_voigt_6_stress
except ImportError as error:
    raise PhalanxError('the ASE calculator needs ase: pip install "phalanx-train[materials]"') from error

_OF_ENERGY = ("energy", "free_energy", "energies", "forces", "stress")
"""Properties that the energy head gives; others have a head of their own name."""
_UNCERTAINTY = "_uncertainty"
"""Ending of the name of a property's uncertainty."""
_STRAIGHT = 1e-6
"""Share of its length that a cell vector may have along a direction in which the structure does not repeat."""
_NEUTRAL_E = 1e-6
"""Elementary charges below which a structure is neutral."""


class PhalanxCalculator(Calculator):
    """Energy (eV), forces (eV/A), stress (eV/A^3, tension positive, of fully periodic cells); charges (e) and dipole (e*A)
    where the model predicts them. One evaluation of the network gives all of them. The structure's total charge is
    `atoms.info["charge"]`, without it what `atoms.get_initial_charges()` adds up to, which is 0 where nobody set them; its
    multiplicity is `atoms.info["spin"]`, as in OMol25, and 1 without it. Energies depend on both where the model's
    `electronic_state` names them.

    A dipole along a periodic direction depends on the images that atoms are written as: it is NaN there, and refused where
    no component is left.

    An ensemble gives the mean of its members, and `results["energy_uncertainty"]`, `results["forces_uncertainty"]` and so
    on beside it: calibrated standard deviations, in the units and shapes of what they belong to."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        branch: str | None = None,
        device: str = "auto",
        precision: str | None = None,
        edge_chunk: int | None = None,
        untrained_elements: bool = False,
        dispersion: str | None = None,
        **options: Any,
    ) -> None:
        """All but ASE's own `options` as `StructurePredictor` has them."""
        super().__init__(**options)
        self._predictor = StructurePredictor(
            checkpoint,
            branch=branch,
            device=device,
            precision=precision,
            edge_chunk=edge_chunk,
            untrained_elements=untrained_elements,
            dispersion=dispersion,
        )
        self.network, self.ensemble = self._predictor.network, self._predictor.ensemble
        untaught, model = self._predictor.untaught, self.network.run.model
        extra = {"charges": model.charges, "dipole": model.dipole}
        there = [*_OF_ENERGY, *(name for name, head in extra.items() if head is not None)]
        self.implemented_properties = [name for name in there if _head_of(name) not in untaught]
        if self.ensemble is not None:
            # The spread of members is known of what validation has labels of, which these two are not.
            uncertain = [name for name in self.implemented_properties if name not in ("free_energy", "energies")]
            self.implemented_properties += [f"{name}{_UNCERTAINTY}" for name in uncertain]

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Tell ASE what has changed since results were computed: the total charge and the multiplicity count, too."""
        changes: list[str] = super().check_state(atoms, tol)
        if self.atoms is not None and _total_charge(atoms) != _total_charge(self.atoms):
            changes.append("charge")
        if self.atoms is not None and _multiplicity(atoms) != _multiplicity(self.atoms):
            changes.append("spin")
        return changes

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """Answer ASE's question for a property. Raises PropertyNotImplementedError, too, for what the branch was never
        trained on."""
        refusal = self._predictor.explain_untaught(_head_of(name.removesuffix(_UNCERTAINTY)))
        if refusal is not None:
            raise PropertyNotImplementedError(f"{name}: {refusal}")
        return super().get_property(name, atoms, allow_calculation)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Compute all results for ASE. Raises DataError for an element the model does not know or its branch was not
        trained on, a position or total charge that is no number, two atoms on one place, and a periodic cell without
        volume."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        asked = {name.removesuffix(_UNCERTAINTY) for name in properties}
        if "stress" in asked and not self.atoms.pbc.all():
            raise PropertyNotImplementedError("stress needs a cell that is periodic in all three directions")
        across = _components_across_cell(self.atoms)
        if "dipole" in asked and not across.any():
            charge = _total_charge(self.atoms)
            charged = f" and a total charge of {charge:g} e" if abs(charge) >= _NEUTRAL_E else ""
            raise PropertyNotImplementedError(
                f"dipole: with pbc={self.atoms.pbc.tolist()}{charged} it depends on which periodic images the atoms are "
                "written as; set atoms.pbc=False for a molecule in a box, or ask for that of a neutral slab whose surface "
                "is normal to x, y or z"
            )
        found, stds = self._predict(self.atoms)
        assert found.energy_G is not None and found.atom_energies_N is not None
        energy = float(found.energy_G)
        self.results = {"energy": energy, "free_energy": energy, "energies": found.atom_energies_N.numpy(force=True)}
        for name, value in (("forces", found.forces_N3), ("charges", found.charges_N)):
            if value is not None:
                self.results[name] = value.double().numpy(force=True)
        if found.dipole_G3 is not None:
            self.results["dipole"] = found.dipole_G3[0].double().numpy(force=True)
        if found.stress_G33 is not None:
            self.results["stress"] = full_3x3_to_voigt_6_stress(found.stress_G33[0].double().numpy(force=True))
        for name, std in stds.items():
            values: Any = std.numpy(force=True)
            if name == "stress":
                values = full_3x3_to_voigt_6_stress(values[0])
            elif name in ("energy", "dipole"):
                values = float(values[0]) if name == "energy" else values[0]
            self.results[f"{name}{_UNCERTAINTY}"] = values
        # Along the cell a dipole depends on which images the atoms are written as: nobody should read a number there.
        for name in ("dipole", f"dipole{_UNCERTAINTY}"):
            dipole = self.results.pop(name, None)
            if dipole is not None and across.any():
                self.results[name] = np.where(across, dipole, np.nan)
        self.results = {name: value for name, value in self.results.items() if name in self.implemented_properties}

    def export_properties(self) -> Properties:
        """Give `atoms.get_properties` its results: ASE knows no uncertainties, which stay in `results`."""
        return Properties({name: value for name, value in self.results.items() if not name.endswith(_UNCERTAINTY)})

    def _predict(self, atoms: Atoms) -> tuple[Predictions, dict[str, Tensor]]:
        """Return all that can be predicted, and by quantity its uncertainty where that is known.

        The stress comes with every energy of a crystal: relaxations and dynamics ask for all of them, one after another, and
        ASE keeps the results of one geometry.
        """
        given = GivenStructures(
            species_N=torch.from_numpy(atoms.numbers.astype(np.int64)),
            positions_N3=torch.from_numpy(np.array(atoms.positions, dtype=np.float64)),
            cells_G33=torch.from_numpy(np.array(atoms.cell.array[None], dtype=np.float64)),
            periodic_G3=torch.from_numpy(atoms.pbc[None].copy()),
            graph_N=torch.zeros(len(atoms), dtype=torch.int64),
            total_charge_G=torch.tensor([_total_charge(atoms)], dtype=torch.float64),
            multiplicity_G=torch.tensor([_multiplicity(atoms)], dtype=torch.float64),
        )
        return self._predictor.predict(given, stress=bool(atoms.pbc.all()))


def _components_across_cell(atoms: Atoms) -> npt.NDArray[np.bool_]:
    """Return which cartesian components [3] of a dipole do not depend on the periodic images that atoms are written as.

    They are those that no periodic cell vector has a share in, of a cell without a charge: that of a slab across it. All are
    of a structure that is not periodic.
    """
    vectors = atoms.cell.array[atoms.pbc]
    if not len(vectors):
        return np.ones(3, dtype=bool)
    straight = np.abs(vectors) <= _STRAIGHT * np.linalg.norm(vectors, axis=1, keepdims=True)
    neutral = abs(_total_charge(atoms)) < _NEUTRAL_E
    across: npt.NDArray[np.bool_] = straight.all(axis=0) & neutral
    return across


def _head_of(name: str) -> str:
    """Return the head that a property of ASE's comes from."""
    return "energy" if name in _OF_ENERGY else name


def _total_charge(atoms: Atoms) -> float:
    """Return the total charge, e. Raises DataError for what is no finite number, and for charges of atoms that say
    something else."""
    given = atoms.info.get("charge", 0.0)
    try:
        charge = float(given)
    except (TypeError, ValueError):
        charge = float("nan")
    if not np.isfinite(charge):
        raise DataError(f'atoms.info["charge"] is {given!r}; give the total charge as a number of elementary charges')
    if not atoms.has("initial_charges"):
        return charge
    found = float(atoms.get_initial_charges().sum())
    total = agreed_total(found, charge if "charge" in atoms.info else None)
    if total is None:
        against = f'but atoms.info["charge"] is {charge:g}' if "charge" in atoms.info else "which is no whole number"
        raise DataError(
            f"atoms.get_initial_charges() adds up to {found:g} e, {against}; give the total charge as "
            'atoms.info["charge"], and initial charges that add up to it or none'
        )
    return total


def _multiplicity(atoms: Atoms) -> float:
    """Return the multiplicity 2S + 1. Raises DataError for what is no whole number from 1 on."""
    given = atoms.info.get("spin", 1)
    try:
        multiplicity = float(given)
    except (TypeError, ValueError):
        multiplicity = float("nan")
    if not (multiplicity >= 1.0 and multiplicity.is_integer()):
        raise DataError(
            f'atoms.info["spin"] is {given!r}; give the multiplicity 2S + 1, the number of unpaired electrons and one'
        )
    return multiplicity
