"""What counts as a spike of the loss or the gradient norm."""

import math
from dataclasses import replace

import pytest

from phalanx.training.metrics import StepMetrics
from phalanx.training.safeguards.spikes import FEWEST, WINDOW, RecentFigures, RunningScale, SpikeWatch


def metrics(loss: float, norm: float) -> StepMetrics:
    return replace(
        StepMetrics(*[0] * 15),  # type: ignore[arg-type]
        loss=loss,
        grad_norm=norm,
    )


def scale_of(values: list[float], deviations: float = 20.0, least: float = 0.5) -> RunningScale:
    scale = RunningScale(deviations, least)
    for value in values:
        scale.add(value)
    return scale


def test_norms_of_a_healthy_run_are_within_the_limit_and_a_spike_is_not() -> None:
    scale = scale_of([5.0, 1.0, 3.0, 0.5, 2.0, 1.5, 1.0, 9.0])
    # median 1.75, median absolute deviation 1.0
    assert scale.limit() == pytest.approx(1.75 + 20 * 1.4826)
    # a spike among the values hardly moves the limit
    scale.add(1e6)
    assert scale.limit() < 60


def test_too_few_values_say_nothing_and_a_plateau_makes_no_noise_a_spike() -> None:
    assert scale_of([1.0] * (FEWEST - 1)).limit() == math.inf
    assert scale_of([2.0] * FEWEST, least=0.01).limit() == pytest.approx(2.4)


def test_a_level_that_stays_becomes_the_median_and_values_that_are_no_numbers_are_left_out() -> None:
    scale = scale_of([1.0] * WINDOW + [100.0] * WINDOW)
    assert scale.limit() > 100.0
    scale.add(math.nan)
    scale.add(math.inf)
    assert math.isfinite(scale.limit())


def test_a_watch_that_continues_from_a_checkpoint_decides_as_the_one_before() -> None:
    watch = SpikeWatch(20.0, RecentFigures())
    for number in range(12):
        assert watch.judge(metrics(3.0 - 0.01 * number, 1.0 + 0.1 * (number % 3)), watch.limits()) is None
    kept = RecentFigures.model_validate_json(watch.recent().model_dump_json())
    again = SpikeWatch(20.0, kept)
    assert again.limits() == watch.limits()
    spike = again.judge(metrics(3.0, 1e4), again.limits())
    assert spike is not None and spike.figure == "grad_norm" and "gradient norm 1e+04 is above" in str(spike)
    loss = watch.judge(metrics(9.0, 1.0), watch.limits())
    assert loss is not None and loss.figure == "loss" and loss.median == pytest.approx(2.945)
