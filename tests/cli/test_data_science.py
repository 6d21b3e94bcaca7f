"""`phalanx data prepare-graphs` and `prepare-fields` as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import yaml

from materials_runs import write_materials_run, write_molecules
from phalanx.config.load import load_run
from phalanx.families.weather.data.open_fields import FieldSet
from weather_runs import write_weather_run

if TYPE_CHECKING:
    from command_line import Call


def test_structures_are_prepared_and_the_units_that_fit_them_said(call: Call, tmp_path: Path) -> None:
    run_file = write_materials_run(tmp_path, structures=40)
    done = call("data", "prepare-graphs", str(run_file), "--workers", "1")
    assert done.code == 0, done.err
    title, words, *snippet = done.out.splitlines()
    assert title.startswith(f"{tmp_path}/prepared/toy: 40 structures (train ")
    assert words == "units that fit the training split, for the run file:"
    fitting = yaml.safe_load("\n".join(snippet))["model"]
    (branch,) = fitting["branches"]
    assert branch["name"] == "toy" and 1 < fitting["mean_neighbors"] < 15
    # Energies are those of elements, 2 eV for each proton, and what the toy force field adds.
    for element in ("1", "6", "8"):
        assert branch["reference_energies"][element] == pytest.approx(-2.0 * int(element), abs=1.0)
    # What it said is legal, and makes the same run file sound.
    run = load_run(run_file)
    assert type(run).model_validate({**run.model_dump(), "model": {**run.model.model_dump(), **fitting}})
    again = call("data", "prepare-graphs", str(run_file), "--json")
    facts = json.loads(again.out)
    assert again.code == 0
    assert facts["model"] == fitting and facts["sources"]["toy"]["totals"]["structures"] == 40


def test_structures_that_no_list_names_are_counted(call: Call, tmp_path: Path) -> None:
    run_file = write_materials_run(tmp_path, structures=12)
    (tmp_path / "train.txt").write_text("0 1 2 3 4")
    (tmp_path / "test.txt").write_text("11 10")
    split = f"data.sources.0.split={{train: {tmp_path}/train.txt, test: {tmp_path}/test.txt}}"
    done = call("data", "prepare-graphs", str(run_file), split, "--workers", "1")
    assert done.code == 0, done.err
    first = done.out.splitlines()[0]
    assert first.startswith(f"{tmp_path}/prepared/toy: 7 structures (train 5, validation 0, test 2), ")
    assert first.endswith("; 5 left out, which no file of split lists")
    again = json.loads(call("data", "prepare-graphs", str(run_file), split, "--json").out)
    assert again["sources"]["toy"]["left_out"] == 5


def test_one_branch_that_takes_several_sources_gets_units_that_fit_them_together(call: Call, tmp_path: Path) -> None:
    changes = {"data.validation_fraction": 0.0, "data.test_fraction": 0.0}
    run = yaml.safe_load(write_materials_run(tmp_path, changes, structures=20).read_text())
    (toy,) = run["data"]["sources"]
    write_molecules(tmp_path / "more.npz", 40, seed=1)
    charged = {"name": "charged", "labels": {"charges": "e"}}
    run["data"]["sources"] = [toy, toy | {"name": "more", "path": str(tmp_path / "more.npz")}, toy | charged]
    run["model"]["branches"] = [{"name": "all"}]
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    done = call("data", "prepare-graphs", str(tmp_path / "run.yaml"), "--workers", "1", "--json")
    assert done.code == 0, done.err
    (branch,) = json.loads(done.out)["model"]["branches"]
    assert branch["name"] == "all"
    sets = [dict(np.load(tmp_path / name)) for name in ("molecules.npz", "more.npz")]
    forces = np.concatenate([one["forces"] for one in sets])
    assert branch["energy_scale"] == pytest.approx(forces.std(), rel=1e-3)
    elements = [1, 6, 8]
    counts = [
        [(z == element).sum() for element in elements] for one in sets for z in np.split(one["z"], one["ptr"][1:-1])
    ]
    energies = np.concatenate([one["energy"] for one in sets])
    fitted = np.linalg.lstsq(np.array(counts, dtype=float), energies, rcond=None)[0]
    assert [branch["reference_energies"][str(element)] for element in elements] == pytest.approx(fitted, abs=1e-4)


def test_fields_are_prepared_and_read_as_the_files_were(call: Call, tmp_path: Path) -> None:
    run_file = write_weather_run(tmp_path, steps=240)
    done = call("data", "prepare-fields", str(run_file), "--out", str(tmp_path / "prepared"), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"sources": [str(tmp_path / "prepared")]}
    before = load_run(run_file)
    after = load_run(run_file, [f"data.sources=[{tmp_path / 'prepared'}]"])
    statistics = [FieldSet(run.data).statistics for run in (before, after)]  # type: ignore[arg-type]
    assert statistics[0] == statistics[1]
    twice = call("data", "prepare-fields", str(run_file), "--out", str(tmp_path / "prepared"))
    assert (twice.code, twice.err) == (
        1,
        f"error: {tmp_path}/prepared is already there; remove it or name another folder\n",
    )


@pytest.mark.parametrize(
    ("verb", "wanted", "write"),
    [
        ("prepare-graphs", "materials", write_weather_run),
        ("prepare-fields", "weather", write_materials_run),
    ],
)
def test_a_run_of_another_family_is_refused(call: Call, tmp_path: Path, verb: str, wanted: str, write: object) -> None:
    run_file = write(tmp_path)  # type: ignore[operator]
    out = ["--out", str(tmp_path / "out")] if verb == "prepare-fields" else []
    done = call("data", verb, str(run_file), *out)
    assert done.code == 2
    assert done.err.endswith(f"; {verb} takes runs of family {wanted}\n")
