"""Where the ranks of a group lie on a machine, and which bandwidth that leaves them. Knows nothing of layouts.

Ranks fill node after node. The groups of one axis of a mesh have `size` members each, `stride` ranks apart, and all talk at
the same time: they share the network interfaces of their nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError
from phalanx.hardware.machine import Machine
from phalanx.hardware.network import Links, Network

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Groups on a machine; every field is an array of one common shape, with one entry for each (size, stride).

    Where the groups of an axis lie differently (3 ranks on nodes of 8), it is the worst of them. Rates are nominal, in bytes
    a second and one direction.
    """

    size: Ints
    """Members of a group."""
    per_node: Ints
    """Members on one node."""
    nodes: Ints
    """Nodes that a group has members on."""
    ring_b_s: Floats
    """What each member can send, and receive, around rings of its group within a node; infinite with one member there."""
    pair_b_s: Floats
    """What a member can send to the next one on its node, over the widest way; infinite with one member there."""
    multicast: npt.NDArray[np.bool_]
    """Whether the group lies on one node whose switches reduce by themselves."""
    nic_b_s: Floats
    """A group's part of the interfaces of one node, shared with the other groups; infinite on one node."""
    groups_per_nic: Ints
    """Groups of the axis that send through the same interface at once; 0 on one node."""
    ring_taper: Floats
    """What the tiers above the node leave of `nic_b_s` where every member talks to its neighbours."""
    all_taper: Floats
    """The same where every member talks to all others."""
    hop_s: Floats
    """What the tiers add to each step between nodes, seconds."""


