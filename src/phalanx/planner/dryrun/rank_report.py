"""What a dry run found out about one rank: memory by moment and category, and its collectives by axis of the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.layout.mesh import Axis, Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.dryrun.memory_trace import Call, Category, Moment, Point


@dataclass(frozen=True)
class Measured:
    """One optimizer step as it ran."""

    microbatches: int
    peak: int
    """Bytes."""
    moment: Moment
    categories: dict[Category, int]
    """Bytes at the peak."""
    points: list[Point]
    calls: dict[Call, int]
    host: int
    """Bytes in host memory."""


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one rank in one optimizer step."""

    operation: str
    axis: str
    size: int
    """Ranks of the group."""
    bytes: int
    """Size of the whole tensor of one call: gathered, not yet scattered, summed, exchanged or sent."""
    sent: float
    """Bytes the rank sends in one, by a ring."""
    crossing: float
    """Share of `sent` that leaves the node, the mean over the group's ranks; 0 where nodes are not known."""
    count: int = 0

    @property
    def sent_in_all(self) -> float:
        """Bytes the rank sends in a step."""
        return self.sent * self.count

    @property
    def crossing_in_all(self) -> float:
        """Bytes of them that leave the node."""
        return self.sent * self.crossing * self.count


@dataclass(frozen=True)
class RankReport:
    """One rank of a dry run."""

    rank: int
    stages: list[int]
    peak: int
    """Bytes."""
    moment: Moment
    categories: dict[Category, int]
    points: list[Point]
    """Peaks by moment of the step that ran, which may have fewer micro-batches."""
    traffic: list[Traffic]
    microbatches: int
    """Micro-batches of the layout."""
    microbatches_run: int
    """The most that ran; what is reported for more follows from how the last ones added."""
    seconds: float
    """Seconds that the dry run took."""
    host: int
    """Bytes that the rank keeps in host memory, such as offloaded optimizer state."""

    @property
    def collectives(self) -> int:
        """Collectives in one optimizer step."""
        return sum(traffic.count for traffic in self.traffic)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "rank": self.rank,
            "stages": self.stages,
            "peak_bytes": self.peak,
            "peak_at": str(self.moment),
            "peak_stage": self.moment.stage,
            "peak_microbatch": self.moment.microbatch or None,
            "bytes_at_peak": self.categories,
            "host_bytes": self.host,
            "collectives": self.collectives,
            "bytes_sent": sum(t.sent_in_all for t in self.traffic),
            "bytes_over_node_boundary": sum(t.crossing_in_all for t in self.traffic),
            "traffic": [
                {
                    "operation": t.operation,
                    "axis": t.axis,
                    "ranks": t.size,
                    "bytes": t.bytes,
                    "count": t.count,
                    "bytes_sent": t.sent_in_all,
                    "bytes_over_node_boundary": t.crossing_in_all,
                }
                for t in self.traffic
            ],
            "timeline": [{"at": str(p.moment), "stage": p.moment.stage, "peak_bytes": p.peak} for p in self.points],
            "microbatches": self.microbatches,
            "microbatches_run": self.microbatches_run,
            "seconds": self.seconds,
        }


def rank_report(
    layout: ResolvedLayout,
    mesh: Mesh,
    rank: int,
    stages: list[int],
    measured: tuple[Measured, Measured],
    wanted: int,
    devices_per_node: int | None,
    seconds: float,
) -> RankReport:
    """Carry two steps of few micro-batches on to `wanted` of them: every count and every peak grows by what it did."""
    fewer, more = measured
    all_kept = layout.pp > 1 and layout.schedule == "gpipe"
    if all_kept:
        peak, moment = _peak_of_all_kept(fewer, more, wanted)
    else:
        # Both steps hold as many activations as any: the peak grows evenly, wherever it is.
        peak, moment = round(_grow_evenly(fewer, more, fewer.peak, more.peak, wanted)), more.moment
    categories = dict(more.categories)
    # What comes with each further micro-batch: its activations, what it is received in and sent from, or its samples.
    categories["activations" if all_kept else "communication" if layout.pp > 1 else "other"] += peak - more.peak
    axes = group_axes(mesh, layout.world_size)
    before = _by_kind(fewer.calls, axes, rank, devices_per_node)
    traffic = []
    for kind, count in _by_kind(more.calls, axes, rank, devices_per_node).items():
        carried = _grow_evenly(fewer, more, before.get(kind, 0), count, wanted)
        assert carried == round(carried), f"{kind} does not grow evenly with micro-batches"
        traffic.append(Traffic(*kind, count=round(carried)))
    traffic.sort(key=lambda t: (t.axis, t.operation, -t.bytes))
    return RankReport(
        rank=rank,
        stages=stages,
        peak=peak,
        moment=moment,
        categories=categories,
        points=more.points,
        traffic=traffic,
        microbatches=wanted,
        microbatches_run=more.microbatches,
        seconds=seconds,
        host=round(_grow_evenly(fewer, more, fewer.host, more.host, wanted)),
    )


