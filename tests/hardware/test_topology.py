"""Where groups lie: against groups that are counted one by one, and against rings known from documents."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from described import cube_mesh, infiniband, switched
from phalanx.hardware.machine import load_machine
from phalanx.hardware.topology import join_placements, place_groups


def nodes_of_groups(devices: int, size: int, stride: int, blocks: int) -> list[set[int]]:
    """The nodes of every group of `blocks` blocks of size * stride ranks, counted one by one."""
    return [
        {(block * size * stride + first + member * stride) // devices for member in range(size)}
        for block in range(blocks)
        for first in range(stride)
    ]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([2, 4, 6, 8]), st.integers(1, 24), st.integers(1, 24))
def test_nodes_are_those_of_the_worst_group(devices: int, size: int, stride: int) -> None:
    machine = switched(devices, network=infiniband(devices, devices, 25))
    blocks = math.lcm(size * stride, devices) // (size * stride)
    everywhere = nodes_of_groups(devices, size, stride, blocks)
    placed = place_groups(machine, size, stride)
    assert int(placed.nodes) == max(map(len, everywhere))
    assert int(placed.per_node) == -(-size // int(placed.nodes))
    alone = place_groups(machine, size, stride, world=size * stride)
    assert int(alone.nodes) == max(map(len, nodes_of_groups(devices, size, stride, 1)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=8))
def test_arrays_are_the_same_as_one_after_the_other(groups: list[tuple[int, int]]) -> None:
    machine = load_machine("frontier")
    sizes, strides = np.array(groups).T
    together = place_groups(machine, sizes, strides)
    single = join_placements([place_groups(machine, size, stride) for size, stride in groups])
    for field, value in vars(together).items():
        np.testing.assert_array_equal(value, getattr(single, field), err_msg=field)


def ring(machine_name: str, size: int, stride: int = 1) -> float:
    return float(place_groups(load_machine(machine_name), size, stride).ring_b_s) / 1e9


def test_rings_on_an_mi250x_node_are_those_that_rccl_lays() -> None:
    # Siblings have four links. RCCL's model 74 has the rings 0 1 5 4 6 7 3 2 and 7 6 0 1 3 2 4 5, each in both directions,
    # and each as wide as a single link.
    assert ring("frontier", 2) == 200
    assert ring("frontier", 8) == 4 * 50
    # Two modules are joined by two single links: a ring of 50 GB/s in each direction.
    assert ring("frontier", 4) == 100
    assert ring("frontier", 4, stride=2) == 100
    assert ring("frontier", 2, stride=2) == 50
    # Devices 0 and 4 have no link; the widest way between them is through another device.
    assert ring("frontier", 2, stride=4) == 50


def test_rings_on_a_full_mesh_use_only_the_links_among_the_members() -> None:
    assert [ring("mi300x", size) for size in (2, 4, 8)] == [64, 3 * 64, 7 * 64]
    assert [ring("dgx-h100", size) for size in (2, 4, 8)] == [450, 450, 450]


@pytest.mark.parametrize(("size", "links"), [(2, 1), (3, 2), (4, 4), (6, 2), (7, 4), (8, 6)])
def test_rings_on_a_cube_mesh_are_as_wide_as_measured_ones(size: int, links: int) -> None:
    """The rates that V100 reach with so many devices are 0.85 to 0.92 of this (`test_fit`)."""
    assert float(place_groups(cube_mesh(), size, 1, world=size).ring_b_s) == links * 25e9


def test_neighbours_have_the_widest_way_of_the_worst_pair() -> None:
    frontier = load_machine("frontier")
    pairs = place_groups(frontier, [2, 8, 2, 2], [1, 1, 2, 4]).pair_b_s / 1e9
    assert list(pairs) == [200, 50, 50, 50]
    assert float(place_groups(load_machine("mi300x"), 8, 1).pair_b_s) == 64e9


def test_all_groups_of_an_axis_share_the_interfaces() -> None:
    frontier = load_machine("frontier")
    # Whole nodes: all four interfaces. One member a node: eight groups share them, two an interface.
    groups = place_groups(frontier, [512, 64, 64, 128, 16], [1, 8, 64, 4, 2])
    assert list(groups.per_node) == [8, 1, 1, 2, 4]
    assert list(groups.nic_b_s / 1e9) == [100, 12.5, 12.5, 25, 50]
    assert list(groups.groups_per_nic) == [1, 2, 2, 2, 2]
    dgx = place_groups(load_machine("dgx-h100"), [64, 8], [1, 8])
    assert list(dgx.nic_b_s / 1e9) == [400, 50] and list(dgx.groups_per_nic) == [1, 1]
    # One interface for all eight devices.
    narrow = place_groups(switched(network=infiniband(8, 1, 25)), [16, 2], [1, 8])
    assert list(narrow.nic_b_s / 1e9) == [25, 3.125] and list(narrow.groups_per_nic) == [1, 8]


def test_one_member_a_node_sees_no_links_and_one_node_no_interface() -> None:
    groups = place_groups(load_machine("dgx-h100"), [4, 8, 1], [8, 1, 1])
    assert np.isinf(groups.ring_b_s[0]) and np.isinf(groups.pair_b_s[0]) and np.isfinite(groups.nic_b_s[0])
    assert np.isfinite(groups.ring_b_s[1]) and np.isinf(groups.nic_b_s[1]) and groups.groups_per_nic[1] == 0
    assert list(groups.multicast) == [False, True, False]


def test_tiers_slow_those_who_leave_them() -> None:
    tiers = "[{name: leaf, nodes: 4, taper: 0.5, latency_us: 1}, {name: hall, nodes: 16, taper: 0.25, latency_us: 2}]"
    machine = switched(network=infiniband(8, 8, 25, tiers))
    #                       in a leaf  rings over leaves  every step leaves  over halls  every step leaves a hall
    groups = place_groups(machine, [4 * 8, 16 * 8, 4, 64 * 8, 4], [1, 1, 4 * 8, 1, 16 * 8])
    assert list(groups.nodes) == [4, 16, 4, 64, 4]
    np.testing.assert_allclose(groups.hop_s, [0, 1e-6, 1e-6, 3e-6, 3e-6])
    # Of four neighbouring nodes of a leaf one sends out of it, and half the leaf's bandwidth is enough for that.
    assert list(groups.ring_taper) == [1, 1, 0.5, 1, 0.25]
    assert list(groups.all_taper) == [1, 0.5, 0.5, 0.25, 0.25]
