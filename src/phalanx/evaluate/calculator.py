"""A trained network as an ASE calculator: dynamics, relaxations and all else that ASE does, with one line.

    atoms.calc = PhalanxCalculator("runs/materials-xtb")

Neighbours are found on the device, anew for each geometry. Forces are minus the derivative of the energy, so that dynamics
conserve it as far as the time step allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.cluster.device import choose_device
from phalanx.data.graphs.device_neighbours import device_edges
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.evaluate.materials import load_network
from phalanx.layout.precision import PRECISIONS
from phalanx.models.materials.losses import Predictions

try:
    from ase import Atoms
    from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
    from ase.stress import full_3x3_to_voigt_6_stress
except ImportError as error:
    raise PhalanxError('the ASE calculator needs ase: pip install "phalanx-train[materials]"') from error


class PhalanxCalculator(Calculator):
    """Energy (eV), forces (eV/A), stress (eV/A^3, tension positive, of fully periodic cells); charges (e) and dipole (e*A)
    where the model predicts them. The structure's total charge is `atoms.info["charge"]`, 0 where that is not given."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        branch: str | None = None,
        device: str = "auto",
        precision: str | None = None,
        edge_chunk: int | None = None,
        **options: Any,
    ) -> None:
        """checkpoint: folder of a run, or of one checkpoint. branch: the data set whose energies are meant, of a model that
        has several. device: as `cluster.device`. precision: fp32 or fp64 instead of the run's. edge_chunk: edges computed at
        a time, for structures that would not fit. options: ASE's own.

        Raises CheckpointError where there is no sound checkpoint, ConfigError for an unknown branch, device or precision,
        and for a model without energies.
        """
        super().__init__(**options)
        if precision is not None and precision not in PRECISIONS:
            raise ConfigError(f"precision={precision} is none of {', '.join(PRECISIONS)}")
        self.device = choose_device(device)
        dtype = None if precision is None else PRECISIONS[precision]
        self.network = load_network(Path(checkpoint), self.device, dtype)
        model = self.network.run.model
        if model.energy is None:
            raise ConfigError(f"{self.network.where}: its model has no energy, which dynamics and relaxations need")
        self.network.model.edge_chunk = edge_chunk
        self._branch = self.network.branch(branch)
        extra = {"charges": model.charges, "dipole": model.dipole}
        self.implemented_properties = [
            *("energy", "free_energy", "energies", "forces", "stress"),
            *(name for name, head in extra.items() if head is not None),
        ]

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """What ASE calls. Raises DataError for an element the model does not know and for a position that is no number."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        periodic = bool(self.atoms.pbc.all())
        if "stress" in properties and not periodic:
            raise PropertyNotImplementedError("stress needs a cell that is periodic in all three directions")
        found = self._predict(self.atoms, forces="forces" in properties, stress=periodic and "stress" in properties)
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

    def _predict(self, atoms: Atoms, *, forces: bool, stress: bool) -> Predictions:
        run, device = self.network.run, self.device
        heaviest = int(atoms.numbers.max(initial=0))
        if heaviest > run.model.max_atomic_number:
            raise DataError(
                f"the structure has atomic number {heaviest}; the model of {self.network.where} knows elements up to "
                f"{run.model.max_atomic_number}"
            )
        # Float64 as ASE has them: dynamics take differences of positions that are far smaller than the positions.
        positions_N3 = torch.from_numpy(np.asarray(atoms.positions, dtype=np.float64)).to(device)
        cell = np.where(atoms.pbc[:, None], atoms.cell.array, 0.0)
        cells_G33 = torch.from_numpy(cell[None]).to(device)
        neighbours = run.data.max_neighbours
        edges = device_edges(positions_N3, cells_G33, run.model.cutoff, max_neighbours=neighbours)
        charge = float(atoms.info.get("charge", 0.0))
        with torch.no_grad():
            return self.network.model.predict(
                torch.from_numpy(atoms.numbers.astype(np.int64)).to(device),
                positions_N3=positions_N3,
                graph_N=torch.zeros(len(atoms), dtype=torch.int64, device=device),
                edges_2E=edges.edges_2E,
                shifts_E3=edges.shifts_E3,
                cells_G33=cells_G33,
                source_G=torch.full((1,), self._branch, device=device),
                total_charge_G=torch.full((1,), charge, dtype=torch.float64, device=device),
                max_atoms=len(atoms),
                forces=forces,
                stress=stress,
            )
