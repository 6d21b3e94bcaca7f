"""Dynamics of one network in LAMMPS and in ASE: the same numbers, and energy that is kept for 10 ps.

    python benchmarks/lammps_dynamics.py --out benchmarks/results/materials/lammps_dynamics.json --folder runs/lammps

Trains a PaiNN and a MACE of `examples/materials-quickstart.yaml` for some steps on sample structures, then takes a
cluster and an alloy crystal of these. Energies, forces and pressure of LAMMPS are compared with those of the ASE calculator
in float64; then both integrate 10 ps by velocity Verlet with 5 fs from the same velocities. The drift is the slope of the
total energy. Both use one thread of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.lammps import Prism
from ase.io.lammpsdata import write_lammps_data
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from ase.stress import full_3x3_to_voigt_6_stress

from phalanx.families.materials.evaluation.calculator import PhalanxCalculator
from phalanx.families.materials.evaluation.lammps_potential import LammpsPotential, open_lammps

EXAMPLE = Path(__file__).parents[1] / "examples" / "materials-quickstart.yaml"
BODIES = {
    "painn": ["model.d_model=32"],
    "mace": ["model.body=mace", "model.n_layers=2", "model.d_model=16"],
}
"""Fields of each network beside those of the example."""
TIMESTEP_PS, DURATION_PS = 0.005, 10.0
RECORDED = 10
"""Steps between two records of the total energy."""
PRESSURE = ("pxx", "pyy", "pzz", "pyz", "pxz", "pxy")
"""LAMMPS' components in ASE's order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for data and runs; those that are there are taken")
    parser.add_argument("--steps", type=int, default=400, help="of training")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    root = asked.folder
    root.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": git("rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "versions": {name: metadata.version(name) for name in ("torch", "ase", "lammps", "numpy")},
        "timestep_ps": TIMESTEP_PS,
        "duration_ps": DURATION_PS,
        "cases": [],
    }
    if not (root / "data").exists():
        phalanx(root, "data", "sample", "molecules", "--out", "data/molecules")
        phalanx(root, "data", "prepare-graphs", EXAMPLE)
    for body, fields in BODIES.items():
        given = [*fields, f"training.steps={asked.steps}", "training.compile=false", f"training.run_dir=runs/{body}"]
        if not (root / "runs" / body).exists():
            phalanx(root, "train", EXAMPLE, *given)
        for branch, atoms in structures(root / "data" / "molecules").items():
            result["cases"].append({"body": body, "branch": branch} | compare(root / "runs" / body, branch, atoms))
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(result, indent=1) + "\n")


def phalanx(folder: Path, *words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "phalanx", *map(str, words)], check=True, cwd=folder, env=dict(os.environ))


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], check=True, capture_output=True, text=True, cwd=EXAMPLE.parent)
    return done.stdout.strip()


def structures(folder: Path) -> dict[str, Atoms]:
    """Return the last cluster and the last crystal, whose cell is shorter than the cutoff, with velocities of 300 K."""
    found = {}
    for branch in ("clusters", "crystals"):
        arrays = np.load(folder / f"{branch}.npz")
        last = slice(arrays["ptr"][-2], arrays["ptr"][-1])
        atoms = Atoms(arrays["z"][last], arrays["pos"][last])
        if "cell" in arrays:
            atoms.set_cell(arrays["cell"][-1])
            atoms.pbc = True
        else:
            atoms.center(vacuum=10.0)
        MaxwellBoltzmannDistribution(atoms, temperature_K=300.0, rng=np.random.default_rng(0))
        Stationary(atoms)
        found[branch] = atoms
    return found


def compare(run: Path, branch: str, atoms: Atoms) -> dict[str, Any]:
    """Return differences of one geometry, and drifts and seconds of both programs."""
    atoms.calc = PhalanxCalculator(run, branch=branch, precision="fp64", device="cpu")
    periodic = bool(atoms.pbc.all())
    prism = Prism(atoms.cell.array, pbc=atoms.pbc)
    elements = sorted(set(atoms.symbols))
    lmp = open_lammps(["-screen", "none", "-log", "none"])
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "atoms.data")
        write_lammps_data(
            data, atoms, specorder=elements, masses=True, velocities=True, units="metal", atom_style="atomic"
        )
        lmp.commands_string(
            f"units metal\natom_style atomic\nboundary {'p p p' if periodic else 's s s'}\nread_data {data}\n"
            f"pair_style zero 3.0\npair_coeff * *\nfix move all nve\ntimestep {TIMESTEP_PS}\n"
            f"thermo_style custom step pe etotal press {' '.join(PRESSURE)}"
        )
    potential = LammpsPotential(lmp, run, elements, branch=branch, precision="fp64", device="cpu")
    # Without velocities first: pressure is then that of the potential alone.
    velocities = lmp.numpy.extract_atom("v")[: len(atoms)].copy()
    lmp.numpy.extract_atom("v")[: len(atoms)] = 0.0
    potential.command("run 0")
    order = np.argsort(lmp.numpy.extract_atom("id")[: len(atoms)])
    forces_N3 = lmp.numpy.extract_atom("f")[: len(atoms)][order]
    expected_N3 = prism.vector_to_lammps(atoms.get_forces())
    energy = atoms.get_potential_energy()
    result: dict[str, Any] = {
        "atoms": len(atoms),
        "elements": elements,
        "energy_relative": abs(lmp.get_thermo("pe") - energy) / abs(energy),
        "forces_relative": float(np.abs(forces_N3 - expected_N3).max() / np.abs(expected_N3).max()),
    }
    if periodic:
        # In LAMMPS' own bar, whose constant has other digits than ASE's.
        pressure_6 = np.array([lmp.get_thermo(name) for name in PRESSURE]) / lmp.extract_global("nktv2p")
        stress_33 = prism.rot_mat.T @ atoms.get_stress(voigt=False) @ prism.rot_mat
        expected_6 = -full_3x3_to_voigt_6_stress(stress_33)
        result["stress_relative"] = float(np.abs(pressure_6 - expected_6).max() / np.abs(expected_6).max())
    lmp.numpy.extract_atom("v")[: len(atoms)] = velocities
    steps = round(DURATION_PS / TIMESTEP_PS)
    lammps_T, ase_T = [], []
    began = time.process_time()
    potential.command("run 0")
    lammps_T.append(lmp.get_thermo("etotal"))
    for _ in range(steps // RECORDED):
        potential.command(f"run {RECORDED} pre no post no")
        lammps_T.append(lmp.get_thermo("etotal"))
    lammps_seconds = time.process_time() - began
    lmp.close()
    began = time.process_time()
    dynamics = VelocityVerlet(atoms, 1000.0 * TIMESTEP_PS * units.fs)
    dynamics.attach(lambda: ase_T.append(atoms.get_total_energy()), interval=RECORDED)
    dynamics.run(steps)
    for name, totals_T, seconds in (
        ("lammps", lammps_T, lammps_seconds),
        ("ase", ase_T, time.process_time() - began),
    ):
        by_atom_T = 1000.0 * np.array(totals_T) / len(atoms)
        times_T = np.arange(len(by_atom_T)) * RECORDED * TIMESTEP_PS
        result[name] = {
            "records": len(by_atom_T),
            "drift_mev_atom_ps": float(np.polyfit(times_T, by_atom_T, 1)[0]),
            "range_mev_atom": float(np.ptp(by_atom_T)),
            "cpu_ms_step": 1000.0 * seconds / steps,
            "total_energy_mev_atom_less_first": [round(x, 5) for x in (by_atom_T - by_atom_T[0])[::10].tolist()],
        }
    return result


if __name__ == "__main__":
    main()
