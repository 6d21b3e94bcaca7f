"""Placement of groups of ranks on a machine, and the bandwidth it leaves them. This module knows nothing of layouts.

Ranks fill node after node. The groups of one mesh axis have `size` members each, `stride` ranks apart, and all communicate
at the same time, so they share the network interfaces of their nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError
from phalanx.hardware.interconnect import Links, Network
from phalanx.hardware.machine import Machine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Groups on a machine; every field is an array of one common shape, with one entry for each (size, stride).

    Where the groups of an axis lie differently (3 ranks on nodes of 8), the entry is that of the worst group. Rates are
    nominal, in bytes per second in one direction.
    """

    size: Ints
    """Members of a group."""
    per_node: Ints
    """Members on one node."""
    nodes: Ints
    """Nodes on which a group has members."""
    ring_b_s: Floats
    """Rate at which each member sends and receives around the group's rings within a node; infinite with one member
    there."""
    pair_b_s: Floats
    """Rate from a member to the next one on its node, over the widest path; infinite with one member there."""
    multicast: npt.NDArray[np.bool_]
    """Whether the group lies on one node whose switches reduce by themselves."""
    nic_b_s: Floats
    """A group's share of the interfaces of one node, which all groups of the axis use; infinite on one node."""
    groups_per_nic: Ints
    """Groups of the axis that send through the same interface at once; 0 on one node."""
    ring_taper: Floats
    """Share of `nic_b_s` that the tiers above the node leave to members which talk to their neighbours."""
    all_taper: Floats
    """Share of `nic_b_s` that the tiers leave where every member talks to all others."""
    hop_s: Floats
    """Latency that the tiers add to each step between nodes, seconds."""


