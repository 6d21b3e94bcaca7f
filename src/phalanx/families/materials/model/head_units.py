"""What the numbers of each data set mean: reference energies, scales and shifts, and the fit of reference energies."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import DataError
from phalanx.families.materials.model.layers import Constant
from phalanx.families.materials.model_config import MaterialsModel


class BranchUnits:
    """The tables of all branches. Rows are asked for by branch, int64; everything is float64."""

    def __init__(self, config: MaterialsModel) -> None:
        branches = config.branches
        energies = torch.zeros(len(branches), config.max_atomic_number + 1, dtype=torch.float64, device="cpu")
        for row, branch in zip(energies, branches, strict=True):
            for element, energy in branch.reference_energies.items():
                if int(element) <= config.max_atomic_number:
                    row[int(element)] = energy
        self._elements = energies.shape[1]
        self._reference = Constant(energies.flatten())
        self._energy_scale = _table([branch.energy_scale for branch in branches])
        self._weight = _table([branch.weight for branch in branches])
        self.columns: dict[str, tuple[Constant, Constant]] = {}
        """By label: shift and scale of each branch's properties."""
        for label, head in (("properties", config.properties), ("atom_properties", config.atom_properties)):
            if head is not None:
                size = len(head.names)
                shifts = [getattr(branch, f"{label}_shift") or [0.0] * size for branch in branches]
                scales = [getattr(branch, f"{label}_scale") or [1.0] * size for branch in branches]
                self.columns[f"{label}_{'GP' if label == 'properties' else 'NP'}"] = (_table(shifts), _table(scales))

    def reference_energy(self, species_N: Tensor, branch_N: Tensor) -> Tensor:
        """Energy of each atom's element (eV)."""
        return _rows(self._reference, branch_N * self._elements + species_N)

    def energy_scale(self, branch: Tensor) -> Tensor:
        """What one unit of the energy head means (eV)."""
        return _rows(self._energy_scale, branch)

    def weight(self, branch: Tensor) -> Tensor:
        """Factor on the losses."""
        return _rows(self._weight, branch)

    def column_shift(self, label: str, branch: Tensor) -> Tensor:
        """What a property of 0 means, [rows, P]."""
        return _rows(self.columns[label][0], branch)

    def column_scale(self, label: str, branch: Tensor) -> Tensor:
        """What one unit of a property means, [rows, P]."""
        return _rows(self.columns[label][1], branch)


def _table(values: list[float] | list[list[float]]) -> Constant:
    return Constant(torch.tensor(values, dtype=torch.float64, device="cpu"))


def _rows(table: Constant, index: Tensor) -> Tensor:
    return table.on(index.device, torch.float64).index_select(0, index)


def fit_reference_energies(
    species_N: NDArray[np.integer], graph_N: NDArray[np.integer], energy_G: NDArray[np.floating]
) -> tuple[dict[int, float], float]:
    """Energies of elements (eV an atom) whose sums come closest to the energies of structures, by least squares.

    species_N: atomic numbers. graph_N: the structure of each atom. energy_G: eV; structures without (NaN) take no part.
    Returns energies by atomic number and the root mean square of what is left over, per atom (eV): a good `energy_scale`.
    Where compositions do not tell two elements apart, the solution of least norm about the mean energy per atom is taken.
    Raises DataError where no structure has an energy.
    """
    elements, column_N = np.unique(species_N, return_inverse=True)
    counts = np.zeros((len(energy_G), len(elements)))
    np.add.at(counts, (graph_N, column_N), 1.0)
    size_G = counts.sum(1)
    kept = np.isfinite(energy_G) & (size_G > 0)
    if not kept.any():
        raise DataError(
            "no structure has an energy, so no reference energies can be fitted; give structures with energy"
        )
    counts, size, energy = counts[kept], size_G[kept], energy_G[kept].astype(np.float64)
    mean = energy.sum() / size.sum()
    solution = np.linalg.lstsq(counts, energy - mean * size, rcond=1e-10)[0] + mean
    rest = (energy - counts @ solution) / size
    present = counts.any(0)
    found = {int(z): float(e) for z, e, there in zip(elements, solution, present, strict=True) if there}
    return found, float(np.sqrt(np.mean(rest**2)))
