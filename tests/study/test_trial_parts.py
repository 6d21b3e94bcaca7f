"""What becomes of a trial's processes: causes of failures, the command on a cluster, and what samplers suggest."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.hardware.machine import load_machine
from phalanx.study.processes.process import Ended
from phalanx.study.processes.rank import classify_error
from phalanx.study.processes.slots import SlurmNodes
from phalanx.study.processes.trial_files import explain_failure
from phalanx.study.samplers import Observation, deephyper_goals, suggest_optuna
from phalanx.study.space import Choices, Integers, Range, Reals
from phalanx.study.trial import FAILURES, OK, Outcome, Trial

FIRST, SECOND = (Trial(number, str(number), {}, "test", Outcome(OK, value=1.0)) for number in range(2))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (ConfigError("layout.tp=3 does not divide model.n_heads=8"), "refused"),
        (PhalanxError("step 2: loss=nan gradient norm=nan is not finite; stopped"), "non_finite"),
        (DataError("no such folder"), "crash"),
        (RuntimeError("Connection closed by peer"), "crash"),
    ],
)
def test_causes_of_failures(error: BaseException, cause: str) -> None:
    assert classify_error(error) == cause


def test_the_rank_that_failed_first_tells() -> None:
    crash = {"cause": "crash", "words": "rank 1: Connection closed by peer"}
    memory = {"cause": "out_of_memory", "words": "rank 0: out of memory"}
    assert explain_failure([crash, memory], Ended(1, False, 3.0), "log").cause == "out_of_memory"
    assert explain_failure([crash], Ended(1, False, 3.0), "log").words == "rank 1: Connection closed by peer"
    assert explain_failure([], Ended(7, False, 3.0), "last words").words == "exit code 7: last words"
    assert explain_failure([crash], Ended(137, False, 3.0), "log").cause == "interrupted"
    assert explain_failure([memory], Ended(137, False, 3.0), "log").cause == "out_of_memory"


def test_of_ranks_that_srun_killed_the_first_tells_though_it_left_no_report() -> None:
    killed = "srun: error: node-7: task 0: Killed"
    missing = (
        f"ModuleNotFoundError: No module named 'torch'\nsrun: error: node-7: task 1: Exited with exit code 1\n{killed}"
    )
    found = explain_failure([], Ended(137, False, 3.0), missing)
    assert found.cause == "crash" and "ModuleNotFoundError" in found.words
    lost = "srun: error: node-7: task 1: Exited with exit code 1"
    assert explain_failure([], Ended(137, False, 3.0), f"{killed}\n{lost}").cause == "interrupted"
    memory = f"slurmstepd: error: Detected 1 oom_kill event\nsrun: error: node-7: task 0: Out Of Memory\n{lost}"
    assert explain_failure([], Ended(137, False, 3.0), memory).cause == "out_of_memory"


@pytest.mark.parametrize("code", [-9, 137])
def test_a_trial_that_the_kernel_killed_for_memory_is_not_repeated(code: int) -> None:
    crash = {"cause": "crash", "words": "rank 1: Connection closed by peer"}
    found = explain_failure([crash], Ended(code, False, 3.0, memory_ran_out=True), "log")
    assert found.cause == "out_of_memory" in FAILURES and "memory of this host" in found.words
    by_slurm = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."
    assert explain_failure([], Ended(code, False, 3.0), by_slurm).cause == "out_of_memory"


def test_a_trial_in_a_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scontrol").write_text("#!/bin/sh\necho node-7\necho node-8\n")
    (bin_folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    launcher = SlurmNodes(load_machine("frontier"), 2)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="needs an allocation"):
        launcher.env(0)
    monkeypatch.setenv("SLURM_JOB_ID", "4123456")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[7-8]")
    env, other = launcher.env(0), launcher.env(1)
    assert env["MASTER_ADDR"] == "node-7" and env["MASTER_PORT"] != other["MASTER_PORT"]
    assert "FI_CXI_ATS" in env or any(name.startswith(("FI_", "NCCL_")) for name in env)
    command = launcher.command(Path("trial"), 600.0)
    start = command.index("srun")
    assert command[:start] == [sys.executable, "-m", "phalanx.study.processes.process"]
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--kill-on-bad-exit=1", "--time=11"} <= set(command)
    assert command[-4:] == ["-m", "phalanx.study.processes", "rank", "trial"]
    assert not any("#" in word for word in command)


RANGES: dict[str, Range] = {
    "kind": Choices(("a", "b", None)),
    "width": Integers(8, 512, log=True),
    "depth": Integers(2, 10, step=2),
    "rate": Reals(1e-5, 1e-1, log=True),
}


def test_draws_lie_in_their_ranges_and_ratios_matter() -> None:
    random = np.random.default_rng(0)
    drawn = {name: [given.draw(random) for _ in range(400)] for name, given in RANGES.items()}
    assert all(RANGES[name].contains(value) for name, values in drawn.items() for value in values)
    assert set(drawn["depth"]) == {2, 4, 6, 8, 10} and set(drawn["kind"]) == {"a", "b", None}
    below = np.mean([value < 1e-3 for value in drawn["rate"]])  # type: ignore[operator]
    assert 0.4 < below < 0.6
    assert RANGES["rate"].position(1e-3) == pytest.approx(0.5) and not RANGES["depth"].contains(3)


def test_a_sampler_learns_and_stays_away_from_failures() -> None:
    random = np.random.default_rng(1)
    history = []
    for _ in range(40):
        values = {name: given.draw(random) for name, given in RANGES.items()}
        score = None if values["kind"] == "b" else abs(np.log10(float(values["rate"])) + 3.0)  # type: ignore[arg-type]
        history.append(Observation(values, score))
    found = [suggest_optuna("tpe", RANGES, history, seed) for seed in range(30)]
    assert found[0] == suggest_optuna("tpe", RANGES, history, 0)
    assert all(RANGES[name].contains(value) for values in found for name, value in values.items())
    near = [abs(np.log10(float(values["rate"])) + 3.0) for values in found]  # type: ignore[arg-type]
    assert np.mean(near) < 0.5 and sum(values["kind"] == "b" for values in found) <= 5


def test_what_deephyper_is_told() -> None:
    failed = Observation({}, None, "out_of_memory")
    assert deephyper_goals([failed, Observation({}, 1.0)]) == ["F_out_of_memory", 0.0]
    assert deephyper_goals([Observation({}, -2.0), Observation({}, 3.0)]) == [2.0, -3.0]
