"""`phalanx tune` for real: a killed study goes on (language), early stopping (materials), and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import Call
from materials_runs import write_materials_run
from phalanx.config.load import load_run
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.study.hyperparameters.configuration import finished_trials
from phalanx.study.hyperparameters.study_summary import unfinished_words
from report.pages import Page
from token_data import write_run_file, write_token_folder
from trial_processes import trial_processes, wait_for

LANGUAGE = """
tune:
  parameters: {optimizer.lr: {low: 1e-4, high: 1e-2, log: true}}
  metric: loss
  trials: 2
  engine: random
  asha: null
"""
MATERIALS = """
tune:
  parameters:
    optimizer.lr: {low: 1e-3, high: 1e-2, log: true}
    optimizer.weight_decay: [0.0, 2.0]
  constraints: [optimizer.weight_decay < 1]
  metric: errors.forces.mae
  trials: 2
  asha: {first_steps: 2, eta: 2, rungs: 2}
"""


def start(file: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "phalanx", "tune", str(file), "--out", str(out), "--devices", "1", "--slots", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, "--json"], text=True, env=environment, **pipes)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_study_that_is_killed_goes_on(tmp_path: Path, call: Call) -> None:
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    file.write_text(file.read_text() + LANGUAGE)
    out = tmp_path / "study"
    first = start(file, out)
    # Killed while the second trial runs: the first one has its score.
    wait_for(first, lambda: len(list((out / "trials").glob("*/run.yaml"))) == 2, 400)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_for(None, lambda: not trial_processes(out), 400)
    scored = finished_trials(out)
    assert len(scored) == 1 and (scored[0].run_dir / "checkpoints").exists()
    second = call("tune", str(file), "--out", str(out), "--devices", "1", "--slots", "1", "--json")
    assert second.code == 0, second.err
    facts = json.loads(second.out)
    assert [row["state"] for row in facts["trials"]] == ["scored", "scored"] and facts["failures"] == {"interrupted": 1}
    assert finished_trials(out)[0].score == facts["best"]["score"] == min(row["score"] for row in facts["trials"])
    # What was known before the kill was not done again, and the run's log has each step once.
    assert second.err.count("to step") == 1
    steps = load_run(file).training.steps
    for row in facts["trials"]:
        logged = [one["step"] for one in lines(Path(row["run_dir"]) / "metrics.jsonl")]
        assert logged == list(range(1, steps + 1)) and row["steps"] == steps
    _what_it_says(call, file, out, facts)


def _what_it_says(call: Call, file: Path, out: Path, facts: dict[str, Any]) -> None:
    best, page = out.parent / "best.yaml", out.parent / "study.html"
    said = call("tune", "--show", str(out), "--write", str(best), "--html", str(page))
    assert said.code == 0, said.err
    assert said.out.splitlines()[1].startswith(f"best: trial {facts['best']['number']}, ")
    assert facts["unfinished"] == "" and "note: " not in said.out
    assert "devices were idle" in said.out and "in 2 sessions" in said.out
    chosen = load_run(best)
    assert chosen.optimizer.lr == facts["best"]["values"]["optimizer.lr"]
    assert chosen.training.tensorboard == load_run(file).training.tensorboard
    html = page.read_text()
    found = Page(html)
    assert "http" not in html.replace("http-equiv", "") and not found.all("script")
    assert found.figure("trials") == "2" and len(found.all("circle", "dot-1")) == 2
    # It is another study where the run is another, and says in what.
    other = call("tune", str(file), "optimizer.grad_clip=0.5", "--out", str(out), "--devices", "1")
    assert other.code == 2 and "with another optimizer.grad_clip; put that back" in other.err


def test_a_best_score_of_no_whole_run_is_called_early() -> None:
    rows = [{"steps": 3}, {"steps": 9}, {"steps": 3}]
    said = unfinished_words(rows, [3, 9, 30], 3)
    assert said == (
        "no trial reached step 30, the longest got to step 9: the best is best so early; one in 3 trials goes on from each "
        "rung, so more trials (tune.trials) reach it"
    )
    assert unfinished_words([{"steps": 30}, *rows], [3, 9, 30], 3) == ""


def test_early_stopping_of_a_materials_model(tmp_path: Path, call: Call) -> None:
    file = write_materials_run(tmp_path, {"training.steps": 4}, structures=40)
    prepare_graphs(load_run(file).data, workers=1)  # type: ignore[attr-defined]
    file.write_text(file.read_text() + MATERIALS)
    done = call("tune", str(file), "--out", str(tmp_path / "study"), "--devices", "1", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["rungs"] == [2, 4] and facts["default"]["values"]["optimizer.weight_decay"] == 0.0
    # One of two goes on, from its checkpoint; the other stays at the first rung or filled an idle device.
    reached = [row["reached"] for row in facts["stopped"]]
    assert reached[0] == 2 and reached[1] in (1, 2)
    assert all(row["values"]["optimizer.weight_decay"] == 0.0 for row in facts["trials"])
    for row in facts["trials"]:
        kinds = [event["kind"] for event in lines(Path(row["run_dir"]) / "events.jsonl")]
        assert kinds.count("resume") == (row["steps"] == 4)
    assert 0.0 < facts["devices"]["idle"] < 1.0 and facts["costs"]["parts"] == sum(reached)


def test_what_is_refused(call: Call, tmp_path: Path) -> None:
    file = write_run_file(tmp_path / "run.yaml", tmp_path / "nowhere")
    assert "give RUN --out DIR to tune" in call("tune", str(file)).err
    assert "holds no study" in call("tune", "--show", str(tmp_path)).err
    empty = call("tune", str(file), "--out", str(tmp_path / "study"))
    assert empty.code == 2 and "tune.parameters is empty" in empty.err
    file.write_text(file.read_text() + LANGUAGE)
    slurm = call("tune", str(file), "--out", str(tmp_path / "study"), "--where", "slurm")
    assert slurm.code == 2 and "needs --cluster NAME" in slurm.err
    there = call("tune", str(file), "--out", str(tmp_path / "study"), "--devices", "1")
    assert there.code == 1 and f"{tmp_path / 'nowhere'}" in there.err
    write_token_folder(tmp_path / "nowhere")
    metric = call("tune", str(file), "tune.metric=perplexty", "--out", str(tmp_path / "study"), "--devices", "1")
    assert metric.code == 2 and metric.err == (
        "error: tune.metric=perplexty: an evaluation of this run has no such figure; choose among perplexity, loss, "
        "bits_per_byte\n       nearest: tune.metric=perplexity\n"
    )
    assert not (tmp_path / "study").exists()
    engine = call("tune", str(file), "--out", str(tmp_path / "study"), "--engine", "magic")
    assert engine.code == 2 and "optuna-tpe, deephyper or random" in engine.err


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_what_jobs_need_is_said_before_anything_is_submitted(tmp_path: Path, call: Call) -> None:
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    file.write_text(file.read_text() + LANGUAGE)
    out = str(tmp_path / "study")
    said = call("tune", str(file), "--out", out, "--account", "ABC123")
    assert said.code == 2 and "--account is of jobs that are submitted; give --where sbatch" in said.err
    said = call("tune", str(file), "--out", out, "--where", "sbatch")
    assert said.code == 2 and "--where sbatch needs --cluster NAME" in said.err
    said = call("tune", str(file), "--out", out, "--devices", "3", "--nproc", "2")
    assert said.code == 2 and "nearest legal: --devices 4" in said.err
    said = call("tune", str(file), "layout.tp=3", "--out", out, "--devices", "2", "--nproc", "2")
    assert said.code == 2 and "layout.tp=3 does not divide the world size 2" in said.err
    assert not Path(out).exists()
