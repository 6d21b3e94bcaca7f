"""Fitting constants to runs: it finds those that made the runs, chooses rows blindly, and ignores wrong ones."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.model import LanguageModel
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.measured.calibration import calibrate, calibrate_machines, choose
from phalanx.planner.measured.measured_groups import MeasuredGroup, System, grouped, refused
from phalanx.planner.measured.runs import MeasuredRun, Rate
from phalanx.planner.time.framework import EAGER
from phalanx.planner.time.profile import default_profile

DEFAULT = default_profile("A100-80GB")
TRUE = replace(
    DEFAULT,
    profile=DEFAULT.profile.scaled(
        {"matmul_flop_s": 0.9, "memory_b_s": 1.2, "link_share": 0.7, "host_s": 2.0, "optimizer_b_s": 0.8}
    ),
)


def _run(number: int, width: int, layout: ResolvedLayout) -> MeasuredRun:
    model = LanguageModel.model_validate(
        {"n_layers": 8, "d_model": width, "n_heads": width // 64, "vocab_size": 8192, "max_positions": 512}
    )
    return MeasuredRun(
        row_id=f"run-{number}",
        group="made",
        system="selene",
        framework="Phalanx",
        used=True,
        reason="",
        assumed=(),
        device="A100-80GB",
        devices=layout.world_size,
        model=model,
        sequence_length=512,
        layout=layout,
        recompute="full",
        precision="bf16",
        rate=Rate(1.0, ""),
        memory=None,
        status="ok",
    )


@pytest.fixture(scope="module")
def group() -> MeasuredGroup:
    layouts = [
        ResolvedLayout(global_batch=64, microbatch=microbatch, tp=tp, dp_replicate=replicas, zero=0)
        for microbatch in (1, 4, 8)
        for tp in (1, 2, 4)
        for replicas in (1, 4)
    ]
    shapes = [(width, layout) for width in (512, 2048) for layout in layouts]
    runs = [_run(number, *shape) for number, shape in enumerate(shapes)]
    # Uncompiled blocks are traced in no time.
    found = MeasuredGroup.of(System("selene", load_machine("selene")), EAGER, runs)
    return _measured(found, found.rates(TRUE))


def _measured(group: MeasuredGroup, rates: np.ndarray) -> MeasuredGroup:
    runs = [replace(run, rate=Rate(float(rate), "")) for run, rate in zip(group.runs, rates, strict=True)]
    return replace(group, runs=tuple(runs))


def test_runs_that_were_not_fitted_are_predicted(group: MeasuredGroup) -> None:
    found = calibrate([group], 12)
    assert np.median(np.abs(found.errors_before)) > 0.08
    assert len(found.rows) == 12 and len(found.held_out_errors) == 24
    assert np.abs(found.held_out_errors).max() < 0.03
    # Of two constants that act alike the fit shares out what the runs say of both.
    assert found.named.profile.host_s == pytest.approx(TRUE.profile.host_s, rel=0.2)


def test_which_rows_are_fitted_does_not_depend_on_what_was_measured(group: MeasuredGroup) -> None:
    turned = _measured(group, group.rates(TRUE)[::-1])
    assert calibrate([turned], 8).rows == calibrate([group], 8).rows


def test_a_wrong_row_does_not_spoil_the_fit(group: MeasuredGroup) -> None:
    rates = group.rates(TRUE)
    rows = calibrate([group], 12).rows
    wrong = next(number for number, run in enumerate(group.runs) if run.row_id == rows[5])
    rates[wrong] *= 3
    found = calibrate([_measured(group, rates)], 12)
    assert np.median(np.abs(found.held_out_errors)) < 0.04


def test_few_rows_are_judged_by_fits_without_them(group: MeasuredGroup) -> None:
    found = calibrate([group], len(group.runs))
    assert found.named.fitted is not None and found.named.fitted["held_out_by"] == "cross-validation"
    assert len(found.held_out_errors) == len(group.runs)


def test_rows_that_tell_most_are_chosen_first() -> None:
    sensitivity = np.array([[1.0, 0.0], [3.0, 0.0], [2.9, 0.0], [0.0, 2.0]])
    assert choose(sensitivity, 2) == [1, 3]


def test_runs_of_our_own_are_of_the_machine_they_name(group: MeasuredGroup) -> None:
    ours = [replace(run, system="h200-x4", device="H200") for run in group.runs if (run.devices or 8) <= 4][:4]
    (found,) = grouped(ours)
    assert found.system.machine.name == found.system.profile == "h200-x4"
    assert found.framework.copy_engines
    elsewhere = replace(ours[0], device="A100-80GB")
    assert "no machine is described" in refused(elsewhere)


def test_each_machine_gets_a_profile_and_unknown_ones_a_reason(group: MeasuredGroup) -> None:
    elsewhere = replace(group.runs[0], device="V100")
    assert grouped([elsewhere]) == []
    here = replace(group, system=replace(group.system, profile="selene-2"))
    found = calibrate_machines([group, here], 6)
    assert [one.named.name for one in found] == ["selene", "selene-2"]
    assert "no machine is described" in refused(elsewhere)
