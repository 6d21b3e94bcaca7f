"""Where trials go: rules on small states, and a whole study in simulated time with costs that differ by a hundred."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.study.hyperparameters.packing import (
    PACKED,
    UNPACKED,
    Device,
    Move,
    Packing,
    Ready,
    Running,
    Span,
    Start,
    Window,
    decide_actions,
    device_use,
    idle_share,
    write_busy_bars,
)
from phalanx.study.hyperparameters.study_summary import simulate_unpacked
from simulated_study import Simulated, SimulatedTrial, Simulation

TWO = (Device("a", 2, 10.0), Device("b", 2, 10.0))


def test_long_ones_first_each_on_a_device_of_its_own() -> None:
    ready = [Ready("short", 5.0), Ready("long", 500.0), Ready("middle", 50.0)]
    assert decide_actions(TWO, [], ready, PACKED) == [Start("long", "a"), Start("middle", "b"), Start("short", "b")]
    assert decide_actions(TWO, [], ready, UNPACKED) == [Start("short", "a"), Start("long", "b")]


def test_a_device_is_shared_as_far_as_slots_and_memory_go() -> None:
    running = [Running("x", "a", 100.0, 7.0), Running("y", "b", 900.0, 1.0)]
    assert decide_actions(TWO, running, [Ready("n", 5.0, 3.5)], PACKED) == [Start("n", "b")]
    full = [*running, Running("z", "b", 5.0, 1.0)]
    assert decide_actions(TWO, full, [Ready("n", 5.0, 3.5)], PACKED) == []
    # What does not fit lets smaller ones pass; an empty device takes anything.
    assert decide_actions(TWO, running[:1], [Ready("large", 50.0, 99.0), Ready("n", 5.0, 3.0)], PACKED)[0] == Start(
        "large", "b"
    )
    both = decide_actions(TWO, full, [Ready("large", 50.0, 99.0), Ready("n", 5.0, 3.0)], PACKED)
    assert both == [Start("n", "a")]


def test_one_that_must_be_alone_is() -> None:
    running = [Running("x", "a", 100.0)]
    assert decide_actions(TWO, running, [Ready("n", 5.0, alone=True)], PACKED) == [Start("n", "b")]
    assert decide_actions(TWO[:1], running, [Ready("n", 5.0, alone=True)], PACKED) == []
    assert decide_actions(TWO[:1], [Running("x", "a", 100.0, alone=True)], [Ready("n", 5.0)], PACKED) == []


def test_idle_devices_get_what_ends_in_time_and_nothing_else() -> None:
    early = [Ready("slow", 95.0, backfill=True), Ready("quick", 40.0, backfill=True)]
    running = [Running("x", "a", 100.0)]
    assert decide_actions(TWO, running, early, PACKED) == [Start("quick", "b")]
    # A fill is no reason for another one, and takes no slot beside something else.
    assert decide_actions(TWO, [replace(running[0], backfill=True)], early, PACKED) == []
    assert decide_actions(TWO[:1], running, early, PACKED) == []
    assert decide_actions(TWO, running, early, replace(PACKED, fill=False)) == []


def test_work_moves_to_an_idle_device_where_that_pays() -> None:
    running = [Running("x", "a", 100.0), Running("y", "a", 400.0)]
    assert decide_actions(TWO, running, [], PACKED) == [Move("y", "b")]
    assert decide_actions(TWO, [replace(one, seconds_left=25.0) for one in running], [], PACKED) == []
    assert decide_actions(TWO, [replace(one, movable=False) for one in running], [], PACKED) == []
    assert decide_actions(TWO, running[:1], [], PACKED) == []


def study(
    packing: Packing, slots: int, seed: int, slowdown: float, lookahead: int | None = None, number: int = 8
) -> Simulated:
    """64 trials whose costs lie between 1 and 100, on `number` devices, with expectations off by a third."""
    random = np.random.default_rng(seed)
    steps = 0.05 * 100.0 ** random.random(64)
    off = np.exp(0.3 * random.standard_normal(64))
    rows = zip(steps, random.uniform(1, 4, 64), random.random(64), steps * off, strict=True)
    trials = [SimulatedTrial(*map(float, row)) for row in rows]
    devices = [Device(f"d{place}", slots, 16.0) for place in range(number)]
    rungs = (100, 300, 900)
    return Simulation(trials, devices, packing, rungs=rungs, slowdown=slowdown, lookahead=lookahead).run()


@pytest.mark.parametrize("lookahead", [None, 16])
def test_idle_time_of_trials_that_differ_a_hundredfold(lookahead: int | None) -> None:
    packed = [study(PACKED, 2, seed, 1.0, lookahead) for seed in range(4)]
    unpacked = [study(UNPACKED, 1, seed, 1.0, lookahead) for seed in range(4)]
    idle = float(np.mean([one.idle for one in packed]))
    assert idle < 0.10 and np.mean([one.idle for one in unpacked]) > 2.5 * idle
    for ours, theirs in zip(packed, unpacked, strict=True):
        # Nothing is left out, more trials get further, and the study takes little longer for it.
        assert ours.reached[0] == theirs.reached[0] == 64
        assert all(here >= there for here, there in zip(ours.reached, theirs.reached, strict=True))
        assert ours.seconds < 1.3 * theirs.seconds


def test_devices_that_trials_do_not_fill_give_more() -> None:
    """Where four trials slow each other by half only, sharing is worth more than idle time says."""
    packed, unpacked = study(PACKED, 4, 5, 0.5, number=2), study(UNPACKED, 1, 5, 0.5, number=2)
    assert packed.seconds < 0.8 * unpacked.seconds and packed.idle < 0.05 < unpacked.idle


def test_a_study_without_packing_is_a_schedule_of_its_own() -> None:
    """What the report says of a study without packing is what the scheduler would do."""
    random = np.random.default_rng(3)
    trials = [
        SimulatedTrial(float(step_s), 0.0, float(score), float(step_s)) for step_s, score in random.random((20, 2))
    ]
    packing = replace(UNPACKED, start_s=2.0)
    whole = Simulation(trials, TWO, packing, rungs=(10, 30, 90)).run()
    found = simulate_unpacked([(one.step_s, one.score) for one in trials], 2, 2.0, (10, 30, 90), 3)
    assert found.reached == whole.reached and found.reached[2] > 0
    assert (found.seconds, found.idle) == (pytest.approx(whole.seconds), pytest.approx(whole.idle))


def test_the_same_study_twice() -> None:
    assert study(PACKED, 4, 1, 1.0) == study(PACKED, 4, 1, 1.0)


def test_idle_time_by_hand() -> None:
    spans = [Span("a", 1.0, 4.0), Span("a", 3.0, 5.0), Span("b", 9.0, 99.0)]
    first, second = device_use([Window(("a", "b"), 0.0, 10.0)], spans)
    assert (first.busy_s, first.shared_s, first.idle, first.trials) == (4.0, 1.0, pytest.approx(0.6), 2)
    assert second.busy_s == 1.0 and idle_share([first, second]) == pytest.approx(0.75)
    # Two sessions: what lies between them is nobody's idle time.
    (twice,) = device_use([Window(("a",), 0.0, 2.0), Window(("a",), 4.0, 6.0)], spans)
    assert (twice.held_s, twice.busy_s) == (4.0, 2.0)
    assert write_busy_bars([Window(("a",), 0.0, 10.0)], spans, columns=10) == {"a": " ####     "}
