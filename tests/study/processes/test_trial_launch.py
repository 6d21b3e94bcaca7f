"""The launcher of a trial of several ranks: their devices, and what is said of a rank that hangs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from layout_runs import run_with
from phalanx.config.load import dump_run
from phalanx.errors import ConfigError
from phalanx.launch.faults import FAULT_FILE
from phalanx.launch.restart import RestartPolicy
from phalanx.study.processes import trial_launch
from phalanx.study.processes.process import Ended
from phalanx.study.processes.slots import MODULE, LocalDevices, find_devices
from phalanx.study.processes.trial_files import RUN_FILE, Part, explain_failure, read_rank_reports
from phalanx.study.trial import INTERRUPTED


@pytest.mark.parametrize(
    ("cause", "stale", "outcome"),
    [("hang", False, "hang"), ("signal", False, INTERRUPTED), ("hang", True, INTERRUPTED)],
)
def test_a_rank_that_hangs_fails_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, stale: bool, outcome: str
) -> None:
    """Its launcher ends it by signal 9, which alone would say that somebody killed it from outside."""
    folder, run_dir = tmp_path / "job", tmp_path / "run"
    folder.mkdir()
    run_dir.mkdir()
    (folder / RUN_FILE).write_text(dump_run(run_with(global_batch=8)))
    Part(str(run_dir), 10).write(folder)
    seen: list[Any] = []

    def launch(words: list[str], ranks: int, module: str, *, policy: RestartPolicy, first_device: int) -> int:
        seen.extend([words, ranks, module, policy.most, policy.run_dir, first_device])
        if not stale:
            fault = {"rank": 1, "cause": cause, "phase": "forward", "step": 7}
            (run_dir / FAULT_FILE).write_text(json.dumps(fault))
        return 137

    if stale:
        # Of an earlier part of the same run.
        (run_dir / FAULT_FILE).write_text(json.dumps({"rank": 1, "cause": cause, "phase": "forward", "step": 2}))
        time.sleep(0.05)
    monkeypatch.setattr(trial_launch, "launch_ranks", launch)
    assert trial_launch.launch_trial(str(folder), 2, 4) == 137
    assert seen == [["rank", str(folder)], 2, "phalanx.study.processes", 0, run_dir, 4]
    found = explain_failure([one for one in read_rank_reports(folder, 2) if one], Ended(137, False, 1.0), "")
    assert found.cause == outcome
    if outcome == "hang":
        assert found.words == "rank 1 in forward of step 7: it gave no sign of life"


def test_slots_of_several_devices() -> None:
    slot = LocalDevices("cuda", 2, 1e9, threads=3, ranks=2)
    assert slot.command(Path("jobs/9"), 60.0) == [*MODULE, "launch", "jobs/9", "2", "2"]
    # The launcher tells each rank who it is.
    assert slot.env(0) == {"OMP_NUM_THREADS": "3"} and slot.name.endswith(" cuda 2-3")
    with pytest.raises(
        ConfigError, match=r"--devices 3 is no multiple of the 2 devices .*\nnearest legal: --devices 4"
    ):
        find_devices("local", "cpu", 3, None, 2)
    with pytest.raises(ConfigError, match="--where slurm needs --cluster NAME"):
        find_devices("slurm", "cpu", 4, None, 2)


@pytest.mark.parametrize(
    ("first", "outcome"), [("Exited with exit code 1", "crash"), ("Killed", INTERRUPTED), (None, INTERRUPTED)]
)
def test_the_first_rank_of_a_step_to_fail_explains_its_end(first: str | None, outcome: str) -> None:
    """srun kills the others and ends as if a signal had ended all; those that lost the first report a crash too."""
    log = (
        ""
        if first is None
        else f"Traceback\nsrun: error: node7: task 1: {first}\nsrun: error: node7: tasks 0,2-3: Killed\n"
    )
    report = {"cause": "crash", "words": "rank 0: connection closed by peer"}
    assert explain_failure([report], Ended(137, False, 1.0), log).cause == outcome
