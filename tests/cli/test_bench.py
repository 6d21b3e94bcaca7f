"""`phalanx bench`: really trains some steps, says what they took beside the plan, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command_line import Call
from materials_runs import write_materials_run
from phalanx.config.load import load_run
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from token_data import write_token_folder

RUN = """\
model: {n_layers: 2, d_model: 32, n_heads: 2, d_ff: 64, vocab_size: 257, max_positions: 32}
data: {sources: [data], sequence_length: 32}
layout: {global_batch: 4, microbatch: 1}
optimizer: {lr: 1e-3, warmup_steps: 200}
training: {steps: 1000, run_dir: runs/mine, log_every: 100}
checkpoint: {every: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_token_folder(tmp_path / "data")
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def test_two_ranks_measured_beside_their_plan(call: Call, folder: Path) -> None:
    outcome = call(
        "bench", "run.yaml", "tp=2", "--nproc", "2", "--steps", "4", "--skip", "2", "--cluster", "h200-x4", "--json"
    )
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    found, plan = facts["measured"], facts["planned"]
    assert facts["layout"] == "tp=2" and facts["devices"] == 2
    steps = found["all_step_s"]
    assert len(steps) == 4 and found["skipped"] == 2
    assert found["step_s"] == pytest.approx(sum(steps[2:]) / 2) and found["step_s_range"] == sorted(steps[2:])
    # Both ranks together do 4 samples of 32 tokens a step; of two steps the median is the mean of their rates.
    assert found["per_s_per_device"] == pytest.approx(sum(4 * 32 / 2 / seconds for seconds in steps[2:]) / 2)
    assert found["unit"] == "tokens" and found["flops_convention"] == "causal" and found["memory_bytes"] is None
    assert plan["step_s"] == pytest.approx(sum(plan["time_by_cause_s"].values())) and plan["cluster"] == "h200-x4"
    assert plan["step_s_interval"][0] < plan["step_s"] < plan["step_s_interval"][1] and plan["memory_bytes"] > 0
    # Neither the run's own folder nor one of the measurement is left.
    assert sorted(path.name for path in folder.iterdir()) == ["data", "run.yaml"]


def test_lines_for_a_person_and_a_run_that_is_kept(call: Call, folder: Path) -> None:
    outcome = call("bench", "run.yaml", "--steps", "3", "--skip", "1", "--keep", "kept", "--cluster", "h200-x4")
    assert outcome.code == 0, outcome.err
    first, measured, more, planned, caution, *_ = outcome.out.splitlines()
    assert re.fullmatch(r"one rank on .+, attention \S+; the last 2 of 3 steps count", first), first
    assert re.match(
        r"  measured  \S+ s a step \(\S+ to \S+\), [\d,]+ tokens/s a device, \S+ model TFLOP/s \(causal\)", measured
    )
    assert more.strip().startswith("data wait ")
    # Steps of a CPU say nothing about a plan for another device: no difference is given.
    assert re.match(r"  planned   \S+ s \(90% between \S+ and \S+\), \S+ GiB; h200-x4 by ", planned), planned
    assert caution.strip() == ("not to be compared: the steps ran on CPU, the plan is for the H200 of h200-x4")
    assert len((folder / "kept" / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (folder / "kept" / "run" / "checkpoints").exists()
    assert call("bench", "run.yaml", "--keep", "kept").code == 2


def test_a_run_without_a_plan_is_measured_all_the_same(call: Call, tmp_path: Path) -> None:
    file = write_materials_run(tmp_path, structures=20)
    prepare_graphs(load_run(file).data, workers=1)  # type: ignore[arg-type]
    words = ("bench", str(file), "--steps", "2", "--skip", "1", "--cluster", "h200-x4")
    found = json.loads(call(*words, "--json").out)
    assert found["measured"]["unit"] == "structures" and found["planned"] is None
    assert found["why_no_plan"].startswith(
        "no plan for model.family=materials: what a batch of graphs costs depends on"
    )
    said = call(*words)
    assert said.code == 0 and said.out.splitlines()[-1] == f"  planned   {found['why_no_plan']}"


def test_a_run_that_fails_says_why(call: Call, folder: Path) -> None:
    outcome = call("bench", "run.yaml", "--steps", "2", "--skip", "0", "data.sources=[nowhere]")
    assert outcome.code == 1 and "nowhere: nothing there" in outcome.err
    assert sorted(path.name for path in folder.iterdir()) == ["data", "run.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "4", "--skip", "4"], "--skip 4 leaves none of --steps 4"),
        (["--nproc", "3", "tp=3"], "layout.tp=3 does not divide"),
        (["--where", "slurm"], "--where slurm needs --cluster"),
        (["--where", "slurm", "--cluster", "frontier", "--devices", "4"], "no multiple of the 8 devices"),
        (["--where", "moon"], "--where moon is not known"),
    ],
)
def test_wrong_words(words: list[str], said: str, call: Call, folder: Path) -> None:
    outcome = call("bench", "run.yaml", *words)
    assert outcome.code == 2 and said in outcome.err
