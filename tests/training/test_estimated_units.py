"""Units that a run file leaves out come from its prepared data, once: a run that goes on keeps those it began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from materials_runs import write_materials_run
from phalanx.cli.config import summarise_run_file
from phalanx.config.load import load_run
from phalanx.errors import DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.training.start import train
from phalanx_processes import train as train_on_ranks


def write_unstated(folder: Path, **changes: Any) -> Path:
    """A prepared run whose file says nothing of units."""
    path = write_materials_run(folder, structures=40)
    text = yaml.safe_load(path.read_text())
    del text["model"]["mean_neighbors"]
    text["model"]["branches"] = [{"name": "toy"}]
    text["model"] |= changes
    text["training"]["steps"] = 2
    path.write_text(yaml.safe_dump(text))
    prepare_graphs(materials_run(path).data, workers=1)
    return path


def materials_run(path: Path, *overrides: str) -> MaterialsRun:
    run = load_run(path, overrides)
    assert isinstance(run, MaterialsRun)
    return run


def first_loss(run_dir: Path) -> float:
    with (run_dir / "metrics.jsonl").open() as lines:
        return float(json.loads(next(lines))["loss"])


def test_what_is_left_out_is_estimated_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_unstated(tmp_path)
    train(materials_run(path), tmp_path / "run")
    said = capsys.readouterr().err
    assert "the run file leaves to the training data: mean_neighbors=" in said
    assert "toy.reference_energies of elements 1, 6, 8" in said
    model = materials_run(tmp_path / "run").model
    # The toy data have -2 eV times the atomic number of each atom, and pairs that add a little.
    assert model.branches[0].reference_energies == pytest.approx({"1": -2.0, "6": -12.0, "8": -16.0}, abs=1.0)
    assert 1.0 < model.mean_neighbors < 9.0 and model.branches[0].energy_scale not in (0.0, 1.0)
    # Without them it begins at squares of tens of eV.
    train(
        materials_run(path, "model.branches=[{name: toy, energy_scale: 1, reference_energies: {}}]"), tmp_path / "raw"
    )
    assert first_loss(tmp_path / "run") < 0.1 * first_loss(tmp_path / "raw")


def test_ranks_agree_on_what_is_left_out_and_on_what_a_checkpoint_has(tmp_path: Path) -> None:
    """The first rank looks; a run on several that goes on has the units that it began with."""
    path = write_unstated(tmp_path)
    train(materials_run(path), tmp_path / "alone")
    for steps in (1, 2):
        train_on_ranks(path, tmp_path / "run", steps, 2, "layout.dp_replicate=2")
    assert materials_run(tmp_path / "run").model == materials_run(tmp_path / "alone").model
    # Another one's units would give other losses.
    assert first_loss(tmp_path / "run") == pytest.approx(first_loss(tmp_path / "alone"), rel=1e-5)


def test_what_is_not_prepared_is_said(tmp_path: Path) -> None:
    path = write_unstated(tmp_path)
    with pytest.raises(DataError, match="prepare the source first: phalanx data prepare-graphs RUN"):
        train(materials_run(path, f"data.prepared={tmp_path / 'nowhere'}"), tmp_path / "run")


def test_what_the_run_file_says_wins(tmp_path: Path) -> None:
    path = write_unstated(tmp_path, mean_neighbors=1.0, branches=[{"name": "toy", "energy_scale": 1.0}])
    train(materials_run(path), tmp_path / "run")
    model = materials_run(tmp_path / "run").model
    assert (model.mean_neighbors, model.branches[0].energy_scale) == (1.0, 1.0)
    assert model.branches[0].reference_energies.keys() == {"1", "6", "8"}


def test_a_run_that_goes_on_keeps_the_units_of_its_checkpoint(tmp_path: Path) -> None:
    """Also one that an older version began, which took 1 and no reference energies for what was left out."""
    path = write_unstated(tmp_path)
    older = ["model.mean_neighbors=1.0", "model.branches=[{name: toy, energy_scale: 1.0, reference_energies: {}}]"]
    train(materials_run(path, *older), tmp_path / "run")
    for place in ("run", "elsewhere"):
        overrides = [] if place == "run" else [f"training.resume={tmp_path / 'run'}"]
        train(materials_run(path, "training.steps=3", *overrides), tmp_path / place)
        model = materials_run(tmp_path / place).model
        assert (model.mean_neighbors, model.branches[0].energy_scale) == (1.0, 1.0)
        assert model.branches[0].reference_energies == {}


def test_weights_from_elsewhere_keep_their_scales(tmp_path: Path) -> None:
    path = write_unstated(tmp_path)
    train(
        materials_run(path, "model.mean_neighbors=3.0", "model.branches=[{name: toy, energy_scale: 7.0}]"),
        tmp_path / "a",
    )
    train(materials_run(path, f"training.init_from={tmp_path / 'a'}"), tmp_path / "b")
    model = materials_run(tmp_path / "b").model
    assert (model.mean_neighbors, model.branches[0].energy_scale) == (3.0, 7.0)
    assert model.branches[0].reference_energies.keys() == {"1", "6", "8"}


def test_config_check_says_what_is_left_to_the_data(tmp_path: Path) -> None:
    path = write_unstated(tmp_path)
    found = summarise_run_file(materials_run(path))["units_from_data"]
    assert [name.split("=")[0].split(" ")[0] for name in found] == [
        "mean_neighbors",
        "toy.energy_scale",
        "toy.reference_energies",
    ]
    assert found[2].endswith("of elements 1, 6, 8")
    unprepared = summarise_run_file(materials_run(path, f"data.prepared={tmp_path / 'nowhere'}"))["units_from_data"]
    assert unprepared[0] == "mean_neighbors" and unprepared[-1].startswith("known once the data are prepared")
    assert "units_from_data" not in summarise_run_file(
        materials_run(write_materials_run(tmp_path / "stated", structures=4))
    )
