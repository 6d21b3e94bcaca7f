"""Time of collectives from the bytes, the placement of the group and a few constants; all of it vectorised over arrays.

Each function takes bytes and a `Placement` whose shapes broadcast, and returns seconds as float64 of the joint
shape. A group
of one member, or no bytes, takes no time. Times grow with the bytes, and on a switch with the members; on a mesh more
members may have more links and take less.

A transfer takes launch + L + T + 2 ramp sqrt(L T). L is the latency of its steps, which follow one another. T is the
longer of
the time between nodes and the time within a node, since data goes through in chunks that keep both busy; the time within a
node includes one pass of every device over its own data. The root is the cost of filling the pipeline of chunks: with chunks
of the best size a pipeline of k steps takes (sqrt(L) + sqrt(T))^2, which is ramp = 1; libraries come nearer to L + T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import yaml

from phalanx.errors import ConfigError
from phalanx.hardware.machine import Machine
from phalanx.hardware.topology import Floats, Placement


@dataclass(frozen=True)
class Constants:
    """Constants of a machine's links and collective library; `constants.yaml` has the defaults and their sources."""

    launch_s: float
    """Least time of any collective, seconds."""
    step_s: float
    """Latency of one step between devices of a node, seconds."""
    efficiency: float
    """Share of the links' nominal bandwidth that large messages reach within a node."""
    pass_b_s: float
    """Bytes per second of one pass of a device over its own data, which reduces and copies it."""
    ramp: float
    """Share of the time to fill a pipeline of chunks that is lost, 0 to 1."""
    multicast: float = 0.0
    """Share of a device's nominal bandwidth at which the switches of a node reduce; 0 where they cannot."""
    step_across_s: float = 0.0
    """Latency of one step between nodes, seconds."""
    efficiency_across: float = 1.0
    """Share of the interfaces' nominal bandwidth that large messages reach between nodes."""
    tree: float = 1.0
    """Bandwidth of trees over that of rings, between nodes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            assert value >= 0 and np.isfinite(value), f"{field.name}={value}"
        assert self.efficiency > 0 and self.pass_b_s > 0 and self.efficiency_across > 0 and self.tree > 0


def default_constants(machine: Machine) -> Constants:
    """Return the constants for the links and the network of `machine`. Raises ConfigError for kinds not in the table.

    A machine without links in its nodes, or without a network, gets neutral values for what it lacks.
    """
    inside = {"launch_s": 0.0, "step_s": 0.0, "efficiency": 1.0, "pass_b_s": 1e12, "ramp": 0.0}
    if machine.links is not None:
        inside = _read_row("links", machine.links.kind, machine.name)
    across = {} if machine.network is None else _read_row("network", machine.network.kind, machine.name)
    return Constants(**inside, **across)


def all_reduce(size: npt.ArrayLike, place: Placement, constants: Constants) -> Floats:
    """Return the seconds to sum a tensor of `size` bytes of each member on every member.

    Libraries take the fastest of rings, trees between nodes, and switches that reduce; so does this model.
    """
    data, n = _broadcast_bytes(size, place), place.size
    inside = (
        2 * _others_share(place.per_node) * data / (place.ring_b_s * constants.efficiency) + data / constants.pass_b_s
    )
    nic = place.nic_b_s * constants.efficiency_across
    steps = 2 * (place.per_node - 1) * constants.step_s
    across = constants.step_across_s + place.hop_s
    # Every byte of a ring leaves the node once per lap, however many members the node has.
    ring = np.maximum(inside, 2 * _others_share(n) * data / (nic * place.ring_taper))
    time = _transfer_seconds(steps + 2 * (place.nodes - 1) * across, ring, constants)
    tree = np.maximum(inside, 2 * data / (nic * place.ring_taper * constants.tree))
    time = np.minimum(time, _transfer_seconds(steps + 2 * _tree_levels(place) * across, tree, constants))
    if constants.multicast > 0:
        # One step up to the switch and one down; each byte is sent once and received once.
        switched = _transfer_seconds(
            np.asarray(2 * constants.step_s), data / (place.ring_b_s * constants.multicast), constants
        )
        time = np.where(place.multicast, np.minimum(time, switched), time)
    return _zero_where_alone(time, data, place)


def all_gather(size: npt.ArrayLike, place: Placement, constants: Constants) -> Floats:
    """Return the seconds in which rings gather `size` bytes, of which each member has an equal part, on every member."""
    data = _broadcast_bytes(size, place)
    inside = (
        _others_share(place.per_node) * data / (place.ring_b_s * constants.efficiency) + data / 2 / constants.pass_b_s
    )
    across = _others_share(place.size) * data / (place.nic_b_s * constants.efficiency_across * place.ring_taper)
    steps = (place.per_node - 1) * constants.step_s + (place.nodes - 1) * (constants.step_across_s + place.hop_s)
    return _zero_where_alone(_transfer_seconds(steps, np.maximum(inside, across), constants), data, place)


def reduce_scatter(size: npt.ArrayLike, place: Placement, constants: Constants) -> Floats:
    """Return the seconds in which rings sum a tensor of `size` bytes of each member and leave each an equal part."""
    # A reduce-scatter is an all-gather run backwards.
    return all_gather(size, place, constants)


def all_to_all(size: npt.ArrayLike, place: Placement, constants: Constants) -> Floats:
    """Return the seconds in which each member sends `size` bytes in all, an equal part to every member, itself included.

    Unlike rings, an all-to-all sends everything for other nodes through the interfaces and the tiers at once.
    """
    data, n = _broadcast_bytes(size, place), place.size
    inside = (place.per_node - 1) / n * data / (place.ring_b_s * constants.efficiency) + data / constants.pass_b_s
    # All members of a node send through its interfaces at once.
    away = place.per_node * (n - place.per_node) / n * data
    across = away / (place.nic_b_s * constants.efficiency_across * place.all_taper)
    steps = (place.per_node - 1) * constants.step_s
    steps = steps + (n - place.per_node) * (constants.step_across_s + place.hop_s)
    return _zero_where_alone(_transfer_seconds(steps, np.maximum(inside, across), constants), data, place)


def broadcast(size: npt.ArrayLike, place: Placement, constants: Constants) -> Floats:
    """Return the seconds in which one member's `size` bytes reach all, through trees between nodes and chains within."""
    data = _broadcast_bytes(size, place)
    inside = np.where(place.per_node > 1, data, 0.0) / (place.ring_b_s * constants.efficiency)
    inside = inside + data / 2 / constants.pass_b_s
    across = np.where(place.nodes > 1, data, 0.0)
    across = across / (place.nic_b_s * constants.efficiency_across * place.ring_taper)
    steps = (place.per_node - 1) * constants.step_s + _tree_levels(place) * (constants.step_across_s + place.hop_s)
    return _zero_where_alone(_transfer_seconds(steps, np.maximum(inside, across), constants), data, place)


