"""What becomes of a trial's processes: causes of failures, losses that must agree, and the command on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from layout_runs import run_with
from phalanx.cluster.machine import load_machine
from phalanx.config.load import load_run
from phalanx.cost.enumerate import Limits, legal_candidates
from phalanx.errors import ConfigError, DataError, PhalanxError
from phalanx.search.measure import cause_of
from phalanx.search.process import Ended
from phalanx.search.runner import LocalLauncher, ProcessRunner, SlurmLauncher, _failure, judge_losses, loss_bound
from phalanx.search.space import build_space
from phalanx.search.trials import OK, Outcome, Trial, objective
from token_data import write_run_file, write_token_folder

FIRST = Trial(0, "a", {}, "test", Outcome(OK, value=1.0, losses=(5.0, 4.0, 3.0)))


def trial_with(outcome: Outcome) -> Trial:
    return Trial(1, "b", {}, "test", outcome)


def test_losses_of_all_layouts_agree() -> None:
    good = Outcome(OK, value=2.0, losses=(5.0005, 4.0005, 3.0005))
    assert judge_losses(good, [], 1e-4) is good
    assert judge_losses(good, [FIRST], 1e-4) == good
    wrong = judge_losses(Outcome(OK, value=2.0, losses=(5.0, 4.0, 3.002)), [FIRST], 1e-4)
    assert wrong.cause == "wrong_loss" and wrong.value is None
    assert "step 3: loss 3.002, but 3 in trial 0" in wrong.words and "phalanx verify" in wrong.words
    failed = trial_with(Outcome("wrong_loss", losses=(1.0, 1.0)))
    assert judge_losses(good, [failed, FIRST], 1e-4) == good
    assert judge_losses(Outcome(OK, value=1.0, losses=(5.0, float("nan"))), [FIRST], 1e-4).cause == "non_finite"


def test_the_bound_is_rounding_and_never_large() -> None:
    fp32, bf16 = (loss_bound(run_with(global_batch=64, precision=name)) for name in ("fp32", "bf16"))
    assert 1e-6 < fp32 < 1e-3 and bf16 == 0.01


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
    assert cause_of(error) == cause


def test_the_rank_that_failed_first_tells() -> None:
    crash = {"cause": "crash", "words": "rank 1: Connection closed by peer"}
    memory = {"cause": "out_of_memory", "words": "rank 0: out of memory"}
    assert _failure([crash, memory], Ended(1, False, 3.0), "log").cause == "out_of_memory"
    assert _failure([crash], Ended(1, False, 3.0), "log").words == "rank 1: Connection closed by peer"
    assert _failure([], Ended(7, False, 3.0), "last words").words == "exit code 7: last words"
    assert _failure([crash], Ended(137, False, 3.0), "log").cause == "interrupted"
    assert _failure([memory], Ended(137, False, 3.0), "log").cause == "out_of_memory"


def test_a_rank_without_memory_is_survived(tmp_path: Path) -> None:
    """A real trial whose batch does not fit into the memory that it may have."""
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    large = file.read_text().replace("d_ff: 64", "d_ff: 16384").replace("global_batch: 8", "global_batch: 2048")
    file.write_text(large + "search: {layout: {microbatch: [1024], recompute: [none]}, steps: 3, memory_gib: 2}\n")
    run = load_run(file, ["search.skip=1"])
    search = run.search
    space = build_space(legal_candidates(run, 1, limits=Limits(1024, 1, 8)), search)  # type: ignore[arg-type]
    runner = ProcessRunner(run, search, 1, LocalLauncher(1))
    outcome = runner.measure(space, 0, FIRST, tmp_path / "trial", [])
    assert outcome.cause == "out_of_memory", outcome.words
    assert "rank 0" in outcome.words and outcome.value is None


def test_what_deephyper_is_told() -> None:
    assert objective(trial_with(Outcome("out_of_memory"))) == "F_out_of_memory"
    assert objective(FIRST) == 0.0


def test_a_trial_in_a_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scontrol").write_text("#!/bin/sh\necho node-7\necho node-8\n")
    (bin_folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    launcher = SlurmLauncher(load_machine("frontier"), 2)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="needs an allocation"):
        launcher.env(FIRST)
    monkeypatch.setenv("SLURM_JOB_ID", "4123456")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[7-8]")
    env, other = launcher.env(FIRST), launcher.env(trial_with(Outcome(OK)))
    assert env["MASTER_ADDR"] == "node-7" and env["MASTER_PORT"] != other["MASTER_PORT"]
    assert "FI_CXI_ATS" in env or any(name.startswith(("FI_", "NCCL_")) for name in env)
    command = launcher.command(Path("trial"), 600.0)
    start = command.index("srun")
    assert command[:start] == [sys.executable, "-m", "phalanx.search.process"]
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--kill-on-bad-exit=1", "--time=11"} <= set(command)
    assert command[-4:] == ["-m", "phalanx.search", "rank", "trial"]
    assert not any("#" in word for word in command)
