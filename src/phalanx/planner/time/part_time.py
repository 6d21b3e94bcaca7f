"""How long one micro-batch takes in each part of a model on one rank, forward and backward, by component.

Kernels follow one another. Collectives of the tensor-parallel axis lie between them and hide behind nothing, but for parts
of a sequence that copy engines move beside products; those that pass keys and values around a ring hide behind attention.
Where the host issues operations more slowly than the device does them, the device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

from phalanx.hardware.collectives import Constants, all_gather, all_reduce, all_to_all, reduce_scatter, send
from phalanx.hardware.machine import Machine
from phalanx.hardware.topology import place_groups
from phalanx.layout.tensor_parallel.peer_exchange import SMALLEST_EXCHANGE
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.time.framework import FrameworkProfile
from phalanx.planner.time.operation_time import (
    Direction,
    Floats,
    Form,
    Ints,
    OperationTable,
    PartBreakdown,
    compute_seconds,
    operation_rows,
)
from phalanx.planner.time.profile import Profile
from phalanx.planner.trace.traced_model import BLOCKS, PartName, Setting

_STREAMED = 10.0
"""What the host does to issue an operation of streamed blocks, over what compiled code needs: chains are computed chunk by
chunk from Python (ORBIT-1B on H200s, one sample a micro-batch)."""
_TOGETHER = 6.0
"""How sharply the slower of host and device decides: the power of a mean of both."""


Columns = TypeVar("Columns")
"""A dataclass of arrays that have a row for each of the same things."""


@dataclass(frozen=True)
class Parts:
    """Parts of models and what they consist of. Arrays are [parts]."""

    operations: OperationTable
    tp: Ints
    cp: Ints
    ep: Ints
    """Ranks that exchange rows for experts."""
    ep_node: Ints
    """Those of them on a node, where rows go there first; else 1."""
    host_work: Floats
    """See `FrameworkProfile`."""
    exchange_work: Floats
    """The same of an exchange of activations, which is one call however finely a program cuts up what it computes."""
    beside_bytes: Floats
    """Bytes of a sequence, or of a sum of such, from which on its parts travel beside products; infinite where none do."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.tp)

    @classmethod
    def joined(cls, several: Sequence[Parts]) -> Parts:
        """Return the parts of several lists, one after the other."""
        starts = np.cumsum([0, *(parts.count for parts in several)])
        tables = [parts.operations.shifted(int(start)) for parts, start in zip(several, starts, strict=False)]
        return cls(
            OperationTable.joined(tables),
            np.concatenate([parts.tp for parts in several]),
            np.concatenate([parts.cp for parts in several]),
            np.concatenate([parts.ep for parts in several]),
            np.concatenate([parts.ep_node for parts in several]),
            np.concatenate([parts.host_work for parts in several]),
            np.concatenate([parts.exchange_work for parts in several]),
            np.concatenate([parts.beside_bytes for parts in several]),
        )


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one micro-batch."""

    seconds: Floats
    """[parts, directions, components]: forward and backward, recompute in the latter."""
    weight: Floats
    """The part of backward that makes gradients of weights, [parts]."""
    issued: Floats
    """What the host takes to issue all that, [parts, directions]; the device waits for it in the component HOST."""


def parts_of(wanted: Sequence[tuple[PartName, Setting, int]], framework: FrameworkProfile) -> Parts:
    """Return the parts in `wanted`, each of name, setting, samples of a micro-batch."""
    rows = [_rows_of(*part, framework) for part in wanted]
    tp, cp, ep, slices, node = (
        np.array([getattr(setting, axis) for _, setting, _ in wanted], np.int64)
        for axis in ("tp", "cp", "ep", "expert_tp", "ep_node")
    )
    streamed = np.array([setting.streamed > 1 for _, setting, _ in wanted])
    work = np.where(streamed, max(framework.host_work, _STREAMED), framework.host_work)
    together = np.concatenate(rows)
    # Rows are cached as those of part 0: here each part gets its number.
    together[:, 0] = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    exchange_work = np.where(streamed, work, 1.0)
    beside = np.array([_beside_bytes(*part, framework) for part in wanted])
    return Parts(OperationTable.of_matrix(together), tp, cp, ep * slices, node, work, exchange_work, beside)


def _beside_bytes(name: PartName, setting: Setting, microbatch: int, framework: FrameworkProfile) -> float:
    """Return the bytes from which on parts of a sequence travel beside products; see `Parts`."""
    # As `LayoutTable.overlaps_products` has it.
    overlaps = setting.streamed == 1 and setting.recompute != "selective" and setting.joint_gradients
    overlaps = overlaps and framework.overlaps_products and name in BLOCKS
    overlaps = overlaps and PRECISIONS[setting.precision].exchanges_in_products
    return float(SMALLEST_EXCHANGE * setting.tp * microbatch) if overlaps else np.inf


@cache
def _rows_of(name: PartName, setting: Setting, microbatch: int, framework: FrameworkProfile) -> Floats:
    """Return the operations of one part, as part 0, [operations, fields of an OperationTable]."""
    operations = framework.part_operations(name, setting, microbatch)
    eager = name in BLOCKS and not setting.compile
    # Of these kernels, which add a bias to the scores, other rates are known.
    biased = setting.attention == "flex" or (setting.attention in ("efficient", "math") and setting.precision != "fp32")
    rows = operation_rows(0, operations, biased=biased, eager=eager)
    return np.asarray(rows, np.float64).reshape(-1, len(fields(OperationTable)))


_COLLECTIVES = {
    Form.ALL_REDUCE: all_reduce,
    Form.ALL_GATHER: all_gather,
    Form.REDUCE_SCATTER: reduce_scatter,
    Form.ALL_TO_ALL: all_to_all,
    Form.SEND: send,
}


def in_training(constants: Constants, profile: Profile) -> Constants:
    """Return the constants of collectives that share links, network and device with the rest of a training step."""
    return replace(
        constants,
        efficiency=constants.efficiency * profile.link_share,
        efficiency_across=constants.efficiency_across * profile.network_share,
    )


def part_times(parts: Parts, machine: Machine, constants: Constants, profile: Profile) -> PartTimes:
    """Return the seconds of every part on `machine`. constants: of its collectives when nothing else runs."""
    table, count = parts.operations, parts.count
    seconds = compute_seconds(table, profile)
    seconds = seconds + _collective_seconds(parts, machine, in_training(constants, profile), profile)
    directions, components = len(Direction), len(PartBreakdown)
    where = (table.part * directions + table.direction) * components + table.component
    sums = np.asarray(np.bincount(where, seconds, count * directions * components), np.float64).reshape(
        count, directions, components
    )
    ring = np.bincount(where, np.where(table.form == Form.SEND, seconds, 0.0), count * directions * components)
    sent = ring.reshape(count, directions, components)[..., PartBreakdown.CP]
    # Keys and values go around the ring while attention computes; what is left over shows.
    hidden = np.minimum(sent, sums[..., PartBreakdown.ATTENTION] * profile.hidden)
    sums[..., PartBreakdown.CP] += profile.slowdown * hidden - hidden
    travelled = _hidden_exchanges(table, seconds, count, profile)
    sums[..., PartBreakdown.EP] += profile.slowdown * travelled - travelled
    saved, copied = _hidden_copies(parts, seconds, machine, constants, profile)
    sums[..., PartBreakdown.TP] += profile.copy_slowdown * copied - saved
    device = sums.sum(axis=2)
    calls, exchanges = (
        np.bincount(table.part * directions + table.direction, np.where(which, table.times, 0), count * directions)
        for which in (table.form < Form.ALL_REDUCE, table.form >= Form.ALL_REDUCE)
    )
    calls, exchanges = calls.reshape(count, directions), exchanges.reshape(count, directions)
    # An exchange is one call, however finely a program cuts up what it computes.
    work = calls * parts.host_work[:, None] + exchanges * parts.exchange_work[:, None]
    issued = work * profile.host_s + exchanges * profile.exchange_host_s
    together = slower_of(device, issued)
    sums[..., PartBreakdown.HOST] = together - device
    weight = np.bincount(table.part, np.where(table.weight, seconds, 0.0), count)
    return PartTimes(sums, np.minimum(weight, together[:, Direction.BACKWARD]), issued)


def _hidden_copies(parts: Parts, seconds: Floats, machine: Machine, constants: Constants, profile: Profile) -> Floats:
    """Return the seconds of collectives over `tp` that copies beside products save, but for their rests, and the seconds of
    copying that is hidden so, both [parts, directions].

    A gather runs beside the product that reads it, from the rank's own part on; a sum beside the product it follows, up to
    the rank's own part.
    """
    table, saved, hidden = parts.operations, *np.zeros((2, parts.count * len(Direction)))
    places = place_groups(machine, parts.tp, np.ones_like(parts.tp))
    smallest = np.where(places.nodes == 1, parts.beside_bytes, np.inf)
    exchanges = (table.component == PartBreakdown.TP) & (table.bytes >= smallest[table.part])
    products = np.flatnonzero(table.form == Form.PRODUCT)
    for form, step in ((Form.ALL_GATHER, 0), (Form.REDUCE_SCATTER, -1)):
        rows = np.flatnonzero(exchanges & (table.form == form)) if len(products) else products
        part = table.part[rows]
        nearest = products[np.clip(np.searchsorted(products, rows) + step, 0, len(products) - 1)]
        others = (parts.tp[part] - 1) / parts.tp[part]
        beside = np.where(table.part[nearest] == part, seconds[nearest] * others * profile.hidden, 0.0)
        copies = constants.launch_s + table.bytes[rows] * others / (places.ring_b_s[part] * profile.copy_share)
        rest = np.minimum(seconds[rows], np.maximum(copies - beside, 0.0))
        where = part * len(Direction) + table.direction[rows]
        saved += np.bincount(where, seconds[rows] - rest, len(saved))
        hidden += np.bincount(where, np.minimum(copies, beside), len(hidden))
    return np.stack([saved, hidden]).reshape(2, parts.count, len(Direction))


def _hidden_exchanges(table: OperationTable, seconds: Floats, count: int, profile: Profile) -> Floats:
    """Return the seconds of exchanges of rows that computing hides, [parts, directions].

    What is computed goes on until it reads what is under way; exchanges follow one another and are read in that order.
    """
    sent, waits = np.zeros(count * len(Direction)), np.zeros(count * len(Direction))
    rows = np.flatnonzero(table.beside)
    computed = np.where(table.form < Form.ALL_REDUCE, seconds, 0.0) * profile.hidden
    clock = np.concatenate([[0.0], np.cumsum(computed)])
    read = rows + table.beside[rows]
    where = table.part[rows] * len(Direction) + table.direction[rows]
    columns = (where, rows, read, clock[rows], clock[read + 1], seconds[rows])
    passed, waited, free = -1, 0.0, 0.0
    under_way: list[tuple[int, float, float]] = []
    for each, begins, ends, begin, end, takes in zip(*(column.tolist() for column in columns), strict=True):
        if each != passed:
            passed, waited, free, under_way = each, 0.0, 0.0, []
        while under_way and under_way[0][0] < begins:
            _, done, needed = under_way.pop(0)
            waited = max(waited, done - needed)
        free = max(free, begin + waited) + takes
        under_way.append((ends, free, end))
        # So far: what is read later waits for all of it at least so long.
        late = max(waited, *(done - needed for _, done, needed in under_way))
        sent[each] += takes
        waits[each] = late
    return np.asarray((sent - waits).reshape(count, len(Direction)))


def slower_of(device: Floats, host: Floats) -> Floats:
    """Return the seconds of work that takes the device and the host so long: a little over the longer where both are alike,
    since each then waits for the other now and then."""
    longest = np.maximum(np.maximum(device, host), 1e-12)
    return np.asarray(longest * ((device / longest) ** _TOGETHER + (host / longest) ** _TOGETHER) ** (1 / _TOGETHER))


def _collective_seconds(parts: Parts, machine: Machine, constants: Constants, profile: Profile) -> Floats:
    table = parts.operations
    seconds = np.zeros(len(table))
    alone = np.ones_like(parts.tp)
    node, across, within = parts.ep_node, Form.ALL_TO_ALL_ACROSS, Form.ALL_TO_ALL_WITHIN
    for component, sizes, strides, collectives in (
        (PartBreakdown.TP, parts.tp, alone, _COLLECTIVES),
        (PartBreakdown.CP, parts.cp, parts.tp, _COLLECTIVES),
        # Experts are sharded over neighbouring ranks, over the ranks of `tp` first.
        (PartBreakdown.EP, parts.ep, alone, _COLLECTIVES),
        (PartBreakdown.EP, np.where(node > 1, parts.ep // node, 1), node, {across: all_to_all}),
        (PartBreakdown.EP, node, alone, {within: all_to_all}),
    ):
        if not np.any(sizes > 1):
            continue
        places = place_groups(machine, sizes, strides)
        for form, collective in collectives.items():
            rows = np.flatnonzero((table.component == component) & (table.form == form))
            if len(rows):
                each = collective(table.bytes[rows], at(places, table.part[rows]), constants)
                seconds[rows] = each * table.times[rows]
    # Numbers of rows are sent before the rows; for the sum of them the host waits for the device, and then issues anew
    # what the device waits for.
    counts = (table.component == PartBreakdown.EP) & (table.width == 8) & (table.form != within)
    seconds[counts] += profile.exchange_host_s
    return seconds


def at(columns: Columns, which: Ints) -> Columns:
    """Return the rows at these positions of a dataclass of arrays, [rows]."""
    names = (field.name for field in fields(cast(Any, columns)))
    return type(columns)(**{name: getattr(columns, name)[which] for name in names})
