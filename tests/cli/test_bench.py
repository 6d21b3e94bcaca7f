"""`phalanx bench`: really trains some steps, says what they took beside the plan, and leaves nothing behind."""

from __future__ import annotations

import json
import os
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


COUNTED = """
from pathlib import Path
from phalanx.hardware import energy
from phalanx.training.callbacks import Callback

class Counted(Callback):
    def __init__(self, folder):
        energy.RAPL, self.count = Path(folder), Path(folder) / "intel-rapl:0" / "energy_uj"

    def on_step_begin(self, step):
        self.count.write_text(str(int(self.count.read_text()) + 3_000_000))
"""
"""Callback in whose folder a processor counts 3 J more with each step."""


@pytest.fixture
def counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the callback for processes that are started, and return the field that takes it into a run."""
    zone, described = folder / "power" / "intel-rapl:0", folder / "site" / "counted-1.0.dist-info"
    for made in (zone, described):
        made.mkdir(parents=True)
    for name in ("energy_uj", "max_energy_range_uj"):
        (zone / name).write_text("1000000000")
    (folder / "site" / "counted.py").write_text(COUNTED)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: counted\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[phalanx.callbacks]\ncounted = counted:Counted\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]))
    chosen = {"name": "counted", "options": {"folder": str(zone.parent)}}
    return f"training.callbacks={json.dumps([chosen])}"


def test_lines_for_a_person_and_a_run_that_is_kept(call: Call, folder: Path, counted: str) -> None:
    words = ("--steps", "3", "--skip", "1", "--keep", "kept", "--cluster", "h200-x4")
    outcome = call("bench", "run.yaml", counted, *words)
    assert outcome.code == 0, outcome.err
    first, measured, power, more, planned, caution, *_ = outcome.out.splitlines()
    assert re.fullmatch(r"one rank on .+, attention \S+; the last 2 of 3 steps count", first), first
    assert re.match(
        r"  measured  \S+ s a step \(\S+ to \S+\), [\d,]+ tokens/s a device, \S+ model TFLOP/s \(causal\)", measured
    )
    # Each step of 128 tokens has a part of the 3 J: what was counted between two steps is no step's.
    joules = re.fullmatch(r" +(\S+) J a step, (\S+) J a token; all devices together draw \S+ W", power)
    assert joules and 0.0 < float(joules[1]) <= 3.0, power
    assert float(joules[2]) == pytest.approx(float(joules[1]) / 128, rel=1e-3)
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
