"""Measuring on ranks of this CPU: all of them take part, and what they found becomes one profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed_ranks import run_ranks
from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.calibrate.fit_profile import profile_of
from phalanx.hardware.calibrate.measure_machine import Measurements, gather_measurements, measure_rank, plain_machine
from phalanx.hardware.calibrate.measured_sizes import PROCESSOR
from phalanx.hardware.calibrate.time_exchanges import HostExchanges, time_host_exchanges
from phalanx.hardware.calibrate.time_operations import split_times

SHORT = replace(
    PROCESSOR, span_s=0.001, samples=3, models=((64, 64, 1), (64, 64, 4)), matmuls=3, singles=1, doubles=1, attentions=1,
    traffic=(2**18,), optimizer=(2**12,), exchanged=(2**12, 2**14), copied=(2**14,),
    blocks=((64, 64, 1),), beside=(64, 4, 2**12),
)  # fmt: skip


def _measure(seconds: float) -> tuple[Measurements, list[str]]:
    said: list[str] = []
    return gather_measurements(measure_rank(torch.device("cpu"), SHORT, 2, seconds, said.append)), said


def test_ranks_measure_together_and_agree_on_what_they_found() -> None:
    (first, said), (second, _) = run_ranks(_measure, 2, 60.0)
    assert first == second
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    timed = {(name, size) for name in names for size in SHORT.exchanged}
    assert {(x.collective, x.size) for x in first.exchanged} == timed | {("copies", size) for size in SHORT.copied}
    assert all(x.members == 2 and x.seconds > 0 for x in first.exchanged)
    assert first.collectives_beside is not None and first.collectives_beside.both > 0
    assert len(first.operations) == 3 + 1 + 1 + 2 + 2 and len(first.blocks) == 1
    assert any("2 ranks" in words for words in said)
    named = profile_of(first, plain_machine("CPU", 2), "measured").named
    assert named.collectives is not None and named.collectives.step_across_s == 0.0


def test_without_time_the_least_is_measured_on_every_rank() -> None:
    (first, _), (second, _) = run_ranks(_measure, 2, 0.0)
    assert first == second
    assert [x.kind for x in first.operations] == ["matmul", "matmul32", "matmul64", "attention", "attention_backward"]
    assert {x.size for x in first.exchanged if x.collective != "copies"} == {SHORT.exchanged[0]}
    assert first.blocks == ()


@pytest.mark.parametrize(("forward", "both"), [(1.0, 3.5), (2.0, 2.0), (3.0, 1.5)])
def test_both_passes_take_time_however_busy_the_machine_was(forward: float, both: float) -> None:
    parts = split_times(forward, both)
    assert sum(parts) == pytest.approx(both) and min(parts) > 0
    assert parts[0] == (forward if both > forward else pytest.approx(both / 3))


def _timed() -> HostExchanges:
    return time_host_exchanges(Clock(torch.device("cpu"), 0.001, samples=1))


def test_ranks_agree_on_what_exchanges_cost_them() -> None:
    first, second = run_ranks(_timed, 2)
    assert first == second
    # Ranks of a CPU wait for each other in both.
    assert first.exchange_s > 0 and first.shard_s > 0
