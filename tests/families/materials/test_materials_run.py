"""A materials run through several layouts: losses and held-out errors are those of one rank, to the bit in one layout."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from materials_runs import write_materials_run
from phalanx.config.load import load_run
from phalanx.errors import DataError
from phalanx.families.materials.data.graph_shards import PreparedSource
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.training.inputs import TrainableModel
from phalanx_processes import Trained, train

LAYOUTS = [
    (2, "layout.dp_shard=2", "data.store=memory"),
    (1,),
    (2, "layout.dp_replicate=2", "layout.dp_shard=1", "layout.zero=0"),
]
STEPS = 3
"""In each layout."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_materials_run(tmp_path_factory.mktemp("materials"))
    prepare_graphs(load_run(path).data, workers=1)
    return path


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Trained:
    return train(run_file, run_file.parent / "straight", STEPS * len(LAYOUTS), 1, f"evaluation.every={STEPS}")


def test_a_checkpoint_is_bound_to_no_layout(run_file: Path, straight: Trained) -> None:
    run_dir = run_file.parent / "matrix"
    for number, (ranks, *words) in enumerate(LAYOUTS, 1):
        found = train(run_file, run_dir, STEPS * number, ranks, *words)
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, straight.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-3)
    balance = json.loads((run_dir / "balance.json").read_text())
    assert balance["ranks"] == 2 and balance["by_cost"]["steps"] == balance["by_number"]["steps"] == 100
    assert balance["by_cost"]["wait_mean"] < 0.3 * balance["by_number"]["wait_mean"]
    assert len(found.evaluations) == len(LAYOUTS)
    for scored, expected in zip(found.evaluations, straight.evaluations, strict=True):
        assert scored["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert scored["structures"] == expected["structures"] == 12
        for row, wanted in zip(scored["errors"], expected["errors"], strict=True):
            assert row == {**wanted, "mae": pytest.approx(wanted["mae"], rel=1e-3), "rmse": row["rmse"]}
            assert row["rmse"] == pytest.approx(wanted["rmse"], rel=1e-3)


def test_a_run_whose_costs_were_fitted_goes_on(run_file: Path) -> None:
    """The first costs are forgotten when the second fit is in use; what is said of the first steps is by declared ones."""
    run_dir = run_file.parent / "fitted"
    words = ("layout.dp_shard=2", "data.fit_cost_every=3")
    train(run_file, run_dir, 16, 2, *words)
    said = (run_dir / "balance.json").read_text()
    state = json.loads(next((run_dir / "checkpoints").glob("step-*/state.json")).read_text())
    assert state["costs"][0][0] > 1
    assert len(train(run_file, run_dir, 18, 2, *words).steps) == 18
    assert (run_dir / "balance.json").read_text() == said


def test_the_same_layout_goes_on_to_the_same_bits(run_file: Path, straight: Trained) -> None:
    run_dir = run_file.parent / "parts"
    train(run_file, run_dir, 4, 1)
    # Nor does it matter whether structures come from files.
    resumed = train(run_file, run_dir, STEPS * len(LAYOUTS), 1, "data.store=memory", f"evaluation.every={STEPS}")
    assert resumed.steps == straight.steps
    errors = [[scored["errors"] for scored in one.evaluations[-2:]] for one in (resumed, straight)]
    assert errors[0] == errors[1]


def test_training_lowers_the_loss_and_the_errors(straight: Trained) -> None:
    losses = [loss for loss, _ in straight.steps]
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    first, last = (event["errors"] for event in (straight.evaluations[0], straight.evaluations[-1]))
    assert [(row["source"], row["quantity"], row["unit"]) for row in last] == [
        ("toy", "energy", "eV/atom"),
        ("toy", "forces", "eV/A"),
        ("toy", "charges", "e"),
    ]
    assert last[0]["numbers"] == 12 and last[1]["numbers"] == 3 * last[2]["numbers"]
    assert last[1]["mae"] < first[1]["mae"] and all(row["mae"] <= row["rmse"] for row in last)


def test_a_budget_of_memory_changes_how_a_step_is_cut_and_not_what_it_gives(run_file: Path, straight: Trained) -> None:
    found = train(run_file, run_file.parent / "budget", 3, 1, "data.microbatch_cost=30")
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, straight.steps, strict=False):
        assert (loss, norm) == (pytest.approx(expected_loss, rel=1e-4), pytest.approx(expected_norm, rel=1e-3))


def test_a_budget_decides_how_many_micro_batches_there_are(run_file: Path) -> None:
    run = load_run(run_file, ["data.microbatch_cost=30"])
    inputs = bind(run, TrainableModel).open_inputs(
        resolve_layout(bind(run), 1), ONE_RANK, torch.device("cpu"), first=False
    )
    batch = inputs.stream.next()
    inputs.stream.close()
    parts = list(batch.split(1))
    assert len(parts) > 3
    assert sum(len(part.sample_indices) for part in parts) == len(batch.sample_indices)
    for part in parts:
        x, named = part.inputs()
        assert len(x) + 0.3 * named["edges_2E"].shape[1] <= 30.0


def test_an_element_without_a_reference_energy_beside_others_is_said(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for energies, said in (("{6: -12.0}", True), ("{1: -2.0, 6: -12.0, 8: 0.0}", False), ("{}", False)):
        run = load_run(run_file, [f"model.branches=[{{name: toy, reference_energies: {energies}}}]"])
        bind(run, TrainableModel).open_inputs(
            resolve_layout(bind(run), 1), ONE_RANK, torch.device("cpu"), first=True
        ).stream.close()
        line = (
            "warning: model.branches: toy.reference_energies has none of atomic number 1, 8, which its structures have"
        )
        assert (line in capsys.readouterr().err) == said


def test_an_element_the_model_does_not_know_is_refused(run_file: Path) -> None:
    run = load_run(run_file, ["model.max_atomic_number=7"])
    with pytest.raises(
        DataError, match=r"toy has atomic number 8, model.max_atomic_number=7 is less; set model.max_at"
    ):
        bind(run, TrainableModel).open_inputs(resolve_layout(bind(run), 1), ONE_RANK, torch.device("cpu"), first=False)


def test_slabs_are_refused_where_charges_act_at_any_distance(run_file: Path) -> None:
    run, read = load_run(run_file, ["model.electrostatics={}"]), PreparedSource.shard
    layout = resolve_layout(bind(run), 1)

    def open_first() -> None:
        bind(run, TrainableModel).open_inputs(layout, ONE_RANK, torch.device("cpu"), first=True).stream.close()

    open_first()
    slabs = {"periodic": np.array([[True, True, False], [True, True, True]])}
    with (
        patch.object(PreparedSource, "shard", lambda self, number: read(self, number) | slabs),
        pytest.raises(DataError, match="1 structures of shard 0 are periodic in one or two directions"),
    ):
        open_first()