def place_groups(machine: Machine, size: npt.ArrayLike, stride: npt.ArrayLike, world: int | None = None) -> Placement:
    """Return the placement of groups of `size` ranks, `stride` ranks apart, on `machine`.

    size, stride: positive whole numbers, or arrays of them that broadcast. world: ranks of the job; by default so many that
    every alignment of a group with its nodes occurs. Raises ConfigError where a group needs links or a network that the
    description does not have.
    """
    sizes, strides = np.broadcast_arrays(np.asarray(size, np.int64), np.asarray(stride, np.int64))
    assert np.all(sizes >= 1) and np.all(strides >= 1)
    assert world is None or np.all(sizes * strides <= world)
    devices = machine.node.devices
    # Groups start every size * stride ranks, with `stride` of them interleaved. The worst group is the one whose
    # first member lies farthest into its node: it touches the most nodes.
    grid = np.gcd(sizes * strides, devices)
    first = np.where(strides >= grid, devices - 1, devices - grid)
    if world is not None:
        first = np.where(sizes * strides * 2 > world, np.minimum(strides, devices) - 1, first)
    span = (first + (sizes - 1) * strides) // devices + 1
    nodes = np.where(strides >= devices, sizes, np.minimum(span, sizes))
    per_node = -(-sizes // nodes)
    inside = np.where(per_node > 1, strides, 1)
    used = devices if world is None else min(devices, world)
    ring, pair, nic, sharing = _pattern_rates(machine, per_node, inside, used)
    # Infinite rates and no latency where nothing is sent: such terms then drop out of every formula.
    across, single = nodes > 1, per_node == 1
    if machine.network is None and np.any(across):
        worst = int(np.argmax(across.ravel()))
        raise ConfigError(
            f"{machine.name} describes no network between nodes: a group of {sizes.ravel()[worst]} ranks, "
            f"{strides.ravel()[worst]} apart, needs {nodes.ravel()[worst]} nodes of {devices} devices"
        )
    ring_taper, all_taper, hop = _tier_effects(machine.network, np.maximum(strides / devices, 1.0), span)
    multicast = machine.links is not None and machine.links.switch is not None and machine.links.switch.multicast
    return Placement(
        size=sizes,
        per_node=per_node,
        nodes=nodes,
        ring_b_s=np.where(single, np.inf, ring),
        pair_b_s=np.where(single, np.inf, pair),
        multicast=multicast & ~across & ~single,
        nic_b_s=np.where(across, nic, np.inf),
        groups_per_nic=np.where(across, sharing, 0),
        ring_taper=np.where(across, ring_taper, 1.0),
        all_taper=np.where(across, all_taper, 1.0),
        hop_s=np.where(across, hop, 0.0),
    )


def join_placements(placements: list[Placement]) -> Placement:
    """Return `placements` concatenated into one placement of one dimension."""
    return Placement(
        **{
            field.name: np.concatenate([np.atleast_1d(getattr(one, field.name)).ravel() for one in placements])
            for field in fields(Placement)
        }
    )


def _pattern_rates(machine: Machine, members: Ints, stride: Ints, devices: int) -> tuple[Floats, Floats, Floats, Ints]:
    """Return ring rate, pair rate, interface rate (B/s) and groups per interface for `members` on a node, `stride` apart.

    devices: of the node that take part.
    """
    # The planner places a million groups at once, of few distinct patterns: each is computed once. One key holds
    # both numbers.
    base = int(stride.max()) + 1
    patterns, which = np.unique((members * base + stride).ravel(), return_inverse=True)
    rates = np.zeros((len(patterns), 4))
    for row, (count, step) in enumerate(divmod(int(pattern), base) for pattern in patterns):
        starts = (block + first for block in range(0, devices, count * step) for first in range(step))
        groups = [group for start in starts if (group := range(start, start + count * step, step))[-1] < devices]
        if count > 1:
            if machine.links is None:
                raise ConfigError(
                    f"{machine.name} describes no links within a node, over which {count} ranks would talk"
                )
            rates[row, 0] = min(_ring_rate(machine.links, tuple(group)) for group in groups)
            rates[row, 1] = min(
                _widest_paths(machine.links)[a, b] if machine.links.mesh else _switch_rate(machine.links)
                for group in groups
                for a, b in itertools.pairwise(group)
            )
        if machine.network is not None:
            # Each device has its part of the interfaces that it shares with others.
            share: dict[int, float] = {}
            for nic in machine.network.nics:
                for device in nic.devices:
                    share[device] = share.get(device, 0.0) + nic.gb_s * 1e9 / len(nic.devices)
            sharing = max(
                sum(any(device in nic.devices for device in group) for group in groups) for nic in machine.network.nics
            )
            rates[row, 2:] = min(sum(share[device] for device in group) for group in groups), sharing
    found = rates[which.reshape(members.shape)]
    return found[..., 0], found[..., 1], found[..., 2], found[..., 3].astype(np.int64)


def _switch_rate(links: Links) -> float:
    assert links.switch is not None
    return links.switch.gb_s * 1e9


@cache
def _ring_rate(links: Links, group: tuple[int, ...]) -> float:
    """Return the B/s that each device of `group` sends around rings, laid as collective libraries lay them."""
    if links.mesh is None:
        return _switch_rate(links)
    members = np.array(group)
    capacity = _link_capacity(links)[np.ix_(members, members)]
    apart = ~np.eye(len(group), dtype=bool)
    if capacity[0, 1] > 0 and np.all(capacity[apart] == capacity[0, 1]):
        # In a fully connected group, rings over all links together use each link in both directions.
        return float(capacity[0, 1]) * (len(group) - 1)
    rate = _lay_rings(capacity)
    if not rate:
        # Devices without a link of their own reach one another through devices between them.
        rate = _lay_rings(np.where(capacity > 0, capacity, _widest_paths(links)[np.ix_(members, members)]))
    return rate


def _lay_rings(capacity: Floats) -> float:
    """Return the summed B/s of rings laid one by one until no ring is left, each as wide as its narrowest link.

    capacity: [devices, devices] B/s.
    """
    count = len(capacity)
    rings = np.array([(0, *rest) for rest in itertools.permutations(range(1, count))])
    following = np.roll(rings, -1, axis=1)
    left, total = capacity.copy(), 0.0
    while (width := (links := left[rings, following]).min(axis=1)).max() > 0:
        # Greedy: the widest ring first, and of equally wide rings the one over the widest links.
        widest = np.flatnonzero(width == width.max())
        best = widest[np.argmin((1 / links[widest]).sum(axis=1))]
        left[rings[best], following[best]] -= width[best]
        total += float(width[best])
    return total


@cache
def _link_capacity(links: Links) -> Floats:
    """Return the B/s of direct links, [devices, devices]."""
    assert links.mesh is not None
    return np.array(links.mesh.links) * (links.mesh.gb_s * 1e9)


@cache
def _widest_paths(links: Links) -> Floats:
    """Return the B/s of the widest path between each two devices, [devices, devices]; a direct link always counts as it."""
    width = _link_capacity(links).copy()
    # Floyd-Warshall, where the width of a path is that of its narrowest link.
    for between in range(len(width)):
        width = np.maximum(width, np.minimum(width[:, between, None], width[None, between, :]))
    direct = _link_capacity(links)
    return np.where(direct > 0, direct, width)


def _tier_effects(network: Network | None, step: Floats, span: Ints) -> tuple[Floats, Floats, Floats]:
    """Return (taper of rings, taper of all-to-all, added seconds per step) for members `step` nodes apart over
    `span` nodes."""
    ring, everywhere, hop = np.ones(span.shape), np.ones(span.shape), np.zeros(span.shape)
    for tier in network.tiers if network is not None else ():
        leaves = span > tier.nodes
        # In a ring only the last member within a group of the tier sends out of it, with the share of all of them.
        shared = np.minimum(1.0, tier.taper * np.maximum(tier.nodes / step, 1.0))
        ring = np.where(leaves, np.minimum(ring, shared), ring)
        everywhere = np.where(leaves, np.minimum(everywhere, tier.taper), everywhere)
        hop = np.where(leaves, hop + tier.latency_us * 1e-6, hop)
    return ring, everywhere, hop
