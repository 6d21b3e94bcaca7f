"""Trained members of an ensemble, small enough for a test: three networks of the toy force field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from materials_runs import write_materials_run
from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.training.start import train

MEMBERS = (
    ["training.seed=1"],
    ["training.seed=2"],
    ["training.seed=3", "model.body=schnet", "model.d_model=12"],
)
"""Two that are alike, so that they can be stacked, and one that is not."""


def train_members(folder: Path, changes: dict[str, Any] | None = None, *, structures: int = 80) -> list[Path]:
    """Run directories of three members, each hardly trained."""
    shares = {"data.validation_fraction": 0.35, "data.test_fraction": 0.35, "data.microbatch_cost": 600.0}
    run_file = write_materials_run(folder, {**shares, **(changes or {})}, structures=structures)
    run = load_run(run_file)
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    found = []
    for number, words in enumerate(MEMBERS):
        train(load_run(run_file, [*words, "training.steps=6"]), folder / f"member-{number}")
        found.append(folder / f"member-{number}")
    return found
