"""Sample structures: metal clusters and alloy crystals on their way through molecular dynamics, with energies and forces.

The potential is effective medium theory (Jacobsen, Stoltze and Norskov 1996) as ASE has it, made for just these metals.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.prepared_folder import Progress, SampleManifest, write_sample
from phalanx.errors import PhalanxError

try:
    from ase import Atoms, units
    from ase.build import bulk
    from ase.calculators.emt import EMT
    from ase.md.langevin import Langevin
except ImportError as error:
    raise PhalanxError('sample molecules need ase: pip install "phalanx-train[materials]"') from error

METALS = ("Al", "Ni", "Cu", "Pd", "Ag", "Pt", "Au")
CLUSTERS, CRYSTALS = "clusters.npz", "crystals.npz"
FRAMES = 10
"""Structures kept of each trajectory: far enough apart to differ, and of one group, which falls into one split."""
_BETWEEN = 8
"""Steps of 5 fs between two of them."""
_SETTLING = 24
"""Steps before the first one, in which a lattice becomes warm."""
_LATTICE = {"Al": 4.05, "Ni": 3.52, "Cu": 3.61, "Pd": 3.89, "Ag": 4.09, "Pt": 3.92, "Au": 4.08}
"""Lattice constants in angstrom (Kittel, Introduction to Solid State Physics, chapter 1)."""
Random = np.random.Generator


def write_molecules(
    folder: Path, *, trajectories: int = 80, seed: int = 0, progress: Progress = lambda what, done, total: None
) -> SampleManifest:
    """Simulate trajectories of clusters, and half as many of crystals, write them into `folder` and return its record.

    The same seed gives the same bytes on the same machine. Raises DataError where files are already there.
    """
    total = trajectories + -(-trajectories // 2)

    def make(target: Path) -> None:
        done = 0
        for name, build, count in (
            (CLUSTERS, build_cluster, trajectories),
            (CRYSTALS, build_crystal, total - trajectories),
        ):
            frames: list[Atoms] = []
            groups: list[int] = []
            for number in range(count):
                # A stream of numbers for each: a trajectory is the same whatever else is asked for.
                random = np.random.default_rng([seed, len(name), number])
                frames += simulate(build(random), random)
                groups += [number] * FRAMES
                done += 1
                progress("simulating structures", done, total)
            (target / name).write_bytes(pack_arrays(frames, groups))

    return write_sample(folder, "molecules", seed, (CLUSTERS, CRYSTALS), make)


def build_cluster(random: Random) -> Atoms:
    """Return a compact piece of a lattice, 4 to 12 atoms of up to three metals."""
    metals = random.choice(METALS, random.integers(1, 4), replace=False)
    symbols = random.choice(metals, random.integers(4, 13))
    lattice = bulk("Cu", a=float(np.mean([_LATTICE[symbol] for symbol in symbols])), cubic=True) * (3, 3, 3)
    # Around any point of the lattice: some have an atom in the middle, others a bond or a gap.
    middle = lattice.cell.sum(axis=0) / 2 + random.uniform(-1.0, 1.0, 3)
    nearest = np.argsort(np.linalg.norm(lattice.positions - middle, axis=1), kind="stable")[: len(symbols)]
    return Atoms(symbols, lattice.positions[nearest] - middle)


def build_crystal(random: Random) -> Atoms:
    """Return an alloy of up to three metals on 16 places of a lattice that is slightly strained."""
    metals = random.choice(METALS, random.integers(1, 4), replace=False)
    symbols = random.choice(metals, 16)
    atoms: Atoms = bulk("Cu", a=float(np.mean([_LATTICE[symbol] for symbol in symbols])), cubic=True) * (2, 2, 1)
    atoms.set_chemical_symbols(list(symbols))
    strain = random.uniform(-0.02, 0.02, (3, 3))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    return atoms


def simulate(atoms: Atoms, random: Random) -> list[Atoms]:
    """Return `FRAMES` structures of a trajectory at some temperature between 300 and 1000 K."""
    atoms.calc = EMT()
    temperature = float(random.uniform(300.0, 1000.0))
    # Velocities of that temperature (Maxwell and Boltzmann).
    spread = np.sqrt(atoms.get_masses() * units.kB * temperature)[:, None]
    atoms.set_momenta(spread * random.standard_normal((len(atoms), 3)))
    dynamics = Langevin(
        atoms, 5.0 * units.fs, temperature_K=temperature, friction=0.02 / units.fs, fixcm=False, rng=random
    )
    dynamics.run(_SETTLING)
    frames = []
    for _ in range(FRAMES):
        dynamics.run(_BETWEEN)
        frame = atoms.copy()
        # Labels belong to just these positions.
        frame.info["energy"], frame.arrays["force"] = atoms.get_potential_energy(), atoms.get_forces()
        if atoms.pbc.all():
            frame.info["stress"] = atoms.get_stress(voigt=False)
        frames.append(frame)
    return frames


def pack_arrays(frames: list[Atoms], groups: list[int]) -> bytes:
    """Return structures as the bytes of an .npz file, in eV and angstrom, laid out as `structure_files.NpzFile` says."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "ptr": np.cumsum([0, *map(len, frames)]),
        "z": np.concatenate([frame.numbers for frame in frames]).astype(np.uint8),
        "pos": np.concatenate([frame.positions for frame in frames]),
        "energy": np.array([frame.info["energy"] for frame in frames]),
        "forces": np.concatenate([frame.arrays["force"] for frame in frames]),
        "trajectory": np.array(groups),
    }
    if "stress" in frames[0].info:
        arrays["cell"] = np.stack([frame.cell.array for frame in frames])
        arrays["stress"] = np.stack([frame.info["stress"] for frame in frames])
    content = io.BytesIO()
    save: Callable[..., None] = np.savez_compressed
    save(content, **arrays)
    return content.getvalue()
