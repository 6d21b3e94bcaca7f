"""`phalanx data sample` and the examples that read what it makes, as a person calls them."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.emt import EMT

from phalanx.families.language.evaluation.icl_tasks import load_tasks
from weather_runs import EXAMPLES

if TYPE_CHECKING:
    from command_line import Call


def test_the_example_trains_and_forecasts_on_the_sample(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = call("data", "sample", "weather", "--out", "data/weather", "--days", "40", "--json")
    assert made.code == 0, made.err
    sample = json.loads(made.out)
    assert (sample["folder"], sample["kind"], sample["seed"]) == ("data/weather", "weather", 0)
    (file,) = sample["files"]
    content = Path("data/weather", file["name"]).read_bytes()
    assert (file["name"], file["sha256"]) == ("weather.nc", hashlib.sha256(content).hexdigest())
    splits = {"train": (0, 39), "validation": (46, 59), "test": (66, 79)}
    words = [
        f'data.splits.{name}={{"first": "step {first}", "last": "step {last}"}}'
        for name, (first, last) in splits.items()
    ]
    words += ["training.steps=2", "optimizer.warmup_steps=1", "layout.global_batch=4", "layout.microbatch=4"]
    words += ["evaluation.every=2", "evaluation.samples=4"]
    done = call("train", str(EXAMPLES / "climax-small.yaml"), *words)
    assert done.code == 0, done.err
    found = call("forecast", "runs/climax-small", "--hours", "72", "--json")
    assert found.code == 0, found.err
    assert {row["lead_hours"] for row in json.loads(found.out)["scores"]} == set(range(12, 73, 12))
    again = call("data", "sample", "weather", "--out", "data/weather")
    assert again.code == 1 and "weather.nc is already there" in again.err


def test_no_example_reads_files_beside_the_repository() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        assert "../" not in path.read_text(), path


@pytest.mark.parametrize("kind", ["molecules", "icl"])
def test_the_same_seed_gives_the_same_bytes(call: Call, tmp_path: Path, kind: str) -> None:
    few = {"molecules": ["--trajectories", "4"], "icl": ["--questions", "5"]}[kind]
    made = {}
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        outcome = call("data", "sample", kind, "--out", str(tmp_path / name), "--seed", seed, *few)
        assert outcome.code == 0, outcome.err
        record = json.loads((tmp_path / name / "sample.json").read_text())
        made[name] = [file["sha256"] for file in record["files"]]
        for file in record["files"]:
            assert hashlib.sha256((tmp_path / name / file["name"]).read_bytes()).hexdigest() == file["sha256"]
            assert file["sha256"] in outcome.out
    assert made["a"] == made["b"] and not set(made["a"]) & set(made["c"])
    again = call("data", "sample", kind, "--out", str(tmp_path / "a"), *few)
    assert again.code == 1 and "is already there; remove it or name another folder" in again.err


def test_labels_of_molecules_are_derivatives_of_their_energies(call: Call, tmp_path: Path) -> None:
    assert call("data", "sample", "molecules", "--out", str(tmp_path), "--trajectories", "4").code == 0
    for name in ("clusters", "crystals"):
        arrays = np.load(tmp_path / f"{name}.npz")
        first = slice(0, int(arrays["ptr"][1]))
        cell = {"cell": arrays["cell"][0], "pbc": True} if "cell" in arrays else {}
        atoms = Atoms(arrays["z"][first], arrays["pos"][first], calculator=EMT(), **cell)
        assert atoms.get_potential_energy() == pytest.approx(arrays["energy"][0], abs=1e-9)
        before, step = arrays["forces"][0, 0], 1e-5
        atoms.positions[0, 0] += step
        above = atoms.get_potential_energy()
        atoms.positions[0, 0] -= 2 * step
        assert -(above - atoms.get_potential_energy()) / (2 * step) == pytest.approx(before, abs=1e-5)


def test_tasks_have_the_forms_of_llm_foundry(call: Call, tmp_path: Path) -> None:
    assert call("data", "sample", "icl", "--out", str(tmp_path), "--questions", "30").code == 0
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")
    }
    assert all(len(lines) == 30 for lines in rows.values()) and len(rows) == 4
    kinds = {task.settings.label: task.settings.icl_task_type for task in load_tasks(sorted(tmp_path.glob("*.jsonl")))}
    assert kinds == {
        "last_word": "language_modeling",
        "which_module": "multiple_choice",
        "which_function": "schema",
        "sums": "generation_task_with_answers",
    }
    assert all(row["context"] and " " not in row["continuation"] for row in rows["last_word"])
    for row in rows["which_module"]:
        assert len(set(row["choices"])) == 4 and row["query"].endswith(" is")
        source = Path(sysconfig.get_path("stdlib"), row["choices"][row["gold"]] + ".py").read_text()
        assert row["query"].split("(")[0] + "(" in source
    assert {row["gold"] for row in rows["which_function"]} == {0, 1}
    for row in rows["sums"]:
        first, second = map(int, row["context"].removesuffix(" =").split(" + "))
        assert row["answer"] == str(first + second)
