"""How long one micro-batch takes in each part of a model on one rank, forward and backward, by component.

Kernels follow one another. Collectives of the tensor-parallel axis lie between them and hide behind nothing; those that
pass keys and values around a ring hide behind attention. Where the host issues operations more slowly than the device does
them, the device waits.
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
    host_work: Floats
    """See `FrameworkProfile`."""
    exchange_work: Floats
    """The same of an exchange of activations, which is one call however finely a program cuts up what it computes."""

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
            np.concatenate([parts.host_work for parts in several]),
            np.concatenate([parts.exchange_work for parts in several]),
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
    tp, cp, ep, slices = (
        np.array([getattr(setting, axis) for _, setting, _ in wanted], np.int64)
        for axis in ("tp", "cp", "ep", "expert_tp")
    )
    streamed = np.array([setting.streamed > 1 for _, setting, _ in wanted])
    work = np.where(streamed, max(framework.host_work, _STREAMED), framework.host_work)
    together = np.concatenate(rows)
    # Rows are cached as those of part 0: here each part gets its number.
    together[:, 0] = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    return Parts(OperationTable.of_matrix(together), tp, cp, ep * slices, work, np.where(streamed, work, 1.0))


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


def slower_of(device: Floats, host: Floats) -> Floats:
    """Return the seconds of work that takes the device and the host so long: a little over the longer where both are alike,
    since each then waits for the other now and then."""
    longest = np.maximum(np.maximum(device, host), 1e-12)
    return np.asarray(longest * ((device / longest) ** _TOGETHER + (host / longest) ** _TOGETHER) ** (1 / _TOGETHER))


def _collective_seconds(parts: Parts, machine: Machine, constants: Constants, profile: Profile) -> Floats:
    table = parts.operations
    seconds = np.zeros(len(table))
    for component, sizes, strides in (
        (PartBreakdown.TP, parts.tp, np.ones_like(parts.tp)),
        (PartBreakdown.CP, parts.cp, parts.tp),
        # Experts are sharded over neighbouring ranks, over the ranks of `tp` first.
        (PartBreakdown.EP, parts.ep, np.ones_like(parts.ep)),
    ):
        if not np.any(sizes > 1):
            continue
        places = place_groups(machine, sizes, strides)
        for form, collective in _COLLECTIVES.items():
            rows = np.flatnonzero((table.component == component) & (table.form == form))
            if len(rows):
                each = collective(table.bytes[rows], at(places, table.part[rows]), constants)
                seconds[rows] = each * table.times[rows]
    # Numbers of rows are sent before the rows; for the sum of them the host waits for the device, and then issues anew
    # what the device waits for.
    counts = (table.component == PartBreakdown.EP) & (table.width == 8)
    seconds[counts] += profile.exchange_host_s
    return seconds


def at(columns: Columns, which: Ints) -> Columns:
    """Return the rows at these positions of a dataclass of arrays, [rows]."""
    names = (field.name for field in fields(cast(Any, columns)))
    return type(columns)(**{name: getattr(columns, name)[which] for name in names})