def _grow_evenly(fewer: Measured, more: Measured, before: float, after: float, wanted: int) -> float:
    step = more.microbatches - fewer.microbatches
    return after if not step else after + (after - before) * (wanted - more.microbatches) / step


def _peak_of_all_kept(fewer: Measured, more: Measured, wanted: int) -> tuple[int, Moment]:
    """Return the peak of a step that holds every micro-batch's activations.

    The peak of each kind of moment grows by itself; the highest of them is returned.
    """
    if more.microbatches == wanted:
        return more.peak, more.moment
    before, after = _by_moment(fewer.points), _by_moment(more.points)
    best, found = 0, more.moment
    for key, point in after.items():
        if key in before:
            peak = round(_grow_evenly(fewer, more, before[key].peak, point.peak, wanted))
            if peak > best:
                best, found = peak, point.moment
    return best, found


def _by_moment(points: Iterable[Point]) -> dict[tuple[str, str, int], Point]:
    highest: dict[tuple[str, str, int], Point] = {}
    for point in points:
        key = (point.moment.phase, point.moment.module, point.moment.stage)
        if key not in highest or point.peak > highest[key].peak:
            highest[key] = point
    return highest


Kind = tuple[str, str, int, int, float, float]
"""The fields of `Traffic` but the count."""


def _by_kind(calls: dict[Call, int], axes: dict[str, Axis], rank: int, devices_per_node: int | None) -> dict[Kind, int]:
    counts: dict[Kind, int] = defaultdict(int)
    for call, count in calls.items():
        axis = axes[call.group]
        sent, crossing = _bytes_sent(call, axis.size), _crossing_share(call, axis, rank, devices_per_node)
        counts[call.operation, axis.name, axis.size, call.bytes, sent, crossing] += count
    return counts


def _bytes_sent(call: Call, size: int) -> float:
    """Return the bytes that a rank of a group of `size` sends in a call."""
    share = (size - 1) / size
    if call.operation == "send":
        return float(call.bytes)
    if call.operation == "receive":
        # Counted by the rank that sends it.
        return 0.0
    # A ring all-reduce is a reduce-scatter and an all-gather.
    return call.bytes * share * (2 if call.operation == "all_reduce" else 1)


def _crossing_share(call: Call, axis: Axis, rank: int, devices_per_node: int | None) -> float:
    """Return the share of what is sent that leaves the node; 0 where nodes are not known."""
    if devices_per_node is None:
        return 0.0
    # Ranks fill one node after the other.
    nodes, mine = [member // devices_per_node for member in axis.ranks], rank // devices_per_node
    if call.peer is not None:
        return float(nodes[call.peer] != mine)
    if call.operation == "all_to_all":
        # Every pair of ranks exchanges as much.
        return sum(node != mine for node in nodes) / max(1, axis.size - 1)
    # Around a ring each rank sends to the next one alone.
    return sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)) / axis.size


def group_axes(mesh: Mesh, world_size: int) -> dict[str, Axis]:
    """Return the axis that each process group of a rank stands for, by the group's name."""
    found: dict[str, Axis] = {}
    for axis in mesh.axes:
        if axis.group is not None:
            found.setdefault(axis.group_name, axis)
        for link in axis.links:
            found.setdefault(link.group_name, axis)
    if mesh.world is not None:
        everyone = Axis("all ranks", 0, world_size, mesh.world, tuple(range(world_size)), mesh.world.group_name)
        found.setdefault(everyone.group_name, everyone)
    return found
