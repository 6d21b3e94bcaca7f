"""What a training takes: goodput against a simulation of failures, the best checkpoint interval, energy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.hardware.device_facts import DeviceFacts, device_facts
from phalanx.planner.plan.budget import Reliability, estimate_budget, estimate_goodput, judge_batch
from phalanx.planner.rank.cost_models import WAITING, Times, working_watts


def elapsed_per_useful_second(interval: float, write: float, restart: float, failure: float) -> float:
    """By simulation: segments of work and a checkpoint, begun again after each failure, which may hit restarts too."""
    random, done, clock = np.random.default_rng(7), 0, 0.0
    segments = 4000
    next_failure = random.exponential(failure)
    while done < segments:
        need = interval + write
        if next_failure >= need:
            next_failure -= need
            clock += need
            done += 1
            continue
        clock += next_failure
        next_failure = random.exponential(failure)
        while next_failure < restart:
            clock += next_failure
            next_failure = random.exponential(failure)
        clock += restart
        next_failure -= restart
    return clock / (segments * interval)


@pytest.mark.parametrize(("nodes", "mtbf"), [(512, 2000.0), (2048, 6300.0), (3000, 1000.0)])
def test_goodput_is_what_random_failures_leave(nodes: int, mtbf: float) -> None:
    found = estimate_goodput(10**12, nodes, Reliability(mtbf, 10.0, 1.0))
    assert found.failure_s == pytest.approx(mtbf * 3600 / nodes)
    assert found.checkpoint_s == pytest.approx(12e12 / (nodes * 1e9))
    simulated = 1 / elapsed_per_useful_second(found.interval_s, found.checkpoint_s, 600.0, found.failure_s)
    assert found.share == pytest.approx(simulated, rel=0.04)
    assert sum(found.parts.values()) == pytest.approx(1.0) and min(found.parts.values()) > 0.0
    assert found.parts["checkpoints"] / found.share == pytest.approx(found.checkpoint_s / found.interval_s)
    # By simulation: of 100,000 failures, each begins 600 s of restart, or as much as the next one leaves of it.
    lengths = np.minimum(np.random.default_rng(2).exponential(found.failure_s, 100_000), 600.0)
    assert found.parts["start and restart"] == pytest.approx(lengths.mean() / found.failure_s, rel=0.02)


@pytest.mark.parametrize("nodes", [8, 512, 8192])
def test_no_other_interval_loses_less(nodes: int) -> None:
    found = estimate_goodput(10**12, nodes, Reliability())
    failure, write = found.failure_s, found.checkpoint_s

    def share(interval: float) -> float:
        return interval / (failure * math.exp(600 / failure) * math.expm1((interval + write) / failure))

    assert found.share == pytest.approx(share(found.interval_s))
    others = [share(found.interval_s * factor) for factor in np.geomspace(0.2, 5, 101)]
    assert max(others) <= found.share * 1.001


def test_a_job_that_fails_faster_than_it_saves_has_no_goodput() -> None:
    found = estimate_goodput(10**12, 8, Reliability(mtbf_hours=1.0, checkpoint_gb_s=0.01))
    assert 0 <= found.share < 1e-9


def test_budget() -> None:
    losses = estimate_goodput(10**9, 8, Reliability())
    found = estimate_budget(
        amount=1001, unit="tokens", amount_per_step=100, step_s=7.2, devices=64, watts=500.0, losses=losses
    )
    assert found.steps == 11
    assert found.seconds == pytest.approx(79.2)
    assert found.elapsed_s == pytest.approx(79.2 / losses.share)
    assert found.device_hours == pytest.approx(found.elapsed_s * 64 / 3600)
    assert found.energy_mwh == pytest.approx(found.device_hours * 500 / 1e6)
    assert (
        estimate_budget(
            amount=1, unit="tokens", amount_per_step=1, step_s=1.0, devices=1, watts=None, losses=losses
        ).energy_mwh
        is None
    )


def test_waiting_devices_draw_less() -> None:
    causes = {"matmul": np.array([6.0, 10.0, 0.0]), WAITING: np.array([3.0, 0.0, 10.0])}
    causes["data-parallel exposed"] = np.array([1.0, 0.0, 0.0])
    watts = Times(np.full(3, 10.0), causes, np.zeros(3)).mean_power(100.0)
    assert watts.tolist() == pytest.approx([0.6 * 100 + 0.4 * 53, 100.0, 53.0])


def test_the_power_of_a_device_is_measured_or_known_or_a_share_of_its_board() -> None:
    known, unknown, nothing = device_facts("H200"), device_facts("MI250X GCD"), DeviceFacts("New", {})
    assert known.training_w is not None and known.power_w is not None and known.training_w < known.power_w
    assert [working_watts(facts) for facts in (known, unknown, nothing)] == [known.training_w, 0.75 * 280, None]
    assert [working_watts(facts, 123.0) for facts in (known, unknown, nothing)] == [123.0] * 3


def test_a_batch_past_the_critical_one_takes_more_samples_to_the_same_loss() -> None:
    losses = estimate_goodput(10**9, 1, Reliability())
    budget = estimate_budget(
        amount=1000, unit="tokens", amount_per_step=10, step_s=1.0, devices=1, watts=None, losses=losses
    )
    large = judge_batch(budget, 512, 128.0)
    assert (large.factor, large.amount) == (5.0, 5000)
    assert large.elapsed_s == pytest.approx(5 * budget.elapsed_s)
    # Steps and samples: (S / S_min - 1) (E / E_min - 1) = 1, where E / S is the batch and E_min / S_min the critical one.
    steps = large.factor / 512 * 128
    assert (steps - 1) * (large.factor - 1) == pytest.approx(1.0)
