"""`phalanx lammps`: an input file of LAMMPS, run with a trained network as its potential."""

from __future__ import annotations

from phalanx.cli.options.models import LammpsArguments
from phalanx.families.materials.evaluation.lammps_potential import run_input


def run_lammps(asked: LammpsArguments) -> None:
    """Run the subcommand."""
    run_input(
        asked.input,
        asked.checkpoint,
        asked.elements.replace(",", " ").split(),
        total_charge=asked.charge,
        multiplicity=asked.multiplicity,
        branch=asked.branch,
        dispersion=asked.dispersion,
        untrained_elements=asked.untrained_elements,
        precision=asked.precision,
        device=asked.device,
    )
