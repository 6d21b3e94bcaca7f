"""The time a pipeline schedule takes: every action of a `ScheduleTable` placed in time, for stages of any speed.

How transfers between ranks are modelled follows PyTorch's two runtimes. Schedules with one stage a rank receive when they
need to: the transfer begins when the sender is done and the receiver is free, and the receiver computes nothing
meanwhile. (1f1b joins a send with a receive from the same neighbour; both ranks wait for both, which leads to the same
times.) Schedules with several stages a rank post receives in advance: the transfer begins when the sender is done, and
only what is left of it when the receiver is free holds it up. Sends hold nobody up. Transfers do not slow each other or
the arithmetic down, and one between two stages of the same rank takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from phalanx.planner.schedule.schedule_table import IntArray, Pass, ScheduleTable, positions

FloatArray = npt.NDArray[np.float64]

_AT_ONCE = 4_000_000
"""Numbers held for one array of times; more candidates are computed one lot after another."""


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds that one micro-batch takes in each stage. Arrays of [stages], or [candidates, stages] for many at once."""

    forward: npt.ArrayLike
    backward: npt.ArrayLike
    """The whole backward pass: gradients of inputs and of weights."""
    weight: npt.ArrayLike | None = None
    """The part of `backward` for gradients of weights; used, and needed, where a schedule computes it apart. Of the first
    stage PyTorch then computes nothing until those of the weights are due, and all of `backward` there."""
    transfer: npt.ArrayLike = 0.0
    """Sending one micro-batch's activations from a stage to the next, or their gradients back, [stages - 1] or one number
    for all."""
    after: npt.ArrayLike = 0.0
    """What a rank still does when its last action is done (reducing gradients over data-parallel ranks, say), [ranks] or
    one number for all."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """When every action runs; the arrays of actions are [ranks, actions] as in the table. Seconds from the start."""

    table: ScheduleTable
    start: FloatArray
    """When the rank begins to compute; an awaited transfer lies before."""
    end: FloatArray
    makespan: float
    """From the first action to the last rank being done, `after` included. The gradient norm joins all ranks, so all take
    this long: the ramps at both ends count on every rank."""
    busy: FloatArray
    """Seconds each rank computes, `after` included, [ranks]."""


def simulate(table: ScheduleTable, times: StageTimes) -> Simulation:
    """Place every action of `table` in time, for one candidate: `times` holds arrays of [stages]."""
    program = _compile(table)
    costs = _action_costs(program, times)
    # Without the row of time zero, and of the one candidate there is.
    end = _run(program, costs)[:-1, 0]
    busy_time = costs.duration(slice(None))[:, 0]
    # Back from the order of the program to that of the table.
    whole = np.empty((2, *table.kind.shape))
    whole[0].ravel()[program.order] = end - busy_time
    whole[1].ravel()[program.order] = end
    after = _per_rank(table, times)[0]
    busy = np.bincount(program.rank, weights=busy_time, minlength=table.pp) + after
    makespan = float((whole[1][:, -1] + after).max())
    return Simulation(table, whole[0], whole[1], makespan, busy)


def makespans(table: ScheduleTable, times: StageTimes) -> FloatArray:
    """Return the makespan of each candidate in `times`, seconds, [candidates]: that of `simulate`, without its detail."""
    program = _compile(table)
    costs = _action_costs(program, times)
    results = []
    # Every action of every candidate has a time: of a million candidates that would be more than the memory.
    for lot in costs.lots(_AT_ONCE // len(program.order) + 1):
        end = _run(program, lot)
        results.append(end[program.last])
    # When the last action of each rank ends, [ranks, candidates].
    last = np.concatenate(results, axis=1)
    return np.asarray((last.T + _per_rank(table, times)).max(axis=1))


@dataclass(frozen=True, eq=False)
class _Program:
    """The actions of all ranks in one order in which each comes after what it waits for, cut into groups that wait for
    nothing of their own group. Arrays of [actions] in that order, unless stated."""

    table: ScheduleTable
    order: IntArray
    """Place of the action in the flattened table."""
    bounds: list[int]
    """Where each group begins, and the end."""
    rank: IntArray
    column: IntArray
    """Which duration: kind * stages + stage."""
    before: IntArray
    """The action before it on its rank; one past the end of the order stands for time zero."""
    source: IntArray
    """The action of the neighbouring stage whose result it takes; likewise."""
    link: IntArray
    """Between which stages that result travels, by the earlier stage; stages - 1 where nothing travels."""
    last: IntArray
    """The last action of each rank, [ranks]."""


@lru_cache(maxsize=16)
def _compile(table: ScheduleTable) -> _Program:
    """Return what `simulate` needs of a table: its actions in an order in which each finds its inputs there."""
    n, (ranks, each) = table.kind.size, table.kind.shape
    kind, stage, source = table.kind.ravel(), table.stage.ravel(), _sources(table)
    before = np.concatenate([np.full((ranks, 1), n), np.arange(n).reshape(ranks, each)[:, :-1]], axis=1).ravel()
    here = table.rank_of_stage[stage]
    # Activations come from the stage before, gradients from the one behind.
    neighbour = np.clip(np.where(kind == Pass.FORWARD, stage - 1, stage + 1), 0, table.n_stages - 1)
    travels = (source < n) & (table.rank_of_stage[neighbour] != here)
    link = np.where(travels, np.minimum(stage, neighbour), table.n_stages - 1)
    # The groups follow from the table alone, whatever the times: computed once, all candidates run through them together.
    groups = list(_groups(table, source))
    order = np.concatenate(groups)
    # Positions in the table become positions in that order; time zero stays behind the last.
    place = np.empty(n + 1, dtype=np.int64)
    place[order] = np.arange(n)
    place[n] = n
    return _Program(
        table=table,
        order=order,
        bounds=np.cumsum([0, *map(len, groups)]).tolist(),
        rank=here[order],
        column=(kind * table.n_stages + stage)[order],
        before=place[before[order]],
        source=place[source[order]],
        link=link[order],
        last=place[each * np.arange(1, ranks + 1) - 1],
    )


def _sources(table: ScheduleTable) -> IntArray:
    """Return the action of another stage which each waits for: its place in the flattened table, or the size for none."""
    ranks, none = table.rank_of_stage[None, :, None], table.kind.size
    placed = positions(table)
    places = np.where(placed >= 0, ranks * table.kind.shape[1] + placed, none)
    # Where weight gradients are computed apart, the stage before needs only the gradient of the input.
    gradient = places[Pass.INPUT if table.split_backward else Pass.BACKWARD]
    nobody = np.full((1, table.microbatches), none)
    forward = np.concatenate([nobody, places[Pass.FORWARD][:-1]])
    backward = np.concatenate([gradient[1:], nobody])
    # Weight gradients need only what their own rank has computed before.
    of_kind = np.stack([forward, backward, backward, np.full_like(backward, none)])
    return np.asarray(of_kind[table.kind, table.stage, table.microbatch]).ravel()


def _groups(table: ScheduleTable, waits_for: IntArray) -> Iterator[IntArray]:
    """Yield, until all are done, the next action of every rank whose inputs are there; asserts that some rank has one."""
    left, each = len(waits_for), table.kind.shape[1]
    none, never = left, left + 1
    done = np.zeros(left + 2, dtype=np.bool_)
    done[none] = True
    # A column past the last action, which nothing fulfils, holds the ranks that are through.
    ends = each * np.arange(1, table.pp + 1)
    waiting = np.insert(waits_for, ends, never)
    upcoming = ends - each + np.arange(table.pp)
    while left:
        # The next action of each rank, if the action that it waits for is in an earlier group.
        ready = np.flatnonzero(done.take(waiting.take(upcoming)))
        assert len(ready), f"{table.schedule}: ranks wait for each other for ever"
        # Rows are shorter by one without that column.
        group = upcoming.take(ready) - ready
        done[group] = True
        upcoming[ready] += 1
        left -= len(group)
        yield group


@dataclass(frozen=True, eq=False)
class _Costs:
    """Seconds by what an action is, candidates last; looked up by action."""

    program: _Program
    compute: FloatArray
    """[kinds * stages, candidates]"""
    transfer: FloatArray
    """[stages, candidates]; the last row, for what stays on its rank, is zero."""

    def duration(self, actions: slice) -> FloatArray:
        """Return the computing time of these actions, [actions, candidates]."""
        return self.compute.take(self.program.column[actions], axis=0)

    def lots(self, size: int) -> Iterator[_Costs]:
        """Yield the costs of `size` candidates at a time."""
        for first in range(0, self.compute.shape[1], size):
            some = slice(first, first + size)
            yield _Costs(self.program, np.ascontiguousarray(self.compute[:, some]), self.transfer[:, some])


def _action_costs(program: _Program, times: StageTimes) -> _Costs:
    """Return the seconds of each kind of action in each stage, and of what travels between stages."""
    table, forward, backward = program.table, np.atleast_2d(times.forward), np.atleast_2d(times.backward)
    assert times.weight is not None or not table.split_backward, f"{table.schedule} needs the time of weight gradients"
    shape = (_candidates(times), table.n_stages)
    apart = np.broadcast_to(np.atleast_2d(0.0 if times.weight is None else times.weight), shape).copy()
    # Nobody needs the gradient of the first stage's input, so PyTorch computes all of its backward pass with the weights'.
    apart[:, 0] = backward[:, 0]
    kinds = [np.broadcast_to(part, shape) for part in (forward, backward, backward - apart, apart)]
    link = np.zeros(shape)
    link[:, :-1] = times.transfer
    return _Costs(program, np.concatenate(kinds, axis=1, dtype=np.float64).T.copy(), link.T.copy())


def _candidates(times: StageTimes) -> int:
    given = (times.forward, times.backward, times.transfer, *(() if times.weight is None else (times.weight,)))
    return max(len(np.atleast_2d(part)) for part in given)


def _per_rank(table: ScheduleTable, times: StageTimes) -> FloatArray:
    """Return the seconds after the last action of each rank, [1 or candidates, ranks]."""
    after = np.atleast_2d(np.asarray(times.after, dtype=np.float64))
    return np.broadcast_to(after, (len(after), table.pp))


def _run(program: _Program, costs: _Costs) -> FloatArray:
    """Return when each action ends, in program order, [actions + 1, candidates]; the last row is time zero."""
    end = np.zeros((len(program.order) + 1, costs.compute.shape[1]))
    waits = costs.transfer.any()
    in_advance = program.table.stages_per_rank > 1
    for first, stop in pairwise(program.bounds):
        group = slice(first, stop)
        # An action begins when its rank has ended the one before and the neighbour's result is there.
        mine, theirs = end.take(program.before[group], axis=0), end.take(program.source[group], axis=0)
        if waits and in_advance:
            # The receive was posted long ago: the transfer began as soon as the neighbour was done.
            theirs += costs.transfer.take(program.link[group], axis=0)
        np.maximum(mine, theirs, out=mine)
        if waits and not in_advance:
            # The transfer begins when both are ready, and its time is lost to the receiver.
            mine += costs.transfer.take(program.link[group], axis=0)
        np.add(mine, costs.duration(group), out=end[group])
    return end
