"""An example run of graphs whose nodes are no atoms: begun on one rank, it goes on with its nodes shared between two."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.samples.plate import write_plates
from phalanx_processes import train

EXAMPLE = Path(__file__).parents[3] / "examples/materials-plate.yaml"


def test_plates_go_on_in_another_layout(tmp_path: Path) -> None:
    write_plates(tmp_path / "plate", plates=12)
    content = yaml.safe_load(EXAMPLE.read_text())
    content["model"] |= {"n_layers": 2, "d_model": 8}
    content["data"] |= {"prepared": str(tmp_path / "prepared"), "validation_fraction": 0.2}
    content["data"]["sources"][0]["path"] = str(tmp_path / "plate/plate.npz")
    content["layout"] = {"global_batch": 2, "microbatch": 1, "precision": "fp32"}
    content["optimizer"] = {"lr": 1e-3, "schedule": "constant"}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(content))
    run = load_run(run_file)
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    straight = train(run_file, tmp_path / "straight", 4, 1, "evaluation.every=4")
    train(run_file, tmp_path / "moved", 2, 1)
    moved = train(
        run_file,
        tmp_path / "moved",
        4,
        2,
        "layout.cp=2",
        "layout.dp_shard=1",
        "data.store=memory",
        "evaluation.every=4",
    )
    for (loss, norm), (expected_loss, expected_norm) in zip(moved.steps, straight.steps, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-3)
    scored, expected = moved.evaluations[-1], straight.evaluations[-1]
    assert scored["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    rows = {row["quantity"]: row for row in scored["errors"]}
    assert rows.keys() == {"compliance", "moved_x", "moved_y", "mises", "yields"}
    assert rows["yields"]["accuracy"] == 1.0 - rows["yields"]["mae"] and rows["mises"]["accuracy"] is None
    for row in expected["errors"]:
        assert rows[row["quantity"]]["rmse"] == pytest.approx(row["rmse"], rel=1e-3)
