"""Matbench Discovery's metrics: by hand, by the benchmark's formulas on random numbers, and of files of its layout."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.main import run_command_line
from phalanx.errors import DataError
from phalanx.families.materials.evaluation import matbench_discovery
from phalanx.families.materials.evaluation.matbench_discovery import FORMATION, HULL, discovery_metrics, score_discovery


def test_metrics_of_six_crystals_by_hand() -> None:
    true = np.array([-0.1, 0.0, 0.2, 0.3, -0.2, 0.1])
    predicted = np.array([-0.2, 0.1, -0.1, 0.4, np.nan, 0.0])
    # Right: the first. Missed: the second and the fifth, which has no prediction. Wrongly taken: the third and the sixth.
    found = discovery_metrics(true, predicted, 0.5)
    assert (found.crystals, found.missing) == (6, 1)
    assert found.precision == pytest.approx(1 / 3) and found.recall == pytest.approx(1 / 3)
    assert found.f1 == pytest.approx(1 / 3) and found.daf == pytest.approx(2 / 3)
    assert found.accuracy == pytest.approx(2 / 6)
    assert found.mae == pytest.approx(0.7 / 5) and found.rmse == pytest.approx(math.sqrt(0.13 / 5))
    # The five have mean 0.1 and squared distances 0.04 + 0.01 + 0.01 + 0.04 + 0.
    assert found.r2 == pytest.approx(1.0 - 0.13 / 0.10)


def test_nothing_chosen_and_nothing_stable_are_no_numbers() -> None:
    found = discovery_metrics(np.array([0.1, 0.2]), np.array([0.1, 0.3]), 0.0)
    assert all(math.isnan(value) for value in (found.precision, found.recall, found.f1, found.daf))
    assert found.accuracy == 1.0


def write_files(folder: Path, count: int = 40) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A table of crystals and predictions of all but two, in another order."""
    random = np.random.default_rng(1)
    hull, form = random.normal(0.05, 0.2, count), random.normal(-1.0, 0.5, count)
    unique, predicted = random.random(count) < 0.7, form + random.normal(0.0, 0.1, count)
    rows = [f"wbm-{n},{float(form[n])!r},x,{float(hull[n])!r},{unique[n]}" for n in range(count)]
    summary, predictions = folder / "wbm.csv.gz", folder / "model.csv"
    with gzip.open(summary, "wt") as file:
        file.write("\n".join([f"material_id,{FORMATION},formula,{HULL},unique_prototype", *rows]) + "\n")
    order = [n for n in random.permutation(count) if n not in (3, 5)]
    lines = [f"wbm-{n},{float(predicted[n])!r}" for n in order if n != 7] + ["wbm-7,"]
    predictions.write_text("\n".join(["material_id,e_form_per_atom_model", *lines]) + "\n")
    predicted[[3, 5, 7]] = np.nan
    return predictions, summary, {"hull": hull, "predicted": hull + predicted - form, "unique": unique}


def test_files_of_its_layout_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matbench_discovery, "MOST_STABLE", 8)
    predictions, summary, made = write_files(tmp_path)
    found = score_discovery(predictions, summary)
    true, predicted, unique = made["hull"], made["predicted"], made["unique"]
    assert found["full_test_set"] == discovery_metrics(true, predicted, float((true <= 0).mean()))
    assert found["full_test_set"].missing == 3
    share = float((true[unique] <= 0).mean())
    assert found["unique_prototypes"] == discovery_metrics(true[unique], predicted[unique], share)
    eight = np.flatnonzero(unique)[np.argsort(predicted[unique])[:8]]
    assert found["most_stable_10k"] == discovery_metrics(true[eight], predicted[eight], share)
    assert run_command_line(["errors", str(predictions), "--matbench", str(summary), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["most_stable_10k"]["daf"] == pytest.approx(found["most_stable_10k"].daf)
    assert run_command_line(["errors", str(predictions), "--matbench", str(summary)]) == 0
    assert f"F1 {found['full_test_set'].f1:.3f}, DAF" in capsys.readouterr().out


def test_files_of_another_layout_are_refused(tmp_path: Path) -> None:
    predictions, summary, _ = write_files(tmp_path)
    good = predictions.read_text()
    for text, said in (
        (good + "wbm-1,0.5\n", "material_id wbm-1 stands there twice"),
        (good + "mp-1,0.5\n", "material_id mp-1 is not in .*wbm.csv.gz"),
        (good + "wbm-3,much\n", "column e_form_per_atom_model holds text"),
        (good + "wbm-3\n", "row 38 has 1 fields, its header 2"),
        (good.replace("e_form_per_atom_model", "energy"), "one column of predictions e_form_per_atom"),
        (good.replace("material_id", "id"), "no column material_id; its columns are id, e_form"),
    ):
        predictions.write_text(text)
        with pytest.raises(DataError, match=said):
            score_discovery(predictions, summary)
    predictions.write_text("material_id,e_form_per_atom_model\nwbm-0,-1.0\n")
    with gzip.open(summary, "wt") as file:
        file.write(f"material_id,{FORMATION},{HULL},unique_prototype\nwbm-0,-1.0,,True\n")
    with pytest.raises(DataError, match=f"wbm-0 has no {HULL}"):
        score_discovery(predictions, summary)
    summary.write_bytes(b"no archive")
    with pytest.raises(DataError, match="it cannot be read as CSV"):
        score_discovery(predictions, summary)