def send(size: npt.ArrayLike, place: Placement, constants: Constants) -> Floats:
    """Return the seconds in which each member sends `size` bytes to the next one of its group, all at once.

    Where any two neighbours lie on different nodes, the interfaces decide: a pipeline waits for its slowest pair.
    """
    data, apart = _broadcast_bytes(size, place), place.nodes > 1
    inside = data / (place.pair_b_s * constants.efficiency)
    across = data / (place.nic_b_s * constants.efficiency_across * place.ring_taper)
    step = np.where(apart, constants.step_across_s + place.hop_s, constants.step_s)
    return _zero_where_alone(_transfer_seconds(step, np.where(apart, across, inside), constants), data, place)


COLLECTIVES: dict[str, Callable[[npt.ArrayLike, Placement, Constants], Floats]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "send": send,
}
"""Collectives by the names that measured points have."""


def bus_bandwidth(collective: str, size: npt.ArrayLike, members: npt.ArrayLike, seconds: npt.ArrayLike) -> Floats:
    """Return the bus bandwidth of nccl-tests, B/s: bytes per second times the share of each byte that a ring sends."""
    n = np.asarray(members, np.float64)
    ring = (n - 1) / n
    factor = {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "all_to_all": ring}
    return np.asarray(size, np.float64) / np.asarray(seconds, np.float64) * factor.get(collective, 1.0)


def _transfer_seconds(steps: Floats, transfer: Floats, constants: Constants) -> Floats:
    """Return the seconds of a pipelined transfer with `steps` seconds of latency and `transfer` seconds of bytes."""
    time: Floats = constants.launch_s + steps + transfer + 2 * constants.ramp * np.sqrt(steps * transfer)
    return time


def _broadcast_bytes(size: npt.ArrayLike, place: Placement) -> Floats:
    data = np.asarray(size, np.float64)
    assert np.all(data >= 0)
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, place.size.shape))


def _zero_where_alone(time: Floats, data: Floats, place: Placement) -> Floats:
    return np.where((place.size > 1) & (data > 0), time, 0.0)


def _others_share(members: npt.NDArray[np.int64]) -> Floats:
    """Return the share of the data that is not a member's own."""
    return (members - 1) / members


def _tree_levels(place: Placement) -> Floats:
    """Return the levels of a tree over the nodes."""
    levels: Floats = np.ceil(np.log2(place.nodes))
    return levels


@cache
def _read_table() -> dict[str, dict[str, dict[str, float | str]]]:
    table: dict[str, dict[str, dict[str, float | str]]] = yaml.safe_load(
        files("phalanx.hardware").joinpath("constants.yaml").read_text("utf-8")
    )
    return table


def _read_row(part: str, kind: str, name: str) -> dict[str, float]:
    rows = _read_table()[part]
    if kind not in rows:
        raise ConfigError(f"{name}: {part}.kind={kind} is not in constants.yaml; it knows {', '.join(rows)}")
    return {key: float(value) for key, value in rows[kind].items() if key != "source"}
