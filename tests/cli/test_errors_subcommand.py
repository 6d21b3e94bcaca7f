"""`phalanx errors` as a person calls it: the numbers are those that training's own evaluation wrote down."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from materials_runs import write_materials_run, write_molecules
from phalanx.config.load import load_run
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.evaluation.network_predictions import split_errors
from phalanx.families.materials.evaluation.prediction_errors import GraphErrors
from phalanx.training.start import train

if TYPE_CHECKING:
    from command_line import Call


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    run = load_run(write_materials_run(folder, structures=40), ["training.steps=1", "evaluation.samples=1000"])
    prepare_graphs(run.data, workers=1)  # type: ignore[arg-type]
    train(run, folder / "run")
    return folder / "run"


def test_errors_are_those_of_the_evaluation_in_training(call: Call, run_dir: Path) -> None:
    done = call("errors", str(run_dir), "--split", "validation", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    wanted = next(event for event in events if event["kind"] == "evaluation")
    assert found["structures"] == wanted["structures"] > 3
    assert found["untrained_elements"] == {}
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    for row, expected in zip(found["errors"], wanted["errors"], strict=True):
        assert row == {**expected, "mae": pytest.approx(expected["mae"]), "rmse": pytest.approx(expected["rmse"])}


def _share(run_dir: Path) -> GraphErrors:
    return split_errors(run_dir, "validation", torch.device("cpu"), ranks=dist.get_world_size())[1]


def test_ranks_that_share_the_structures_all_get_the_errors_of_one(run_dir: Path) -> None:
    where, whole = split_errors(run_dir, "validation", torch.device("cpu"))
    assert where.parent == run_dir / "checkpoints"
    for found in run_ranks(_share, 3, run_dir):
        assert (found.structures, found.untrained) == (whole.structures, whole.untrained)
        assert found.loss == pytest.approx(whole.loss, rel=1e-5)
        for row, expected in zip(found.rows, whole.rows, strict=True):
            near = {"mae": pytest.approx(expected.mae, rel=1e-5), "rmse": pytest.approx(expected.rmse, rel=1e-5)}
            assert asdict(row) == {**asdict(expected), **near}


def test_a_person_reads_units(call: Call, run_dir: Path) -> None:
    done = call("errors", str(run_dir), "--device", "cpu", "--samples", "3")
    title, energy, forces, charges = done.out.splitlines()
    assert title.startswith(f"{run_dir}/checkpoints/step-00000001 on the test split: 3 structures, loss ")
    assert energy.startswith("  toy energy ") and energy.endswith(" meV/atom")
    assert forces.startswith("  toy forces ") and forces.endswith(" meV/A")
    assert charges.startswith("  toy charges ") and charges.endswith(" e")


def test_structures_of_elements_that_were_not_trained_on_are_said(call: Call, run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "elements.json").write_text('{"atomic_numbers": [1, 6, 8], "branches": {"toy": [1, 6]}}')
    words = ("errors", str(tmp_path / "run"), "--split", "validation", "--device", "cpu")
    done = call(*words, "--json")
    found = json.loads(done.out)
    count = found["untrained_elements"]["toy"]["8"]
    assert 0 < count <= found["structures"]
    last = call(*words).out.splitlines()[-1]
    assert last.startswith(
        f"warning: toy: {count} of these structures have atomic number 8, which no training structure of"
    )


def outside_file(folder: Path, labels: dict[str, str]) -> list[str]:
    """Fields that name another file of structures, as if it had these labels alone, all of it to be scored."""
    folder.mkdir()
    write_molecules(folder / "outside.npz", 12, seed=7)
    source = {"name": "outside", "path": str(folder / "outside.npz"), "labels": labels, "check_units": False}
    shares = ["data.validation_fraction=0", "data.test_fraction=0"]
    return [f"data.sources={json.dumps([source])}", f"data.prepared={folder}/prepared", *shares]


def test_an_outside_file_is_scored_on_the_labels_it_has(call: Call, run_dir: Path, tmp_path: Path) -> None:
    words = outside_file(tmp_path / "all", {"energy": "eV", "forces": "eV/A", "charges": "e"})
    assert call("data", "prepare-graphs", str(run_dir), *words).code == 0
    done = call("errors", str(run_dir), *words, "--split", "train", "--device", "cpu", "--json")
    whole = json.loads(done.out)
    assert whole["structures"] == 12 and whole["unlabelled"] == {"outside": []}
    words = outside_file(tmp_path / "some", {"forces": "eV/A"})
    prepared = call("data", "prepare-graphs", str(run_dir), *words)
    assert prepared.code == 0 and " ".join(prepared.err.split()).startswith(
        "warning: training would refuse this: model.energy learns energy, which no source in data.sources has "
        "warning: training would refuse this: model.charges learns charges, which no source in data.sources has"
    )
    command = ("errors", str(run_dir), *words, "--split", "train", "--device", "cpu")
    done = call(*command, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["structures"] == 12 and found["unlabelled"] == {"outside": ["energy", "charges"]}
    (forces,) = found["errors"]
    expected = next(row for row in whole["errors"] if row["quantity"] == "forces")
    assert forces == {**expected, "mae": pytest.approx(expected["mae"]), "rmse": pytest.approx(expected["rmse"])}
    assert 0 < found["loss"] < whole["loss"]
    assert call(*command).out.splitlines()[-1] == "outside has no labels of energy, charges"


def test_a_file_without_any_label_is_refused(call: Call, run_dir: Path, tmp_path: Path) -> None:
    words = outside_file(tmp_path / "none", {})
    assert call("data", "prepare-graphs", str(run_dir), *words).code == 0
    done = call("errors", str(run_dir), *words, "--split", "train", "--device", "cpu")
    assert done.code == 1 and " ".join(done.err.split()).startswith(
        f"error: {tmp_path}/none/prepared has no label in the train split of what the model learned (energy, forces, charges"
    )


def test_training_on_such_a_file_stays_refused(call: Call, run_dir: Path, tmp_path: Path) -> None:
    done = call("train", str(run_dir), *outside_file(tmp_path / "some", {"forces": "eV/A"}))
    assert done.code == 2 and "model.energy learns energy, which no source in data.sources has" in done.err


def test_an_empty_split_is_refused(call: Call, run_dir: Path) -> None:
    folder = run_dir.parent / "no-test"
    run_file = write_materials_run(folder, {"data.test_fraction": 0.0}, structures=20)
    prepare_graphs(load_run(run_file).data, workers=1)  # type: ignore[arg-type]
    sources = json.dumps([source.model_dump() for source in load_run(run_file).data.sources])  # type: ignore[attr-defined]
    words = [f"data.prepared={folder}/prepared", "data.test_fraction=0.0", f"data.sources={sources}"]
    done = call("errors", str(run_dir), *words, "--device", "cpu")
    assert done.code == 1
    assert done.err == (
        f"error: the test split in {folder}/prepared is empty; prepare with data.test_fraction above 0\n"
    )
