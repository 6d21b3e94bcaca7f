"""Trials of layouts: losses that must agree, and a real one that runs out of memory."""

from __future__ import annotations

import time
from pathlib import Path

from layout_runs import run_with
from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.study.layouts.layout_space import LayoutSpace, build_layout_space
from phalanx.study.layouts.layout_trials import ProcessRunner, judge_losses, loss_bound
from phalanx.study.processes.slots import LocalRanks
from phalanx.study.trial import OK, Outcome, Trial, key_of
from token_data import write_run_file, write_token_folder

FIRST = Trial(0, "a", {}, "test", Outcome(OK, value=1.0, losses=(5.0, 4.0, 3.0)))


def measure(runner: ProcessRunner, space: LayoutSpace, point: int, folder: Path, before: list[Trial]) -> Outcome:
    values = space.values(point)
    job = runner.start(space, Trial(0, key_of(values), values, "test"), folder, before)
    while (outcome := job.poll()) is None:
        time.sleep(0.02)
    return outcome


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


def test_gradient_norms_of_all_layouts_agree() -> None:
    def outcome(*norms: float) -> Outcome:
        return Outcome(OK, value=1.0, losses=(5.0, 4.0), more={"gradient_norms": norms})

    first = Trial(0, "a", {}, "test", outcome(2.0, 1.0))
    assert judge_losses(outcome(2.0001, 1.0001), [first], 1e-4).cause == OK
    for norms in ((2.0, 1.001), (4.0, 1.0), (2.0, float("nan"))):
        wrong = judge_losses(outcome(*norms), [first], 1e-4)
        assert wrong.cause == "wrong_loss" and "gradient norm" in wrong.words and "in trial 0" in wrong.words
    assert judge_losses(Outcome(OK, value=1.0, losses=(5.0, 4.0)), [first], 1e-4).cause == OK, "of earlier versions"


def test_the_bound_is_rounding_and_never_large() -> None:
    fp32, bf16 = (loss_bound(run_with(global_batch=64, precision=name)) for name in ("fp32", "bf16"))
    assert 1e-6 < fp32 < 1e-3 < bf16
    for losses, norms in (((5.06, 4.0), (2.0, 1.0)), ((5.0, 4.0), (2.07, 1.0))):
        wrong = Outcome(OK, value=1.0, losses=losses, more={"gradient_norms": norms})
        first = Trial(
            0, "a", {}, "test", Outcome(OK, value=1.0, losses=(5.0, 4.0), more={"gradient_norms": (2.0, 1.0)})
        )
        assert judge_losses(wrong, [first], bf16).cause == "wrong_loss"


def test_trials_of_a_rate_that_throws_a_model_about_agree(tmp_path: Path) -> None:
    """As on two H200s, where layouts of Llama-3 8B went apart within four steps."""
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    given = "search: {layout: {microbatch: [1, 4], recompute: [none]}, steps: 6, skip: 2}\n"
    file.write_text(file.read_text() + given)
    run = load_run(file, ["optimizer.lr=1.0", "training.compile=false"])
    search = run.search
    space = build_layout_space(enumerate_layouts(bind(run), 1, limits=Limits(4, 1, 8)), search)  # type: ignore[arg-type]
    runner = ProcessRunner(run, search, 1, LocalRanks(1))
    one = measure(runner, space, 0, tmp_path / "one", [])
    assert one.cause == OK and len(one.more["gradient_norms"]) == 6
    other = measure(runner, space, len(space) - 1, tmp_path / "other", [Trial(0, "a", {}, "test", one)])
    assert other.cause == OK, other.words


def test_a_rank_without_memory_is_survived(tmp_path: Path) -> None:
    """A real trial whose batch does not fit into the memory that it may have."""
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    large = file.read_text().replace("d_ff: 64", "d_ff: 16384").replace("global_batch: 8", "global_batch: 2048")
    file.write_text(large + "search: {layout: {microbatch: [1024], recompute: [none]}, steps: 3, memory_gib: 2}\n")
    run = load_run(file, ["search.skip=1"])
    search = run.search
    space = build_layout_space(enumerate_layouts(bind(run), 1, limits=Limits(1024, 1, 8)), search)  # type: ignore[arg-type]
    runner = ProcessRunner(run, search, 1, LocalRanks(1))
    outcome = measure(runner, space, 0, tmp_path / "trial", [])
    assert outcome.cause == "out_of_memory", outcome.words
    assert "rank 0" in outcome.words and outcome.value is None