def place(machine: Machine, size: npt.ArrayLike, stride: npt.ArrayLike, world: int | None = None) -> Placement:
    """Where groups of `size` ranks, `stride` ranks apart, lie on `machine`.

    size, stride: positive whole numbers or arrays of them that broadcast. world: ranks of the job; without it, as many as
    make every case happen. Raises ConfigError where a group needs links or a network that the description does not have.
    """
    sizes, strides = np.broadcast_arrays(np.asarray(size, np.int64), np.asarray(stride, np.int64))
    assert np.all(sizes >= 1) and np.all(strides >= 1)
    assert world is None or np.all(sizes * strides <= world)
    devices = machine.node.devices
    # Groups follow one another every size * stride ranks, with `stride` of them interleaved. The farthest into its node that
    # a first member can be decides how many nodes the worst group touches.
    grid = np.gcd(sizes * strides, devices)
    first = np.where(strides >= grid, devices - 1, devices - grid)
    if world is not None:
        first = np.where(sizes * strides * 2 > world, np.minimum(strides, devices) - 1, first)
    span = (first + (sizes - 1) * strides) // devices + 1
    nodes = np.where(strides >= devices, sizes, np.minimum(span, sizes))
    per_node = -(-sizes // nodes)
    inside = np.where(per_node > 1, strides, 1)
    used = devices if world is None else min(devices, world)
    ring, pair, nic, sharing = _patterns(machine, per_node, inside, used)
    many, one = nodes > 1, per_node == 1
    if machine.network is None and np.any(many):
        worst = int(np.argmax(many.ravel()))
        raise ConfigError(
            f"{machine.name} describes no network between nodes: a group of {sizes.ravel()[worst]} ranks, "
            f"{strides.ravel()[worst]} apart, needs {nodes.ravel()[worst]} nodes of {devices} devices"
        )
    ring_taper, all_taper, hop = _tiers(machine.network, np.maximum(strides / devices, 1.0), span)
    multicast = machine.links is not None and machine.links.switch is not None and machine.links.switch.multicast
    return Placement(
        size=sizes,
        per_node=per_node,
        nodes=nodes,
        ring_b_s=np.where(one, np.inf, ring),
        pair_b_s=np.where(one, np.inf, pair),
        multicast=multicast & ~many & ~one,
        nic_b_s=np.where(many, nic, np.inf),
        groups_per_nic=np.where(many, sharing, 0),
        ring_taper=np.where(many, ring_taper, 1.0),
        all_taper=np.where(many, all_taper, 1.0),
        hop_s=np.where(many, hop, 0.0),
    )


def join(placements: list[Placement]) -> Placement:
    """Several placements one after the other, as one of one dimension."""
    return Placement(
        **{
            field.name: np.concatenate([np.atleast_1d(getattr(one, field.name)).ravel() for one in placements])
            for field in fields(Placement)
        }
    )


def _patterns(machine: Machine, members: Ints, stride: Ints, devices: int) -> tuple[Floats, Floats, Floats, Ints]:
    """(ring rate, pair rate, interface rate, groups an interface) of each pattern of members on `devices` of a node."""
    # One number for both, as searches place a million groups at once.
    base = int(stride.max()) + 1
    patterns, which = np.unique((members * base + stride).ravel(), return_inverse=True)
    rates = np.zeros((len(patterns), 4))
    for row, (count, step) in enumerate(divmod(int(pattern), base) for pattern in patterns):
        groups = _groups(devices, count, step)
        if count > 1:
            if machine.links is None:
                raise ConfigError(
                    f"{machine.name} describes no links within a node, over which {count} ranks would talk"
                )
            rates[row, 0] = min(_ring_rate(machine.links, group) for group in groups)
            rates[row, 1] = min(
                _widest(machine.links)[a, b] if machine.links.mesh else _switch_rate(machine.links)
                for group in groups
                for a, b in itertools.pairwise(group)
            )
        if machine.network is not None:
            rates[row, 2:] = _sharing(machine.network, groups)
    found = rates[which.reshape(members.shape)]
    return found[..., 0], found[..., 1], found[..., 2], found[..., 3].astype(np.int64)


def _groups(devices: int, members: int, stride: int) -> list[tuple[int, ...]]:
    """The devices of each group of a node that has `members` there, `stride` apart."""
    starts = (block + first for block in range(0, devices, members * stride) for first in range(stride))
    groups = [tuple(range(start, start + members * stride, stride)) for start in starts]
    return [group for group in groups if group[-1] < devices]


def _switch_rate(links: Links) -> float:
    assert links.switch is not None
    return links.switch.gb_s * 1e9


@cache
def _ring_rate(links: Links, group: tuple[int, ...]) -> float:
    """B/s that each device of `group` can send around rings, as collective libraries lay them."""
    if links.mesh is None:
        return _switch_rate(links)
    members = np.array(group)
    capacity = _capacity(links)[np.ix_(members, members)]
    apart = ~np.eye(len(group), dtype=bool)
    if capacity[0, 1] > 0 and np.all(capacity[apart] == capacity[0, 1]):
        # Rings over all links together use each of them in both directions.
        return float(capacity[0, 1]) * (len(group) - 1)
    rate = _lay_rings(capacity)
    if not rate:
        # Devices without a link reach one another through devices between them.
        rate = _lay_rings(np.where(capacity > 0, capacity, _widest(links)[np.ix_(members, members)]))
    return rate


def _lay_rings(capacity: Floats) -> float:
    """Sum over rings, each as wide as its narrowest link, laid one by one until no way around is left.

    capacity: [devices, devices] B/s. The widest ring comes first, and of equally wide ones that which uses the widest links.
    """
    count = len(capacity)
    rings = np.array([(0, *rest) for rest in itertools.permutations(range(1, count))])
    following = np.roll(rings, -1, axis=1)
    left, total = capacity.copy(), 0.0
    while (width := (links := left[rings, following]).min(axis=1)).max() > 0:
        widest = np.flatnonzero(width == width.max())
        best = widest[np.argmin((1 / links[widest]).sum(axis=1))]
        left[rings[best], following[best]] -= width[best]
        total += float(width[best])
    return total


@cache
def _capacity(links: Links) -> Floats:
    """[devices, devices] B/s of direct links."""
    assert links.mesh is not None
    return np.array(links.mesh.links) * (links.mesh.gb_s * 1e9)


@cache
def _widest(links: Links) -> Floats:
    """[devices, devices] B/s of the widest way between each two devices, through others where there is no link."""
    width = _capacity(links).copy()
    for between in range(len(width)):
        width = np.maximum(width, np.minimum(width[:, between, None], width[None, between, :]))
    direct = _capacity(links)
    return np.where(direct > 0, direct, width)


def _sharing(network: Network, groups: list[tuple[int, ...]]) -> tuple[float, int]:
    """(B/s of the interfaces of a node that one group gets, groups that share an interface), with all groups sending."""
    part: dict[int, float] = {}
    for nic in network.nics:
        for device in nic.devices:
            part[device] = part.get(device, 0.0) + nic.gb_s * 1e9 / len(nic.devices)
    most = max(sum(any(device in nic.devices for device in group) for group in groups) for nic in network.nics)
    return min(sum(part[device] for device in group) for group in groups), most


def _tiers(network: Network | None, step: Floats, span: Ints) -> tuple[Floats, Floats, Floats]:
    """(taper of rings, taper of all-to-all, seconds a step) for members `step` nodes apart over `span` nodes."""
    ring, everywhere, hop = np.ones(span.shape), np.ones(span.shape), np.zeros(span.shape)
    for tier in network.tiers if network is not None else ():
        leaves = span > tier.nodes
        # Of the members within one part of the tier only the last sends out of it: the others leave it their share.
        shared = np.minimum(1.0, tier.taper * np.maximum(tier.nodes / step, 1.0))
        ring = np.where(leaves, np.minimum(ring, shared), ring)
        everywhere = np.where(leaves, np.minimum(everywhere, tier.taper), everywhere)
        hop = np.where(leaves, hop + tier.latency_us * 1e-6, hop)
    return ring, everywhere, hop
