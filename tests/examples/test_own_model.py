"""The package of `examples/own_model`, installed beside Phalanx: a family, a data source and a callback of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "own_model" / "run.yaml"
_MOST_LINES = 120


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install a copy of the package, since building leaves files behind, and return an environment that has it."""
    folder = tmp_path_factory.mktemp("environment")
    source, copy = RUN.parent, folder / "own_model"
    (copy / "own_model").mkdir(parents=True)
    for file in (source / "pyproject.toml", *(source / "own_model").glob("*.py")):
        (copy / file.relative_to(source)).write_bytes(file.read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(copy)], check=True)
    paths = [str(folder / "site"), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _run(environment: dict[str, str], words: Sequence[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


def _facts(environment: dict[str, str], *words: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(_run(environment, [*words, "--json"]).stdout)
    return found


def test_it_is_short() -> None:
    files = list((RUN.parent / "own_model").rglob("*.py"))
    assert len(files) > 2
    assert sum(len(file.read_text().splitlines()) for file in files) <= _MOST_LINES


def test_check_plan_and_dry_run(environment: dict[str, str]) -> None:
    width, hidden, kernel = 32, 64, 4
    block = width + 2 * width * hidden + hidden * kernel + hidden * width + width
    facts = _facts(environment, "config", "check", str(RUN))
    assert facts["parameters"] == 4 * block + 2 * width
    assert facts["data"] == "512 samples"
    plan = _facts(environment, "plan", str(RUN), "--cluster", "dgx-h100", "--devices", "8")
    degrees = {(row["tp"], row["pp"]) for row in plan["best"]}  # type: ignore[attr-defined]
    assert {(1, 1), (2, 1), (1, 2)} <= degrees
    dry = _facts(environment, "dryrun", str(RUN), "--devices", "4", "--rank", "0", "tp=2", "pp=2", "microbatch=2")
    (rank,) = dry["ranks"]  # type: ignore[misc]
    assert {row["axis"] for row in rank["collectives"]} >= {"tp", "pp"}


def test_every_layout_of_four_ranks_computes_what_one_does(environment: dict[str, str]) -> None:
    words = ["model.n_layers=2", "data.sequence_length=8", "model.d_model=8", "model.hidden=16"]
    found = _facts(environment, "verify", str(RUN), "--all", "4", "--steps", "1", *words)
    layouts = [row["layout"] for row in found["layouts"]]  # type: ignore[attr-defined]
    assert found["passed"] and len(layouts) > 20
    assert any("tp=2" in name and "pp=2" in name for name in layouts)


def test_training_resumes_in_another_layout(environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ["training.log_every=10", "microbatch=2"]
    _run(environment, ["train", str(RUN), "--run-dir", str(folder), "--nproc", "4", "tp=2", "pp=2", *small])
    other = ["tp=1", "pp=1", "dp_shard=2", "microbatch=auto", "training.steps=24"]
    resumed = _run(environment, ["train", str(folder), "--nproc", "2", *other])
    assert "step 24/24" in resumed.stdout
    # One rank, from the start: the same samples, and losses that differ by rounding alone.
    whole = tmp_path / "whole"
    _run(environment, ["train", str(RUN), "--run-dir", str(whole), "training.steps=24"])
    losses = [
        [json.loads(line)["loss"] for line in (each / "metrics.jsonl").read_text().splitlines()]
        for each in (folder, whole)
    ]
    assert len(losses[0]) == 24 and losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[1][-1] < 0.9 * losses[1][0]
    gaps = [json.loads(line) for line in (folder / "gaps.jsonl").read_text().splitlines()]
    # A process knows no step before its own first one.
    assert [gap["step"] for gap in gaps] == [*range(2, 21), *range(22, 25)]
    assert gaps[0]["gap"] == pytest.approx(losses[0][0] - losses[0][1])
    page = (Path(_run(environment, ["report", str(folder)]).stdout.strip())).read_text()
    assert "data chirps" in page


def test_what_is_wrong_is_told(environment: dict[str, str]) -> None:
    """An unknown name says which there are, a wrong option whose it is."""
    told = _run(environment, ["config", "check", str(RUN), "data.options={colour: 3}"], code=2).stderr
    assert "data source chirps" in told and "colour" in told
    told = _run(environment, ["config", "check", str(RUN), "data.source=chirp"], code=2).stderr
    assert "did you mean chirps" in told
    bare = {**environment, "PYTHONPATH": str(ROOT / "src")}
    told = _run(bare, ["config", "check", str(RUN)], code=2).stderr
    assert "model.family=gated_conv is not a model family (language, materials, weather)" in told
