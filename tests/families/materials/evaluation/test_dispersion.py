"""D3 dispersion against the program of its authors, and its derivatives in a batch of crystals and molecules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atom_graphs import Structure, batch_of, random_structure
from phalanx.errors import ConfigError
from phalanx.families.materials.evaluation import dispersion
from phalanx.families.materials.evaluation.dispersion import FUNCTIONALS, D3Dispersion, DispersionResult

pytest.importorskip("tad_dftd3", reason="needs the extra dispersion")
authors = pytest.importorskip("dftd3.interface", reason="compares with the package dftd3")
BOHR, HARTREE = dispersion._BOHR, dispersion._HARTREE
CPU = torch.device("cpu")
STRUCTURES = [
    random_structure(1, 6, spread=1.7),
    random_structure(2, 4, periodic=True, spread=1.9),
    Structure([55, 17], 4.12 * np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]), 4.12 * np.eye(3)),
]


def of_batch(structures: list[Structure], functional: str = "pbe") -> DispersionResult:
    batch = batch_of(structures)
    return D3Dispersion(functional, CPU)(
        batch["species_N"], batch["positions_N3"], batch["cells_G33"], batch["graph_N"]
    )


def of_authors(structure: Structure, functional: str = "pbe") -> tuple[float, np.ndarray, np.ndarray]:
    """Energy, forces and virial, without terms of three atoms."""
    cell = None if structure.cell_33 is None else structure.cell_33 / BOHR
    periodic = None if cell is None else np.array([True, True, True])
    model = authors.DispersionModel(
        np.array(structure.species), structure.positions_N3 / BOHR, lattice=cell, periodic=periodic
    )
    found = model.get_dispersion(authors.RationalDampingParam(method=functional, atm=False), grad=True)
    return found["energy"] * HARTREE, -found["gradient"] * HARTREE / BOHR, found["virial"] * HARTREE


def test_energies_forces_and_stress_are_those_of_the_authors() -> None:
    found, first = of_batch(STRUCTURES), 0
    for number, structure in enumerate(STRUCTURES):
        energy, forces_N3, virial_33 = of_authors(structure)
        own = slice(first, first + len(structure.species))
        assert energy < -0.01
        assert float(found.energy_N[own].sum()) == pytest.approx(energy, rel=1e-6)
        np.testing.assert_allclose(found.forces_N3[own].numpy(), forces_N3, rtol=1e-5, atol=1e-7)
        if structure.cell_33 is not None:
            volume = abs(np.linalg.det(structure.cell_33))
            np.testing.assert_allclose(found.stress_G33[number].numpy(), virial_33 / volume, rtol=1e-5, atol=1e-8)
        else:
            assert found.stress_G33[number].isnan().all()
        first = own.stop


@pytest.mark.parametrize("functional", FUNCTIONALS)
def test_damping_of_functionals_is_that_of_the_authors(functional: str) -> None:
    found = of_batch(STRUCTURES[:1], functional)
    assert float(found.energy_N.sum()) == pytest.approx(of_authors(STRUCTURES[0], functional)[0], rel=1e-6)


def test_chunks_of_pairs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_batch(STRUCTURES[:2])
    monkeypatch.setattr(dispersion, "_CHUNK", 1000)
    for a, b in zip(of_batch(STRUCTURES[:2]), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_unknown_functionals_are_refused() -> None:
    with pytest.raises(ConfigError, match="dispersion=lda is not known; choose one of pbe, "):
        D3Dispersion("lda", CPU)
