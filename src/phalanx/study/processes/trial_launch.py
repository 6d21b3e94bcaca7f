"""The launcher of a trial of several ranks on this machine: starts them, watches them, and ends all when one fails.

Loads no torch: it starts for every trial.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from phalanx.config.load import load_run
from phalanx.files import write_atomically
from phalanx.launch.faults import CAUSES, FAULT_FILE, Limits
from phalanx.launch.local_launch import launch_ranks
from phalanx.launch.restart import RestartPolicy
from phalanx.study.processes.trial_files import RUN_FILE, Part

_SILENT = ("hang", "stopped")
"""Causes of faults whose rank is ended without a word of its own."""


def launch_trial(folder_name: str, ranks: int, first_device: int) -> int:
    """Run the trial in this folder on `ranks` ranks and return the exit code of the first that failed, or 0.

    Ranks of a part of a run are watched by their heartbeats, as those of `phalanx train --nproc`. None is started again: the
    study decides about that.
    """
    folder, began = Path(folder_name), time.time()
    part, policy = Part.read(folder), None
    if part is not None:
        restart = load_run(folder / RUN_FILE).restart
        limits = Limits(restart.heartbeat_s, restart.slow_s)
        policy = RestartPolicy(most=0, limits=limits, run_dir=Path(part.run_dir))
    words = ["rank", folder_name]
    code = launch_ranks(words, ranks, "phalanx.study.processes", policy=policy, first_device=first_device)
    if code and part is not None:
        _report_silent(folder, Path(part.run_dir) / FAULT_FILE, began)
    return code


def _report_silent(folder: Path, report: Path, began: float) -> None:
    """Write what a rank that gave no sign of life could not write: that it hangs, by the report of the fault."""
    if not report.exists() or report.stat().st_mtime < began:
        return
    fault = json.loads(report.read_text())
    if fault["cause"] in _SILENT:
        words = f"rank {fault['rank']} in {fault['phase']} of step {fault['step']}: {CAUSES[fault['cause']]}"
        found = {"cause": "hang", "words": words, "ended": time.time()}
        write_atomically(folder / f"rank-{fault['rank']}.json", json.dumps(found))
