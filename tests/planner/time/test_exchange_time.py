"""Rows on their way to experts: what is computed beside them hides them, and two stages take what their messages take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.model import LanguageModel
from phalanx.hardware.collectives import all_to_all, default_constants
from phalanx.hardware.machine import load_machine
from phalanx.hardware.topology import place_groups
from phalanx.planner.time.framework import COMPILED
from phalanx.planner.time.operation_time import Direction, Form, OperationTable, PartBreakdown
from phalanx.planner.time.part_time import Parts, in_training, part_times, parts_of
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.traced_model import Setting

MACHINE = load_machine("frontier")
CONSTANTS = default_constants(MACHINE)
PROFILE = replace(default_profile("MI250X GCD").profile, kernel_s=0.0, exchange_host_s=0.0, host_s=0.0)
MODEL = LanguageModel.model_validate(
    {
        "n_layers": 2,
        "d_model": 256,
        "n_heads": 4,
        "vocab_size": 64,
        "max_positions": 128,
        "experts": {"count": 64, "active": 2, "d_ff": 64, "shared": 1},
    }
)
NODE, MIB = MACHINE.node.devices, 2.0**20


def work(milliseconds: float) -> tuple[float, ...]:
    """Memory traffic that takes so long."""
    size = milliseconds * 1e-3 * PROFILE.memory_b_s
    return (0, Direction.FORWARD, PartBreakdown.MEMORY, Form.TRAFFIC, False, 1, 1, 1, 1, 0.0, size, 1, 1, 0)


def trip(size: float, beside: int, form: Form = Form.ALL_TO_ALL) -> tuple[float, ...]:
    """An exchange of so many bytes, during which so many of the operations after it run."""
    return (0, Direction.FORWARD, PartBreakdown.EP, form, False, 1, 1, 1, 1, 0.0, size, 2, 1, beside)


def waits(*rows: tuple[float, ...], ep: int = NODE, node: int = 1) -> float:
    """Seconds that a part of these operations waits for rows."""
    one = np.ones(1)
    parts = Parts(OperationTable.of(rows), *(np.array([size]) for size in (1, 1, ep, node)), one, one, np.inf * one)
    return float(part_times(parts, MACHINE, CONSTANTS, PROFILE).seconds[0, Direction.FORWARD, PartBreakdown.EP])


def takes(size: float, ep: int = NODE, stride: int = 1) -> float:
    """Seconds of an exchange alone."""
    return float(all_to_all(size, place_groups(MACHINE, ep, stride), in_training(CONSTANTS, PROFILE)))


def test_what_runs_beside_an_exchange_hides_it() -> None:
    alone = takes(64 * MIB)
    assert waits(trip(64 * MIB, 0), work(100.0)) == pytest.approx(alone)
    # Computing loses a share of the time in which both run.
    assert waits(trip(64 * MIB, 1), work(100.0)) == pytest.approx(PROFILE.slowdown * alone)
    half = alone / 2
    beside = work(1e3 * half / PROFILE.hidden)
    assert waits(trip(64 * MIB, 1), beside, work(100.0)) == pytest.approx(half + PROFILE.slowdown * half)


def test_exchanges_follow_one_another() -> None:
    """The second is under way for as long as the first leaves it, beside what is computed for the first."""
    alone = takes(64 * MIB)
    beside = work(1e3 * alone / PROFILE.hidden)
    # Both begin; nothing runs beside the first, and beside the second as much as it takes.
    assert waits(trip(64 * MIB, 1), trip(64 * MIB, 1), beside) == pytest.approx((1 + PROFILE.slowdown) * alone)
    # Twice as much beside both: nothing of either shows.
    assert waits(trip(64 * MIB, 2), trip(64 * MIB, 2), beside, beside) == pytest.approx(2 * PROFILE.slowdown * alone)


def test_two_stages_take_what_each_takes() -> None:
    stages = (trip(MIB, 0, Form.ALL_TO_ALL_ACROSS), trip(MIB, 0, Form.ALL_TO_ALL_WITHIN))
    expected = takes(MIB, 8, NODE) + takes(MIB, NODE)
    assert waits(*stages, ep=8 * NODE, node=NODE) == pytest.approx(expected)
    # 56 messages to other nodes against 7.
    assert expected < takes(MIB, 8 * NODE) / 2


def test_plans_count_what_shared_network_and_chunks_hide() -> None:
    """Of a traced block: a shared network hides a part of the way there, a second chunk more."""
    setting = Setting(MODEL, 128, ep=64, compile=False)

    def exchanged(**changes: int) -> tuple[float, list[tuple[str, int]]]:
        parts = parts_of([("block", replace(setting, **changes), 64)], COMPILED)  # type: ignore[arg-type]
        operations = COMPILED.part_operations("block", replace(setting, **changes), 64)  # type: ignore[arg-type]
        sent = [(op.collective.axis, op.collective.bytes) for op in operations if op.collective is not None]
        hides = float(part_times(parts, MACHINE, CONSTANTS, PROFILE).seconds[0, :, PartBreakdown.EP].sum())
        nothing = replace(parts, operations=replace(parts.operations, beside=0 * parts.operations.beside))
        alone = float(part_times(nothing, MACHINE, CONSTANTS, PROFILE).seconds[0, :, PartBreakdown.EP].sum())
        return hides / alone, sent

    flat, halves, staged = exchanged(), exchanged(ep_chunks=2), exchanged(ep_node=8)
    assert halves[0] < flat[0] < 1.0
    # Numbers of rows, then rows: there and back, forward and backward.
    assert [axis for axis, _ in flat[1]] == ["ep"] * 5
    assert [axis for axis, _ in halves[1]] == ["ep"] * 9
    there, back = ["ep_across", "ep_within"], ["ep_within", "ep_across"]
    assert [axis for axis, _ in staged[1]] == [*there, *there, *back, *there, *back]
    rows = 64 * 128 * 2 * 256 * 2
    assert sum(size for axis, size in staged[1] if axis == "ep_across") == pytest.approx(4 * rows, rel=0.01)
