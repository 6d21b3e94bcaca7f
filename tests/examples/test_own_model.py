"""The package of `examples/own_model`, installed beside Phalanx: a family, a data source and a callback of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from command_line import Call, Outcome

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


_MANY = """
import contextlib, io, json, sys
from phalanx.cli.main import run_command_line
done = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run_command_line(words)
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


def _run(environment: dict[str, str], *commands: Sequence[str]) -> list[Outcome]:
    """Run commands one after another in one process that knows the package."""
    command = [sys.executable, "-c", _MANY, json.dumps(commands)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [Outcome(*each) for each in json.loads(done.stdout.splitlines()[-1])]


VERIFIED = ("model.n_layers=2", "data.sequence_length=8", "model.d_model=8", "model.hidden=16")
ASKED: dict[str, tuple[str, ...]] = {
    "check": ("config", "check", str(RUN), "--json"),
    "plan": ("plan", str(RUN), "--cluster", "dgx-h100", "--devices", "8", "--json"),
    "dryrun": ("dryrun", str(RUN), "--devices", "4", "--rank", "0", "tp=2", "pp=2", "microbatch=2", "--json"),
    "verify": ("verify", str(RUN), "--all", "4", "--steps", "1", "--json", *VERIFIED),
    "option": ("config", "check", str(RUN), "data.options={colour: 3}"),
    "name": ("config", "check", str(RUN), "data.source=chirp"),
}
"""Commands that nothing else is needed for; one process runs them all."""


@pytest.fixture(scope="module")
def answers(environment: dict[str, str]) -> dict[str, Outcome]:
    return dict(zip(ASKED, _run(environment, *ASKED.values()), strict=True))


def test_it_is_short() -> None:
    files = list((RUN.parent / "own_model").rglob("*.py"))
    assert len(files) > 2
    assert sum(len(file.read_text().splitlines()) for file in files) <= _MOST_LINES


def test_check_plan_and_dry_run(answers: dict[str, Outcome]) -> None:
    width, hidden, kernel = 32, 64, 4
    block = width + 2 * width * hidden + hidden * kernel + hidden * width + width
    assert [answers[name].code for name in ("check", "plan", "dryrun")] == [0, 0, 0], answers
    facts, plan, dry = (json.loads(answers[name].out) for name in ("check", "plan", "dryrun"))
    assert facts["parameters"] == 4 * block + 2 * width
    assert facts["data"] == "512 samples"
    degrees = {(row["tp"], row["pp"]) for row in plan["layouts"]}
    assert {(1, 1), (2, 1), (1, 2)} <= degrees
    assert {row["axis"] for row in dry["ranks"][0]["traffic"]} >= {"tp", "pp"}


def test_every_layout_of_four_ranks_computes_what_one_does(answers: dict[str, Outcome]) -> None:
    assert answers["verify"].code == 0, answers["verify"].err
    found = json.loads(answers["verify"].out)
    layouts = [row["layout"] for row in found["layouts"]]
    assert found["passed"] and len(layouts) > 20
    assert any("tp=2" in name and "pp=2" in name for name in layouts)


def test_training_resumes_in_another_layout(environment: dict[str, str], tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    # The command that starts ranks becomes their supervisor, so it cannot share a process with the others.
    ranks = ["train", str(RUN), "--run-dir", str(folder), "--nproc", "4", "tp=2", "pp=2", "microbatch=2"]
    subprocess.run([sys.executable, "-m", "phalanx", *ranks], check=True, env=environment, timeout=600)
    done = _run(
        environment,
        ["train", str(folder), "tp=1", "pp=1", "microbatch=auto", "training.steps=24"],
        ["train", str(RUN), "--run-dir", str(whole), "training.steps=24"],
        ["report", str(folder)],
    )
    assert [each.code for each in done] == [0, 0, 0], done
    # One rank, from the start: the same samples, and losses that differ by rounding alone.
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
    assert "data chirps" in (folder / "report.html").read_text()


def test_what_is_wrong_is_told(answers: dict[str, Outcome]) -> None:
    """An unknown name says which there are, a wrong option whose it is."""
    option, name = answers["option"], answers["name"]
    assert (option.code, name.code) == (2, 2)
    assert "data source chirps" in option.err and "colour" in option.err
    assert "did you mean chirps" in name.err


def test_without_the_package_its_family_is_unknown(call: Call) -> None:
    told = call("config", "check", str(RUN)).err
    assert "model.family=gated_conv is not a model family (language, materials, weather)" in told
