import math

import pytest

from phalanx.config.schema import Optimizer
from phalanx.optimizers import LearningRateSchedule


def rates(total: int, **fields: object) -> list[float]:
    optimizer = Optimizer.model_validate({"lr": 1.0, "min_lr_ratio": 0.1, **fields})
    schedule = LearningRateSchedule(optimizer, total)
    return [schedule.rate(step) for step in range(1, total + 1)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates(100, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    assert rates(1000)[0] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_every_decay_ends_at_the_minimum(schedule: str) -> None:
    assert rates(50, schedule=schedule, warmup_steps=5)[-1] == pytest.approx(0.1)


def test_cosine_is_half_way_down_in_the_middle_of_the_decay() -> None:
    middle = rates(110, schedule="cosine", warmup_steps=10)[59]
    assert middle == pytest.approx(0.1 + 0.9 * 0.5)


def test_cosine_follows_the_cosine() -> None:
    assert rates(100, schedule="cosine")[24] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_stays_at_the_peak_until_the_last_fifth() -> None:
    wsd = rates(100, schedule="wsd", warmup_steps=10, decay_fraction=0.2)
    assert wsd[9:80] == [1.0] * 71
    assert wsd[89] == pytest.approx(0.55)


def test_constant_never_falls() -> None:
    assert set(rates(30, schedule="constant")) == {1.0}


def test_a_warm_up_as_long_as_the_run_ends_at_the_peak() -> None:
    assert rates(10, warmup_steps=10)[-1] == 1.0
