"""Errors of members on a split: those that each has alone, whatever is batched together and on how many ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from ensemble_members import train_members
from phalanx.cli.models.ensemble import print_ensemble
from phalanx.config.load import load_run
from phalanx.ensemble.family import EnsembleOptions
from phalanx.ensemble.members import ENSEMBLE, Member, Share, open_member, read_ensemble
from phalanx.ensemble.residuals import Residuals
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.ensemble.build_ensemble import build_ensemble
from phalanx.families.materials.ensemble.joint_predictions import LoadedEnsemble
from phalanx.families.materials.ensemble.member_errors import member_residuals, untrained_elements
from phalanx.families.materials.evaluation.network_predictions import split_errors
from phalanx.families.materials.inputs import columns_of
from phalanx.launch.fork_server import run_ranks
from phalanx.training.start import train

CPU = torch.device("cpu")


def opened(folders: list[Path], *words: str) -> list[Member]:
    return [open_member(folder, words) for folder in folders]


def assert_same(found: list[Residuals], wanted: list[Residuals]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.structures_n, other.structures_n)
        scale = np.abs(other.errors_Mn).max()
        np.testing.assert_allclose(one.errors_Mn, other.errors_Mn, atol=2e-5 * scale)


def test_structures_of_elements_that_a_member_was_not_trained_on_are_said(
    member_dirs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = [tmp_path / folder.name for folder in member_dirs[:2]]
    for folder, copy in zip(member_dirs, copies, strict=False):
        shutil.copytree(folder, copy)
    assert untrained_elements(opened(copies), "test") == {}
    (copies[1] / "elements.json").write_text('{"atomic_numbers": [1, 6, 8], "branches": {"toy": [1, 6]}}')
    built = build_ensemble(opened(copies), EnsembleOptions(weights="equal"), CPU)
    assert list(built.untrained["test"]) == list(built.untrained["validation"]) == ["toy"]
    (count,) = built.untrained["test"]["toy"].values()
    print_ensemble(built.summary())
    assert f"test split, toy: {count} of these structures have atomic number 8" in " ".join(
        capsys.readouterr().out.split()
    )


def test_errors_are_those_of_each_member_alone(member_dirs: list[Path]) -> None:
    found = member_residuals(opened(member_dirs), "test", CPU)
    for number, folder in enumerate(member_dirs):
        _, alone = split_errors(folder, "test", CPU)
        assert len(alone.rows) == len(found) == 3
        for row, rows in zip(alone.rows, found, strict=True):
            errors = rows.errors_Mn[number].astype(np.float64)
            assert (row.source, row.quantity, row.unit, row.numbers) == (
                rows.source,
                rows.quantity,
                rows.unit,
                rows.count,
            )
            assert np.abs(errors).mean() == pytest.approx(row.mae, rel=1e-5)
            assert np.sqrt(np.square(errors).mean()) == pytest.approx(row.rmse, rel=1e-5)


def test_batches_and_members_side_by_side_change_nothing(member_dirs: list[Path]) -> None:
    wanted = member_residuals(opened(member_dirs), "validation", CPU)
    few = member_residuals(opened(member_dirs, "data.microbatch_cost=90"), "validation", CPU, side_by_side=2)
    assert_same(few, wanted)
    by_number = opened(member_dirs, "data.microbatch_cost=null")
    assert_same(member_residuals(by_number, "validation", CPU, side_by_side=1), wanted)


def _on_rank(folders: list[str]) -> list[Residuals]:
    share = Share(dist.get_rank(), dist.get_world_size())
    return member_residuals(opened([Path(folder) for folder in folders]), "test", CPU, share=share)


def test_ranks_share_structures_and_all_get_the_whole(member_dirs: list[Path]) -> None:
    wanted = member_residuals(opened(member_dirs), "test", CPU)
    for found in run_ranks(_on_rank, 2, [str(folder) for folder in member_dirs]):
        assert_same(found, wanted)


def test_an_ensemble_is_built_written_and_read(member_dirs: list[Path], tmp_path: Path) -> None:
    built = build_ensemble(opened(member_dirs), EnsembleOptions(top=2), CPU)
    assert len(built.members) == 2 and [label.quantity for label in built.labels] == ["energy", "forces", "charges"]
    for label in built.labels:
        assert label.scores.coverage["0.9"] > label.raw.coverage["0.9"] - 0.05
        assert label.scores.mae <= np.dot(built.chosen.weights, [one.mae for one in label.members])
        assert label.fitted.structures >= 10
        assert len(label.conformal_curve) == 19 and label.conformal_curve[9] == label.conformal["0.5"].coverage
    document = built.document(tmp_path / "a" / "b")
    document.write(tmp_path / "a" / "b")
    back = read_ensemble(tmp_path / "a" / "b")
    assert back.labels == document.labels and back.members == document.members
    for entry, member in zip(back.members, built.members, strict=True):
        assert (tmp_path / "a" / "b" / entry.checkpoint).resolve() == member.checkpoint.resolve()
    found = back.label("toy", "forces")
    assert found is not None and back.label("toy", "stress") is None
    (tmp_path / "a" / "b" / ENSEMBLE).write_text('{"format": "phalanx-ensemble", "family": "materials"}')
    with pytest.raises(CheckpointError, match=r"ensemble.json: members: Field required; make the ensemble again"):
        read_ensemble(tmp_path / "a" / "b")


def test_what_does_not_go_together_is_refused(member_dirs: list[Path], tmp_path: Path) -> None:
    first, second, _ = member_dirs
    with pytest.raises(ConfigError, match="a model that is named twice adds nothing"):
        build_ensemble(opened([first, second, first]), EnsembleOptions(), CPU)
    with pytest.raises(ConfigError, match="at least two members"):
        build_ensemble(opened([first]), EnsembleOptions(), CPU)
    with pytest.raises(ConfigError, match=r"differs from .* in quantities: energy, forces, stress, not .*charges"):
        build_ensemble([*opened([first]), open_member(second, ["model.charges=null"])], EnsembleOptions(), CPU)
    others = train_members(tmp_path, {"data.validation_fraction": 0.2}, structures=40)
    with pytest.raises(DataError, match=r"was trained on other structures of source toy than"):
        build_ensemble(opened([first, others[0]]), EnsembleOptions(), CPU)
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint|not a folder"):
        open_member(tmp_path)


def test_one_branch_takes_several_data_sets(member_dirs: list[Path], tmp_path: Path) -> None:
    """The second data set has labels that the first lacks: all are scored, and all are calibrated in the calculator."""
    run = yaml.safe_load((member_dirs[0].parent / "run.yaml").read_text())
    (toy,) = run["data"]["sources"]
    sources = [
        toy | {"name": "charged", "labels": {"charges": "e"}},
        toy | {"name": "pulled", "labels": {"energy": "eV", "forces": "eV/A"}},
    ]
    run["data"] |= {"sources": sources, "prepared": str(tmp_path / "prepared")}
    run["model"]["branches"][0]["name"] = "both"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        loaded = load_run(tmp_path / "run.yaml", [f"training.seed={seed}", "training.steps=2"])
        assert isinstance(loaded, MaterialsRun)
        prepare_graphs(loaded.data, workers=1)
        train(loaded, folder)
    _, alone = split_errors(folders[0], "test", CPU)
    found = member_residuals(opened(folders), "test", CPU)
    assert [rows.name for rows in found] == ["charged charges", "pulled energy", "pulled forces"]
    for row, rows in zip(alone.rows, found, strict=True):
        assert np.abs(rows.errors_Mn[0].astype(np.float64)).mean() == pytest.approx(row.mae, rel=1e-5)
    build_ensemble(opened(folders), EnsembleOptions(), CPU).document(tmp_path).write(tmp_path)
    ensemble = LoadedEnsemble(tmp_path, CPU)
    batch = GraphBatchStream(
        graph_order(open_prepared(loaded.data, "test"), loaded.data, seed=1, global_batch=2),
        columns_of(loaded, open_prepared(loaded.data, "train")),
        prefetch=0,
    ).batch(1)
    x, inputs = batch.inputs()
    seen = {name: value for name, value in inputs.items() if name not in batch.tasks}
    stated = ensemble.predict(x, **{**seen, "source_G": torch.zeros_like(batch.source_G)}).std
    assert set(stated) == {"energy", "forces", "charges"}
