"""Predictions over many structures: those of `errors`, whole after a kill, the same on any number of ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from materials_runs import hardly_trained, write_molecules
from phalanx.errors import DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.data.structure_files import open_structures
from phalanx.families.materials.evaluation import streamed_predictions
from phalanx.families.materials.evaluation.network_predictions import load_network, split_errors
from phalanx.families.materials.evaluation.streamed_predictions import PredictionOptions, stream_predictions
from phalanx.families.materials.evaluation.structure_predictor import StructurePredictor

STRUCTURES = 50


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hardly_trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, whose parts do not end where the first does."""
    folder = tmp_path_factory.mktemp("pool")
    write_molecules(folder / "a.npz", 33, seed=5)
    write_molecules(folder / "b.npz", STRUCTURES - 33, seed=6)
    return folder


def predict(trained: Path, pool: Path, out: Path, **options: Any) -> Any:
    predictor = StructurePredictor(trained, device="cpu")
    given = PredictionOptions(
        [str(pool / "*.npz")], part_structures=options.pop("part", 8), batch_atoms=20, fields=options
    )
    return stream_predictions(predictor, given, out, lambda what, done, total: None)


def arrays_of(out: Path) -> dict[str, np.ndarray]:
    parts = [dict(np.load(path)) for path in sorted(out.glob("part-*.npz"))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "ptr"}


def test_figures_are_those_of_errors_and_parts_can_be_trained_on(trained: Path, pool: Path, tmp_path: Path) -> None:
    manifest = predict(trained, pool, tmp_path / "out")
    assert (manifest.structures, len(manifest.parts), manifest.without) == (STRUCTURES, 7, 0)
    found = arrays_of(tmp_path / "out")
    given = [dict(np.load(pool / name)) for name in ("a.npz", "b.npz")]
    energy = np.concatenate([one["energy"] for one in given])
    forces = np.concatenate([one["forces"] for one in given])
    atoms = np.concatenate([np.diff(one["ptr"]) for one in given])
    run = load_network(trained, torch.device("cpu")).run
    labels = {"energy": "eV", "forces": "eV/A"}
    source = {"name": "toy", "path": str(pool / "*.npz"), "labels": labels, "check_units": False}
    overrides = [f"data.sources={json.dumps([source])}", f"data.prepared={tmp_path / 'prepared'}"]
    overrides += ["data.validation_fraction=0", "data.test_fraction=0"]
    changes = {"prepared": str(tmp_path / "prepared"), "validation_fraction": 0.0, "test_fraction": 0.0}
    prepare_graphs(run.data.model_copy(update={**changes, "sources": [GraphSource.model_validate(source)]}), workers=1)
    _, errors = split_errors(trained, "train", torch.device("cpu"), overrides=overrides)
    rows = {row.quantity: row for row in errors.rows}
    assert np.abs((found["energy"] - energy) / atoms).mean() == pytest.approx(rows["energy"].mae, rel=1e-5)
    assert np.abs(found["forces"] - forces).mean() == pytest.approx(rows["forces"].mae, rel=1e-5)
    # And are a source themselves.
    part = GraphSource.model_validate(
        {"name": "s", "path": str(tmp_path / "out" / "part-000000.npz"), "labels": labels}
    )
    assert len(list(open_structures(Path(part.path), part).read(0, 8))) == 8


def test_finished_parts_are_not_made_again(
    trained: Path, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    whole = streamed_predictions.predict_part

    def fail_at_fourth(*given: Any) -> Any:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(1)
        return whole(*given)

    monkeypatch.setattr(streamed_predictions, "predict_part", fail_at_fourth)
    with pytest.raises(KeyboardInterrupt):
        predict(trained, pool, tmp_path / "out")
    assert not list((tmp_path / "out").glob("part-*"))
    made.clear()
    monkeypatch.setattr(streamed_predictions, "predict_part", lambda *given: (made.append(1), whole(*given))[1])
    predict(trained, pool, tmp_path / "out")
    assert len(made) == 4
    predict(trained, pool, tmp_path / "out")
    assert len(made) == 4
    with pytest.raises(DataError, match="holds predictions of another model, of other files or with other options"):
        predict(trained, pool, tmp_path / "out", part=9)


def test_what_cannot_be_computed_is_nan_and_counted(trained: Path, pool: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(pool / "b.npz"))
    first, second = arrays["ptr"][3], arrays["ptr"][7]
    arrays["z"][first], arrays["pos"][second] = 7, arrays["pos"][second + 1]
    (tmp_path / "bad").mkdir()
    np.savez(tmp_path / "bad" / "b.npz", **arrays)
    manifest = predict(trained, tmp_path / "bad", tmp_path / "out", part=100)
    found, good = (
        arrays_of(tmp_path / "out"),
        predict(trained, pool, tmp_path / "good") and arrays_of(tmp_path / "good"),
    )
    assert manifest.without == 2 and np.flatnonzero(np.isnan(found["energy"])).tolist() == [3, 7]
    assert any("atomic number 7" in reason for reason in manifest.parts[0].reasons)
    sound = ~np.isnan(found["energy"])
    np.testing.assert_allclose(found["energy"][sound], good["energy"][33:][sound], rtol=1e-6)


KILLED = """
import os, signal, sys
from pathlib import Path
from phalanx.families.materials.evaluation import streamed_predictions as streamed
from phalanx.families.materials.evaluation.structure_predictor import StructurePredictor

whole, made = streamed.predict_part, []

def strike(*given):
    made.append(given)
    if len(made) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)

streamed.predict_part = strike
options = streamed.PredictionOptions([sys.argv[2]], part_structures=1, batch_atoms=20)
predictor = StructurePredictor(Path(sys.argv[1]), device="cpu")
streamed.stream_predictions(predictor, options, Path(sys.argv[3]), lambda *told: None)
"""
"""Predicts until it is killed in its sixth part."""


def test_two_ranks_go_on_where_one_was_killed_and_give_what_one_gives(
    trained: Path, pool: Path, tmp_path: Path
) -> None:
    words = [str(trained), str(pool / "*.npz"), str(tmp_path / "out")]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    finished = [path.with_suffix(".npz") for path in (tmp_path / "out" / ".work").glob("part-*.json")]
    before = {path.name: path.stat().st_mtime_ns for path in finished}
    assert len(before) == 5
    words = [sys.executable, "-m", "phalanx", "predict", *words[:2], "--device", "cpu", "--out", words[2]]
    words += ["--part", "1", "--batch-atoms", "20", "--nproc", "2"]
    again = subprocess.run(words, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "50 structures in 50 parts" in again.stdout
    # What was whole when the first was killed was not written again.
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before}
    predict(trained, pool, tmp_path / "one")
    found, one = arrays_of(tmp_path / "out"), arrays_of(tmp_path / "one")
    np.testing.assert_array_equal(found["pos"], one["pos"])
    np.testing.assert_allclose(found["energy"], one["energy"], rtol=1e-6)
    np.testing.assert_allclose(found["forces"], one["forces"], atol=1e-5)
