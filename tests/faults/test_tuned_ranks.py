"""`phalanx tune` with a trial of two real ranks, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.load import load_run
from token_data import write_run_file, write_token_folder
from trial_processes import trial_processes, wait_for

TWO_RANKS = """
tune:
  parameters: {optimizer.lr: [3e-3, 1e-3], layout.tp: [2, 3]}
  constraints: [optimizer.lr > 2e-3]
  metric: loss
  trials: 2
  engine: random
  nproc: 2
  first: engine
  asha: null
"""


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.faults
def test_a_trial_of_two_ranks(tmp_path: Path) -> None:
    """A rank that is killed ends its trial on all ranks, and the trial goes on; a layout of other ranks is refused."""
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    file.write_text(file.read_text() + TWO_RANKS)
    out = tmp_path / "study"
    command = [sys.executable, "-m", "phalanx", "tune", str(file), "--out", str(out), "--devices", "2", "--slots", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    study = subprocess.Popen([*command, "--json"], text=True, env=environment, **pipes)
    logs = out / "trials"
    wait_for(study, lambda: any(len(lines(log)) > 1 for log in logs.glob("*/metrics.jsonl")), 400)
    ranks = [pid for pid in trial_processes(out) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
    killed = next(pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(killed, signal.SIGKILL)
    # The other rank waits for it in a collective.
    wait_for(study, lambda: not set(ranks) & set(trial_processes(out)), 60)
    text, errors = study.communicate(timeout=400)
    assert study.returncode == 0, errors
    facts = json.loads(text)
    assert facts["failures"] == {"interrupted": 1, "refused": 1}
    by_tp = {row["values"]["layout.tp"]: row for row in facts["trials"]}
    assert "layout.tp=3 does not divide the world size 2" in by_tp[3]["said"] and by_tp[3]["seconds"] == 0
    whole = by_tp[2]
    assert whole["state"] == "scored" and whole["steps"] == load_run(file).training.steps
    # One log, by the first rank, with each step once; both ranks reported.
    assert [row["step"] for row in lines(Path(whole["run_dir"]) / "metrics.jsonl")] == list(
        range(1, whole["steps"] + 1)
    )
    assert len({report.name for report in out.glob("jobs/*/rank-*.json")}) == 2
    assert facts["devices"]["each"][0]["device"].endswith(" cpu 0-1")
