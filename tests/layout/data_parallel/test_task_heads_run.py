"""A training run on three data sets that changes its sub-groups as it goes: losses and errors are those of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from materials_runs import SECTIONS, write_molecules
from phalanx.config.load import load_run
from phalanx.errors import DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.registry import bind
from phalanx.layout.data_parallel.task_heads import branch_sizes
from phalanx.layout.resolve import resolve_layout
from phalanx_processes import train

STEPS = 2
"""In each layout."""
LAYOUTS = [
    (2, "layout.dp_shard=2", "layout.branch_groups=auto"),
    (1, "layout.branch_groups=auto"),
    (2, "layout.dp_replicate=2", "layout.dp_shard=1", "layout.zero=0", "layout.branch_groups=[1,1,0]"),
]
SETS = {"small": (20, ["energy", "forces", "charges"]), "bare": (15, ["energy"]), "large": (60, ["energy", "forces"])}
"""Structures and labels of each data set."""
UNITS = {"energy": "eV", "forces": "eV/A", "charges": "e"}


def write_run(folder: Path) -> Path:
    """A run file with a branch for each of three sets, prepared."""
    sections = {name: dict(fields) for name, fields in SECTIONS.items()}
    sources = []
    for seed, (name, (structures, labels)) in enumerate(SETS.items()):
        write_molecules(folder / f"{name}.npz", structures, seed)
        units = {label: UNITS[label] for label in labels}
        sources.append({"name": name, "path": str(folder / f"{name}.npz"), "labels": units, "check_units": False})
    sections["data"] |= {"sources": sources, "prepared": str(folder / "prepared")}
    sections["model"]["branches"] = [{"name": name, "reference_energies": {"6": -12.0, "8": -16.0}} for name in SETS]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    prepare_graphs(load_run(path).data, workers=1)
    return path


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("three"))


def test_a_run_goes_on_with_other_sub_groups_and_without(run_file: Path) -> None:
    straight, changing = run_file.parent / "straight", run_file.parent / "changing"
    whole = train(run_file, straight, STEPS * len(LAYOUTS), 1)
    for number, (ranks, *words) in enumerate(LAYOUTS, 1):
        found = train(run_file, changing, STEPS * number, ranks, *words)
    errors, expected_errors = (run.evaluations[-1]["errors"] for run in (found, whole))
    assert len(found.steps) == STEPS * len(LAYOUTS)
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, whole.steps, strict=True):
        assert (loss, norm) == (pytest.approx(expected_loss, rel=1e-4), pytest.approx(expected_norm, rel=1e-3))
    for row, expected in zip(errors, expected_errors, strict=True):
        assert row == {**expected, "mae": pytest.approx(expected["mae"], rel=1e-3), "rmse": row["rmse"]}
    # What the first steps of the last layout would wait, its sub-groups taken into account.
    balance = json.loads((changing / "balance.json").read_text())
    without = balance["by_cost_without_branch_groups"]
    assert balance["ranks"] == 2 and balance["by_cost"]["wait_mean"] > 2.0 * without["wait_mean"]


def test_auto_goes_by_the_cost_of_the_prepared_data(run_file: Path) -> None:
    run = load_run(run_file, ["layout.branch_groups=auto"])
    assert isinstance(run, MaterialsRun)
    costs = []
    for source, (structures, _) in zip(run.data.sources, SETS.values(), strict=True):
        index = json.loads((Path(run.data.prepared) / source.name / "manifest.json").read_text())
        counts = index["splits"]["train"]
        assert counts["structures"] <= structures
        costs.append(counts["atoms"] + 0.3 * counts["edges"])
    assert bind(run).branch_costs() == pytest.approx(costs)
    assert np.argmax(costs) == 2
    assert [branch_sizes(bind(run), ranks) for ranks in (1, 2, 3, 8)][:3] == [(), (1, 0, 1), (1, 1, 1)]
    assert branch_sizes(bind(run), 8)[2] >= 5
    layout = resolve_layout(bind(load_run(run_file, ["layout.branch_groups=auto", "layout.global_batch=16"])), 8)
    assert layout.branch_groups == branch_sizes(bind(run), 8) and "branch_groups=[" in str(layout)
    # As often read as the others, in spite of its size.
    weights = [f"data.sources.{number}.weight=1" for number in range(3)]
    weighted = bind(load_run(run_file, weights)).branch_costs()
    assert max(weighted) / min(weighted) < 0.5 * max(costs) / min(costs)


def test_sizes_by_cost_need_prepared_data(run_file: Path) -> None:
    run = load_run(run_file, ["layout.branch_groups=auto", f"data.prepared={run_file.parent / 'nowhere'}"])
    with pytest.raises(DataError, match="nowhere"):
        resolve_layout(bind(run), 2)
    assert resolve_layout(bind(run), 1).branch_groups == ()
