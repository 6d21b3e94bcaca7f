"""`phalanx search`: what it prints, writes and refuses; and a real search on gloo ranks, killed and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import Call
from phalanx.cli.planning.search import write_search_lines
from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.report.study_page import render_search
from phalanx.study.layouts.layout_search import STUDY
from phalanx.study.store import StudyStore
from report.pages import Page
from token_data import write_run_file, write_token_folder
from trial_processes import trial_processes, wait_for

RUN = """\
model: {n_layers: 8, d_model: 2048, n_heads: 16, d_ff: 8192, vocab_size: 32000, max_positions: 2048, mlp: gelu}
data: {sources: [data/a], sequence_length: 2048}
layout: {global_batch: 64}
optimizer: {lr: 1e-3}
training: {steps: 10}
search:
  layout: {microbatch: [1, 2], recompute: [none], schedule: [1f1b], cp: [1], zero: [1, 3]}
  knobs: {env.NCCL_ALGO: {values: [null, Tree], when: "dp_shard > 1"}}
"""
SIMULATED = ("--cluster", "frontier", "--devices", "16", "--where", "simulated")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_simulated_search(call: Call, folder: Path) -> None:
    words = ("--measure", "9", "search.stop_gain=0", "--json", "--write", "best.yaml", "--html", "search.html")
    outcome = call("search", "run.yaml", *SIMULATED, *words)
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    good = [row for row in facts["trials"] if row["step_s"] is not None]
    assert facts["measured_on"] == [] and "warning" not in outcome.err
    assert len(facts["trials"]) == 9 and facts["best"]["step_s"] == min(row["step_s"] for row in good)
    assert sum(facts["planned"]["shapley_effects"].values()) == pytest.approx(1.0)
    assert "change with the seed" in facts["measured"]["caution"]
    layout = resolve_layout(bind(load_run(folder / "best.yaml")), 16, 8)
    best = facts["best"]["values"]
    assert (layout.tp, layout.pp, layout.microbatch, layout.zero) == tuple(
        best[name] for name in ("tp", "pp", "microbatch", "zero")
    )
    html = (folder / "search.html").read_text()
    page = Page(html.replace("<br>", ""))
    assert "http" not in html.replace("http-equiv", "") and not page.all("script")
    assert "<title>Search: model on 16 devices of frontier, simulated</title>" in html
    assert page.figure("trials") == "9" and "Caution: ranks 2 to 4" in html
    assert len(page.all("circle", "dot-1")) == len(good) and page.all("rect", "shade-0")


def test_it_goes_on_and_refuses_what_does_not_belong(call: Call, folder: Path) -> None:
    first = call("search", "run.yaml", *SIMULATED, "--measure", "3", "search.stop_gain=0")
    assert first.code == 0 and first.out.splitlines()[1].startswith("best: trial ")
    again = call("search", "run.yaml", *SIMULATED, "--measure", "4", "search.stop_gain=0", "--engine", "random")
    assert again.code == 0 and again.err.count("a step\n") <= 3 and "4 trials of" in again.out
    other = call("search", "run.yaml", *SIMULATED, "--measure", "4", "model.n_layers=4")
    assert other.code == 2 and "holds a study of another run; give another --storage FILE" in other.err
    assert call("search", "run.yaml", *SIMULATED[:-1], "moon").code == 2
    # What is wrong comes alone: no warning about the devices of this machine before it.
    unknown = call("search", "run.yaml", "--cluster", "frontier", "--devices", "2", "--engine", "foo")
    assert unknown.code == 2 and unknown.err.startswith("error: --engine foo is not known; give one of planner, ")
    odd = call("search", "run.yaml", "--cluster", "frontier", "--devices", "4", "--where", "slurm")
    assert odd.code == 2 and "no multiple of the 8 devices of a node" in odd.err


def test_a_study_of_an_earlier_version_resumes(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(__file__).parents[1] / "study" / "stores" / "search", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = {one.key: one.outcome for one in StudyStore(tmp_path / "run.search.log", STUDY, None).trials()}
    outcome = call("search", "run.yaml", *SIMULATED, "--measure", "10", "search.stop_gain=0", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert len(before) == 8 and len(found["trials"]) == 10 and found["best"]["number"] == 0
    after = {one.key: one.outcome for one in StudyStore(tmp_path / "run.search.log", STUDY, None).trials()}
    assert after.items() >= before.items() and len(after) == 10


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A run file for two gloo ranks, with a knob whose second value gives another loss."""
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    section = """
search:
  layout: {tp: [2], microbatch: [4], recompute: [none], cp: [1]}
  knobs: {training.seed: [0, 1]}
  steps: 4
  skip: 2
  time_limit_s: 120
"""
    file.write_text(file.read_text() + section)
    return file


def words_of(file: Path) -> list[str]:
    """The arguments of a search, on trials of two ranks each."""
    words = ["search", str(file), "--storage", str(file.parent / "s.log"), "--cluster", "h200-x4", "--devices", "2"]
    return [*words, "--engine", "exhaustive", "--measure", "3", "--json"]


def start(file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "phalanx", *words_of(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def test_a_real_search_that_is_killed_and_goes_on(real: Path, call: Call) -> None:
    trials = real.parent / "s.log.trials"
    first = start(real)
    # Killed while the ranks of the second trial run: the first one has ended.
    wait_for(first, lambda: (trials / "1").exists() and len(trial_processes(trials / "1")) == 3, 200)
    ranks = trial_processes(trials)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    deadline = time.monotonic() + 60
    while trial_processes(trials):
        assert time.monotonic() < deadline, ranks
        time.sleep(0.02)
    second = call(*words_of(real))
    assert second.code == 0, second.err
    facts = json.loads(second.out)
    states = [(row["state"], row["values"]["training.seed"]) for row in facts["trials"]]
    assert states == [("ok", 0), ("interrupted", 1), ("wrong_loss", 1)]
    assert facts["failures"] == {"interrupted": 1, "wrong_loss": 1}
    assert "step 1: loss" in next(row["said"] for row in facts["trials"] if row["state"] == "wrong_loss")
    assert facts["best"]["values"]["training.seed"] == 0 and facts["best"]["step_s"] > 0
    assert not trial_processes(trials) and not (trials / "0" / "run").exists() and (trials / "0" / "log").exists()

    # The trials ran on this machine's CPU, whatever --cluster says, and are filed as such.
    assert second.err.startswith(
        "warning: --cluster h200-x4 has H200, but trials with --where local run on this machine"
    )
    assert facts["measured_on"] == ["CPU"] and facts["cluster_device"] == "H200"
    assert facts["best"]["device"] == "CPU"
    lines = write_search_lines(facts, 80)
    assert lines[0].startswith("model on 2 x CPU (this machine): ") and max(map(len, lines)) <= 80
    note = "the trials ran on CPU, not on the H200 of h200-x4"
    assert f"note: {note}" in " ".join(lines)
    html = render_search(facts)
    assert "<title>Search: model on 2 x CPU (this machine)</title>" in html
    assert note[1:] in html
    hostile = render_search({**facts, "model": "<script>alert(1)</script>\x1b[31m"})
    assert "<script>alert" not in hostile and "\x1b" not in hostile
