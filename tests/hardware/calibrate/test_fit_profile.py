"""From measurements to a profile: what a device with known constants would have measured gives these constants back."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import cast

import numpy as np
import pytest

from phalanx.hardware.calibrate.fit_profile import profile_of
from phalanx.hardware.calibrate.measure_machine import Measurements, join_measurements
from phalanx.hardware.calibrate.measured_sizes import ACCELERATOR, Effort, Product, setting_of, shapes_for
from phalanx.hardware.calibrate.time_exchanges import Beside, Exchanged, HostExchanges
from phalanx.hardware.calibrate.time_operations import Passed, TimedBlock
from phalanx.hardware.collectives import COLLECTIVES, Constants, default_constants
from phalanx.hardware.machine import load_machine
from phalanx.hardware.topology import place_groups
from phalanx.planner.time.framework import COMPILED
from phalanx.planner.time.operation_time import Direction, Form, OperationTable, PartBreakdown, compute_seconds
from phalanx.planner.time.part_time import part_times, parts_of
from phalanx.planner.time.profile import Profile, default_profile
from phalanx.planner.time.timed_operations import Kind, TimedOperation
from phalanx.planner.trace.operations import Attention

MACHINE = load_machine("h200-x4")
TRUE = default_profile("H200").profile.scaled(
    {
        "matmul_flop_s": 1.1,
        "matmul64_flop_s": 0.7,
        "matmul8_flop_s": 0.8,
        "matmul_edge": 2.0,
        "attention_flop_s": 0.8,
        "memory_b_s": 0.9,
        "eager_share": 0.8,
        "kernel_s": 1.5,
    }
)
LINKS = replace(default_constants(MACHINE), launch_s=2e-5, efficiency=0.7)
EFFORT = replace(ACCELERATOR, matmuls=40, singles=4, doubles=3, eighths=5, attentions=4, blocks=ACCELERATOR.blocks[:3])


def _wobble(number: int) -> float:
    """Up to 3% to either side: what kernels differ by from shape to shape."""
    return 1.0 + 0.03 * float(np.sin(12.9 * number))


def _operations(profile: Profile, effort: Effort = EFFORT) -> list[TimedOperation]:
    shapes = shapes_for(effort, 1e11)
    start = (0, Direction.FORWARD, PartBreakdown.MATMUL)
    rows: list[tuple[tuple[float, ...], TimedOperation]] = []

    def add(kind: str, width: int, products: tuple[Product, ...]) -> None:
        for x in (one.sizes for one in products):
            traffic = width * x.batch * (x.m * x.n + x.m * x.k + x.n * x.k)
            row = (*start, Form.PRODUCT, False, x.batch, x.m, x.n, x.k, x.flops, traffic, width)
            rows.append((row, TimedOperation(cast(Kind, kind), x.batch, x.m, x.n, x.k, 0.0)))

    add("matmul", 2, shapes.products)
    add("matmul32", 4, shapes.singles)
    for y in shapes.attentions:
        sizes = (y.samples * y.heads, y.queries, y.keys, y.head_size)
        for backward in (False, True):
            form = Form.ATTENTION_BACKWARD if backward else Form.ATTENTION
            row = (*start, form, False, *sizes, replace(y, backward=backward).flops, 0.0, 2)
            kind = ("" if y.causal else "whole_") + "attention" + ("_backward" if backward else "")
            rows.append((row, TimedOperation(cast(Kind, kind), *sizes, 0.0)))
    add("matmul64", 8, shapes.doubles)
    add("matmul8", 1, shapes.eighths)
    seconds = compute_seconds(OperationTable.of([row for row, _ in rows]), profile).tolist()
    return [replace(x, seconds=s * _wobble(n)) for n, ((_, x), s) in enumerate(zip(rows, seconds, strict=True))]


def _blocks(profile: Profile, links: Constants, *, compiled: bool) -> list[TimedBlock]:
    wanted = [
        ("block", replace(setting_of(w, length), compile=compiled), samples) for w, length, samples in EFFORT.blocks
    ]
    times = part_times(parts_of(wanted, COMPILED), MACHINE, links, profile).seconds.sum(axis=2)  # type: ignore[arg-type]
    pairs = zip(EFFORT.blocks, times.tolist(), strict=True)
    return [
        TimedBlock(*block, compiled=compiled, forward_s=forward, backward_s=backward)
        for block, (forward, backward) in pairs
    ]


def _measured(profile: Profile, links: Constants) -> Measurements:
    exchanged = [
        Exchanged(name, size, members, float(collective(size, place_groups(MACHINE, members, 1), links)))
        for name, collective in COLLECTIVES.items()
        if name != "broadcast"
        for size in EFFORT.exchanged
        for members in (2, 4)
    ]
    copied = [Exchanged("copies", size, 4, 3e-5 + size * 0.75 / 300e9) for size in EFFORT.copied]
    return Measurements(
        operations=tuple(_operations(profile)),
        traffic=tuple(Passed(x, x / profile.memory_b_s + profile.kernel_s) for x in EFFORT.traffic),
        optimizer=tuple(Passed(28 * n, 1e-5 + 28 * n / 2.5e12) for n in EFFORT.optimizer),
        host_s=6e-6,
        exchanged=(*exchanged, *copied),
        collectives_beside=Beside(products=20e-3, exchange=5e-3, both=21e-3),
        copies_beside=Beside(products=20e-3, exchange=5e-3, both=20.1e-3),
        blocks=tuple(_blocks(replace(profile, host_s=6e-6), links, compiled=True)),
        eager_blocks=tuple(_blocks(replace(profile, host_s=6e-6), links, compiled=False)),
        beside={"context": 6e8, "communicator": 1e8},
    )


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return _measured(TRUE, LINKS)


def test_the_constants_that_made_the_measurements_come_back(measured: Measurements) -> None:
    found = profile_of(measured, MACHINE, "measured")
    profile = found.named.profile
    for name in ("matmul_flop_s", "memory_b_s"):
        assert getattr(profile, name) == pytest.approx(getattr(TRUE, name), rel=0.03), name
    assert profile.eager_share == pytest.approx(TRUE.eager_share, rel=0.05)
    # Few lengths are timed: rate and length share out what they say of both.
    for name in ("attention_flop_s", "attention_backward_flop_s"):
        assert getattr(profile, name) == pytest.approx(getattr(TRUE, name), rel=0.08), name
    assert profile.matmul32_flop_s == pytest.approx(TRUE.matmul32_flop_s, rel=0.05)
    assert profile.matmul64_flop_s == pytest.approx(TRUE.matmul64_flop_s, rel=0.05)
    assert profile.matmul8_flop_s == pytest.approx(TRUE.matmul8_flop_s, rel=0.05)
    assert profile.optimizer_b_s == pytest.approx(2.5e12, rel=0.01)
    assert profile.copy_share == pytest.approx(300 / 450, rel=0.05)
    assert (profile.slowdown, profile.copy_slowdown) == (pytest.approx(0.2), pytest.approx(0.02))
    assert found.named.collectives is not None
    assert found.named.collectives.efficiency == pytest.approx(LINKS.efficiency, rel=0.03)
    assert np.abs(found.exchanged).max() < 0.05
    assert found.named.beside == {"context": 6e8, "communicator": 1e8}


@pytest.mark.parametrize("area", [0.0, 4e3, 3e4])
def test_how_many_rows_keep_attention_busy_comes_back(measured: Measurements, area: float) -> None:
    # As many shapes as accelerators time: of fewer, lengths and rows say the same.
    true = replace(TRUE, attention_area=area)
    operations = tuple(_operations(true, replace(EFFORT, attentions=ACCELERATOR.attentions)))
    found = profile_of(replace(measured, operations=operations, blocks=()), MACHINE, "measured")
    assert found.named.profile.attention_area == pytest.approx(area, rel=0.15, abs=600)
    assert np.abs(found.operations).max() < 0.06


def test_shapes_that_are_faster_or_slower_than_the_curve_are_predicted_as_they_were_timed(
    measured: Measurements,
) -> None:
    found = profile_of(replace(measured, blocks=()), MACHINE, "measured")
    wobbled = [abs(x.ratio - 1) for x in found.named.profile.measured]
    assert max(wobbled) > 0.02
    assert len(found.named.profile.measured) == len(measured.operations)


def test_whole_attention_is_no_error_of_the_curves_that_it_does_not_have(measured: Measurements) -> None:
    slower = [replace(x, seconds=3 * x.seconds) if x.kind.startswith("whole") else x for x in measured.operations]
    found = profile_of(replace(measured, operations=tuple(slower), blocks=()), MACHINE, "measured")
    assert 0 < len(found.operations) == sum(not x.kind.startswith("whole") for x in slower)
    assert np.abs(found.operations).max() < 0.1


def test_whole_attention_is_predicted_as_it_was_timed_and_causal_attention_as_before(measured: Measurements) -> None:
    slower = [replace(x, seconds=1.2 * x.seconds) if x.kind.startswith("whole") else x for x in measured.operations]
    profiles = [
        profile_of(replace(measured, operations=tuple(x), blocks=()), MACHINE, "measured").named.profile
        for x in (measured.operations, slower)
    ]
    calls = [
        Attention(8, 16, 16, 2048, 2048, size, causal=causal, backward=backward)
        for size, causal, backward in product((192, 128), (True, False), (True, False))
    ]
    start = (0, Direction.FORWARD, PartBreakdown.ATTENTION)
    rows = []
    for x in calls:
        form = Form.ATTENTION_BACKWARD if x.backward else Form.ATTENTION
        rows.append((*start, form, False, x.samples * x.heads, x.queries, x.keys, x.head_size, x.flops, 0.0, 2))
    before, after = (compute_seconds(OperationTable.of(rows), profile) for profile in profiles)
    for x, ratio in zip(calls, (after / before).tolist(), strict=True):
        # 128 lies between sizes of heads that were timed, and is taken to be like them.
        assert ratio == pytest.approx(1.0 if x.causal else 1.2, rel=1e-9 if x.causal else 0.05), x


def test_blocks_decide_where_they_differ_from_their_operations(measured: Measurements) -> None:
    def slower(factor: float) -> Measurements:
        blocks = [replace(x, forward_s=x.forward_s * factor, backward_s=x.backward_s * factor) for x in measured.blocks]
        return replace(measured, blocks=tuple(blocks))

    found = {factor: profile_of(slower(factor), MACHINE, "measured") for factor in (1.0, 1.06)}
    for one in found.values():
        assert one.named.fitted is not None and one.named.fitted["held_out_median_error"] < 0.03
        assert len(one.blocks) == len(EFFORT.blocks) and np.abs(one.blocks).max() < 0.05
    rates = [found[factor].named.profile.matmul_flop_s for factor in (1.0, 1.06)]
    assert 1.02 < rates[0] / rates[1] < 1.08


def test_what_the_host_does_for_exchanges_is_taken_as_it_was_timed(measured: Measurements) -> None:
    assert profile_of(measured, MACHINE, "measured").named.profile.shard_host_s == TRUE.shard_host_s
    timed = replace(measured, host_exchanges=HostExchanges(exchange_s=3e-4, shard_s=5e-5))
    found = profile_of(timed, MACHINE, "measured").named.profile
    assert (found.exchange_host_s, found.shard_host_s) == (3e-4, 5e-5)


def test_one_rank_alone_leaves_the_links_as_they_are_by_default(measured: Measurements) -> None:
    alone = replace(measured, exchanged=(), collectives_beside=None, copies_beside=None)
    named = profile_of(alone, MACHINE, "measured").named
    assert named.collectives is None
    assert named.collectives_on(MACHINE) == default_constants(MACHINE)
    assert named.profile.link_share == default_profile("H200").profile.link_share


def test_a_device_that_nothing_is_known_of_gets_a_profile_too(measured: Measurements) -> None:
    node = MACHINE.node.model_copy(update={"device": "Unheard Of"})
    named = profile_of(measured, MACHINE.model_copy(update={"node": node}), "measured").named
    assert named.device == "Unheard Of"
    assert named.profile.matmul_flop_s == pytest.approx(TRUE.matmul_flop_s, rel=0.05)


def test_all_ranks_go_at_the_pace_of_the_slowest(measured: Measurements) -> None:
    def rank(factor: float) -> Measurements:
        def slower(x: TimedOperation) -> TimedOperation:
            return replace(x, seconds=x.seconds * factor)

        blocks = [replace(x, forward_s=x.forward_s * factor) for x in measured.blocks]
        return replace(measured, operations=tuple(map(slower, measured.operations)), blocks=tuple(blocks))

    together = join_measurements([rank(factor) for factor in (1.0, 1.0, 1.1)])
    pairs = list(zip(together.operations, measured.operations, strict=True))
    assert all(slow.seconds == pytest.approx(1.1 * fast.seconds) for slow, fast in pairs)
    assert together.blocks[0].forward_s == pytest.approx(1.1 * measured.blocks[0].forward_s)
    assert together.traffic == measured.traffic
