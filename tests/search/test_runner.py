"""Trials of layouts: losses that must agree, and a real one that runs out of memory."""

from __future__ import annotations

from pathlib import Path

from layout_runs import run_with
from phalanx.config.load import load_run
from phalanx.cost.enumerate import Limits, legal_candidates
from phalanx.search.runner import ProcessRunner, judge_losses, loss_bound
from phalanx.search.space import build_space
from phalanx.trials.launchers import LocalLauncher
from phalanx.trials.trial import OK, Outcome, Trial
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
