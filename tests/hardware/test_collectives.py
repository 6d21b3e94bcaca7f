"""Times of collectives: what must hold for any of them, and published figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from described import infiniband, switched
from phalanx.hardware.collectives import (
    COLLECTIVES,
    Constants,
    all_gather,
    all_reduce,
    all_to_all,
    bus_bandwidth,
    default_constants,
    reduce_scatter,
    send,
)
from phalanx.hardware.machine import described_names, load_machine
from phalanx.hardware.topology import Placement, place_groups

MIB, GIB = 2.0**20, 2.0**30
NETWORKED = [name for name in described_names() if load_machine(name).network is not None]


def placed(name: str, size: int, stride: int = 1) -> tuple[Placement, Constants]:
    machine = load_machine(name)
    return place_groups(machine, size, stride), default_constants(machine)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NETWORKED),
    st.sampled_from(sorted(COLLECTIVES)),
    st.integers(1, 600),
    st.sampled_from([1, 2, 4, 8, 16, 24]),
    st.floats(0, 1e11),
    st.floats(0, 1e11),
)
def test_more_bytes_never_take_less(
    name: str, collective: str, size: int, stride: int, one: float, other: float
) -> None:
    group, constants = placed(name, size, stride)
    less, more = COLLECTIVES[collective](sorted([one, other]), group, constants)
    assert 0 <= less <= more < np.inf


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_more_members_on_a_switch_never_take_less(collective: str, multicast: bool) -> None:
    machine = switched(multicast=multicast, network=infiniband(8, 8, 25, "[{name: leaf, nodes: 16, taper: 0.5}]"))
    constants = replace(default_constants(machine), multicast=0.6)
    sizes = np.array([1, 2, 4, 8, 16, 32, 64, 128, 1024, 8192])
    for stride in (1, 8):
        for data in (1e3, 1e6, 1e9):
            times = COLLECTIVES[collective](data, place_groups(machine, sizes, stride), constants)
            assert times[0] == 0 and np.all(np.diff(times) >= 0) and np.all(times[1:] >= constants.launch_s)


def test_one_member_and_no_bytes_take_no_time() -> None:
    for function in COLLECTIVES.values():
        for name in NETWORKED:
            group, constants = placed(name, 1)
            assert function(GIB, group, constants) == 0
            group, constants = placed(name, 16)
            assert function(0, group, constants) == 0


def test_bytes_and_groups_broadcast() -> None:
    machine = load_machine("frontier")
    groups, constants = place_groups(machine, [2, 8, 64], [1, 1, 8]), default_constants(machine)
    data = np.array([[MIB], [GIB]])
    for function in COLLECTIVES.values():
        times = function(data, groups, constants)
        assert times.shape == (2, 3) and times.dtype == np.float64
        for row, column in np.ndindex(2, 3):
            size, stride = [(2, 1), (8, 1), (64, 8)][column]
            assert times[row, column] == function(data[row, 0], place_groups(machine, size, stride), constants)


@pytest.mark.parametrize(("name", "size", "stride"), [("selene", 8, 1), ("selene", 64, 8), ("frontier", 8, 1)])
def test_a_gather_and_a_scatter_are_a_ring_all_reduce(name: str, size: int, stride: int) -> None:
    group, constants = placed(name, size, stride)
    constants = replace(constants, tree=1e-3)
    data = np.array([64 * MIB, GIB])
    halves = all_gather(data, group, constants) + reduce_scatter(data, group, constants)
    whole = all_reduce(data, group, constants)
    # Two launches in place of one.
    np.testing.assert_allclose(halves - constants.launch_s, whole, rtol=1e-9)


def test_members_on_a_switch_that_reduces_send_each_byte_once() -> None:
    group, constants = placed("dgx-h100", 8)
    assert all_reduce(GIB, group, constants) < all_reduce(GIB, group, replace(constants, multicast=0.0))
    assert all_gather(GIB, group, constants) == all_gather(GIB, group, replace(constants, multicast=0.0))
    across, _ = placed("dgx-h100", 16)
    assert all_reduce(GIB, across, constants) == all_reduce(GIB, across, replace(constants, multicast=0.0))


def test_all_reduce_takes_the_tree_where_latency_counts() -> None:
    group, constants = placed("selene", 1024, 8)
    levels = 2 * 10 * (constants.step_across_s + 1e-6)
    assert all_reduce(8, group, constants) == pytest.approx(constants.launch_s + levels, rel=0.01)
    # A ring would have 2046 steps.
    assert all_gather(8, group, constants) > 1023 * constants.step_across_s


def test_sends_go_over_links_in_a_node_and_over_interfaces_between_nodes() -> None:
    inside, constants = placed("dgx-h100", 8)
    assert send(GIB, inside, constants) == pytest.approx(GIB / (450e9 * constants.efficiency), rel=0.03)
    across, _ = placed("dgx-h100", 4, 8)
    assert send(GIB, across, constants) == pytest.approx(GIB / (50e9 * constants.efficiency_across), rel=0.01)
    # On Frontier two devices share an interface.
    frontier, constants = placed("frontier", 4, 8)
    assert send(GIB, frontier, constants) == pytest.approx(GIB / (12.5e9 * constants.efficiency_across), rel=0.01)


def test_sharing_an_interface_divides_its_rate() -> None:
    alone, shared = (switched(network=infiniband(8, nics, 25)) for nics in (8, 2))
    constants = default_constants(alone)
    for function in COLLECTIVES.values():
        fast, slow = (function(8 * GIB, place_groups(machine, 16, 8), constants) for machine in (alone, shared))
        assert slow == pytest.approx(4 * fast, rel=0.01)


def test_a_sparse_group_never_sees_the_links_in_a_node() -> None:
    group, constants = placed("selene", 64, 8)
    slow_links = replace(constants, efficiency=constants.efficiency / 1000, step_s=1.0)
    for function in COLLECTIVES.values():
        assert function(GIB, group, slow_links) == function(GIB, group, constants)


def test_tapers_slow_rings_that_leave_with_every_step_and_every_all_to_all() -> None:
    tapered, full = (
        switched(network=infiniband(8, 8, 25, f"[{{name: leaf, nodes: 4, taper: {taper}}}]")) for taper in (0.5, 1.0)
    )
    constants = default_constants(full)
    for name, function in COLLECTIVES.items():
        leaving = [function(64 * GIB, place_groups(machine, 4, 32), constants) for machine in (tapered, full)]
        assert leaving[0] == pytest.approx(2 * leaving[1], rel=0.01), name
        around = [function(64 * GIB, place_groups(machine, 128, 1), constants) for machine in (tapered, full)]
        assert around[0] == pytest.approx((2 if name == "all_to_all" else 1) * around[1], rel=0.01), name


def test_all_to_all_is_not_a_gather() -> None:
    """Over nodes almost everything of an all-to-all leaves the node, from every member; of a gather once for the node."""
    group, constants = placed("dgx-h100", 64)
    away = 56 / 64 * GIB / (50e9 * constants.efficiency_across)
    assert all_to_all(GIB, group, constants) == pytest.approx(away, rel=0.1)
    assert all_to_all(GIB, group, constants) > 5 * all_gather(GIB, group, constants)


def bus_gb_s(name: str, collective: str, size: int, data: float, stride: int = 1) -> float:
    group, constants = placed(name, size, stride)
    seconds = COLLECTIVES[collective](data, group, constants)
    return float(bus_bandwidth(collective, data, size, seconds)) / 1e9


def test_published_rates_of_a100() -> None:
    assert bus_gb_s("selene", "all_reduce", 8, GIB) == pytest.approx(229, rel=0.05)
    assert bus_gb_s("selene", "all_reduce", 8, 8 * MIB) == pytest.approx(109, rel=0.1)
    assert bus_gb_s("selene", "all_reduce", 8, MIB) == pytest.approx(20, rel=0.25)


@pytest.mark.parametrize(("mib", "reduce", "gather"), [(1, 19, 13), (16, 174, 134), (128, 283, 258), (1024, 347, 314)])
def test_measured_rates_of_four_h200_without_multicast(mib: int, reduce: float, gather: float) -> None:
    assert bus_gb_s("h200-x4", "all_reduce", 4, mib * MIB) == pytest.approx(reduce, rel=0.15)
    assert bus_gb_s("h200-x4", "all_gather", 4, mib * MIB) == pytest.approx(gather, rel=0.15)


def test_published_rates_of_h100() -> None:
    # NVIDIA/nccl-tests issue 290: 476 GB/s for large messages on a node whose switches reduce.
    assert bus_gb_s("dgx-h100", "all_reduce", 8, 8 * GIB) == pytest.approx(476, rel=0.05)
    # Issue 232: one H100 on each of two nodes, over one interface of 50 GB/s; microseconds for 2 to 32 MiB.
    group, constants = placed("dgx-h100", 2, 8)
    seconds = all_reduce(np.array([2, 4, 8, 16, 32]) * MIB, group, constants)
    np.testing.assert_allclose(seconds * 1e6, [113.2, 154.4, 231.4, 420.5, 812.3], rtol=0.12)


@pytest.mark.parametrize(("nodes", "gib", "measured"), [(2, 8, 91), (3, 0.125, 96), (2, 4, 86)])
def test_published_rates_between_nodes_of_a100(nodes: int, gib: float, measured: float) -> None:
    """NVIDIA/nccl-tests issues 100, 119 and 175: 8 A100 and 4 interfaces of 25 GB/s a node."""
    machine = switched(network=infiniband(8, 4, 25))
    size = 8 * nodes
    seconds = all_reduce(gib * GIB, place_groups(machine, size, 1), default_constants(machine))
    assert float(bus_bandwidth("all_reduce", gib * GIB, size, seconds)) / 1e9 == pytest.approx(measured, rel=0.15)


def test_rates_on_xgmi_stay_below_what_rccl_counts_for_a_link() -> None:
    # 36 of the 50 GB/s of a link of an MI250X, 48 of the 64 of an MI300X (ROCm/rccl src/graph/topo.h).
    for name, size, links, rate in (
        ("frontier", 2, 4, 36),
        ("frontier", 8, 4, 36),
        ("mi300x", 2, 1, 48),
        ("mi300x", 8, 7, 48),
    ):
        assert 0.8 * links * rate < bus_gb_s(name, "all_reduce", size, GIB) < links * rate
