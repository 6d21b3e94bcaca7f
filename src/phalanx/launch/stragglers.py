"""Ranks and links that the others wait for, step after step: which, by how much, and whether host, device or link is slow.

The process that watches the first rank's node looks, at the ranks of other nodes too where it hears of them; what it finds
lies in the folder of heartbeats, where the first rank reads it for its logs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from phalanx.launch.collectives import ArrivalHistory, Collective, Lateness, read_collectives
from phalanx.launch.faults import host_name
from phalanx.launch.heartbeat import Beat, beat_file, read_beat
from phalanx.launch.link_times import LinkCost, Ranks, TransferHistory

FILE = "stragglers.json"
"""In the folder of heartbeats: the times of ranks, and who is slow."""

WINDOW_STEPS = 12
"""Steps that one look sees."""
SHARE = 0.1
"""Share of wall time that a rank must cost the others to be named."""
LEAD = 3.0
"""How many times as much as the next rank it must cost them: on a machine that is busy, every rank is late now and then."""
LOOKS = 3
"""Looks in a row that must agree."""
_LOOK_S = 0.5
_NODE_S = 0.1
"""Seconds between two looks for each node: one process hears all that the others know."""
_COST = 0.05
"""Most of its own time that the watching process spends looking."""
_COLLECTIVES, _MOST = 256, 100_000
"""Last collectives of a rank that one look compares, where there are several nodes, and most of all ranks together."""


Suspect = TypeVar("Suspect")


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    host: str
    cause: Literal["input", "host", "device"]
    """input: it waits for its batch; host: it launches late; device: it computes longer."""
    seconds: float
    """What it costs in each step."""
    share: float
    """The same as a share of wall time."""

    def in_words(self) -> str:
        """Return one line for a log."""
        why = {
            "input": "its data come late",
            "host": "its host is slow",
            "device": "its device is slow",
        }[self.cause]
        return (
            f"rank {self.rank} on {self.host} is a straggler ({why}): the others wait {self.seconds * 1e3:.0f} ms a step "
            f"for it, {self.share:.0%} of the time"
        )


@dataclass(frozen=True)
class SlowLink:
    """Ranks between which exchanges take longer than between others like them."""

    ranks: Ranks
    hosts: tuple[str, ...]
    """Hosts of these ranks, each once."""
    seconds: float
    """What it costs in each step."""
    share: float
    """The same as a share of wall time."""

    def in_words(self) -> str:
        """Return one line for a log."""
        where = f"on {self.hosts[0]}" if len(self.hosts) == 1 else f"between {' and '.join(self.hosts)}"
        return (
            f"the link of ranks {', '.join(map(str, self.ranks))} {where} is slow: their exchanges take "
            f"{self.seconds * 1e3:.0f} ms a step longer than those of others like them, {self.share:.0%} of the time, and "
            "the ranks themselves are no slower"
        )


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank in a step, a median over some steps."""

    rank: int
    step: float
    compute: float
    """Without waiting for other ranks."""
    wait: float
    """For the rank that comes last."""


@dataclass(frozen=True)
class RankTrace:
    """What a rank did last."""

    beat: Beat
    collectives: Sequence[Collective]
    """Its last ones that are measured, by the clock of the host that compares them."""
    host: str


def read_traces(folder: Path, ranks: Sequence[int], most: int | None = None) -> dict[int, RankTrace]:
    """Return what `ranks` of this node did last, those alone that have done two steps. most: collectives of each."""
    found = {}
    for rank in ranks:
        beat = read_beat(beat_file(folder, rank))
        if beat is not None and beat.step_seconds > 0.0:
            measured = [one for one in read_collectives(folder, rank) if one.measured]
            found[rank] = RankTrace(beat, measured if most is None else measured[-most:], host_name())
    return found


class OtherRanks:
    """The ranks of other nodes: none, where all are on this one."""

    def ask_traces(self, most: int) -> None:
        """Ask what they did last. most: collectives of each rank."""

    def take_traces(self) -> Mapping[int, RankTrace] | None:
        """Return what they did, as far as their nodes know it; None while one has not answered."""
        return {}


@dataclass(frozen=True)
class RankReport:
    """One look at all ranks that are watched together."""

    times: tuple[RankTime, ...]
    straggler: Straggler | None
    slow_link: SlowLink | None = None


def read_report(folder: Path) -> RankReport | None:
    """Return the newest look at the ranks of this node, and of others; None where there was none."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return None
    slow, link = found["straggler"], found["slow_link"]
    if link is not None:
        link = SlowLink(**{**link, "ranks": tuple(link["ranks"]), "hosts": tuple(link["hosts"])})
    times = tuple(RankTime(**row) for row in found["times"])
    return RankReport(times, None if slow is None else Straggler(**slow), link)


class StragglerWatch:
    """Looks at the ranks of a node, and of other nodes, again and again."""

    def __init__(
        self, folder: Path, ranks: Sequence[int], world_size: int = 0, others: OtherRanks | None = None
    ) -> None:
        """Watch `ranks` of this node, whose heartbeats are in `folder`, and the `others` of `world_size` ranks.

        world_size: 0 where there are no others.
        """
        self._folder = folder
        self._ranks = ranks
        self._world_size = world_size or len(ranks)
        self._others = others or OtherRanks()
        nodes = -(-self._world_size // len(ranks))
        self._pause_s = max(_LOOK_S, _NODE_S * nodes)
        # Ranks of one node alone are compared by all that they remember.
        self._most = None if nodes == 1 else max(1, min(_COLLECTIVES, _MOST // self._world_size))
        self._own: dict[int, RankTrace] | None = None
        """Of the ranks of this node, when the others were asked; None while they are not."""
        self._history = ArrivalHistory()
        self._transfers = TransferHistory()
        self._suspects: list[int | None] = []
        self._suspected_links: list[Ranks | None] = []
        self._next = self._took = 0.0
        """When to look next, and the seconds that went into the look under way."""

    def look(self) -> RankReport | None:
        """Look, if it is time to, and write what there is to see; return it."""
        started = time.monotonic()
        if self._world_size < 2 or (self._own is None and started < self._next):
            return None
        if self._own is None:
            # At one time on all nodes: what ranks remember reaches back for a second or less where steps are short.
            self._others.ask_traces(self._most or 0)
            self._own = read_traces(self._folder, self._ranks, self._most)
        others = self._others.take_traces()
        if others is None:
            self._took += time.monotonic() - started
            return None
        report = self._compare({**self._own, **others})
        self._own = None
        if report is not None:
            # A reader meets the old file or the new one. The folder may be going already.
            with suppress(OSError):
                part = self._folder / f"{FILE}.part"
                part.write_text(json.dumps(asdict(report)))
                os.replace(part, self._folder / FILE)
        took, self._took = self._took + time.monotonic() - started, 0.0
        self._next = started + max(self._pause_s, took / _COST)
        return report

    def _compare(self, traces: Mapping[int, RankTrace]) -> RankReport | None:
        """Return what the ranks did since the last look; None while one has not begun, or some do something else."""
        if len(traces) < self._world_size:
            return None
        collectives = {rank: trace.collectives for rank, trace in traces.items()}
        self._history.add(collectives)
        self._transfers.add(collectives)
        step_s = median(trace.beat.step_seconds for trace in traces.values())
        # What ranks do in an evaluation or a checkpoint is no step.
        if any(trace.beat.phase in ("evaluate", "checkpoint") for trace in traces.values()):
            return None
        lateness = self._history.lateness(WINDOW_STEPS * step_s)
        if lateness is None:
            return None
        self._suspects = [*self._suspects[1 - LOOKS :], suspect_rank(lateness)]
        slow = _find_agreed(self._suspects)
        cost = self._transfers.slowest(WINDOW_STEPS * step_s)
        self._suspected_links = [*self._suspected_links[1 - LOOKS :], suspect_link(cost)]
        link = None
        if cost is not None and _find_agreed(self._suspected_links) is not None:
            link = _describe_link(cost, traces, step_s)
        times = tuple(
            RankTime(rank, step_s, max(0.0, step_s * (1.0 - share)), step_s * share)
            for rank, share in sorted(lateness.waits.items())
        )
        straggler = None if slow is None else _describe_straggler(slow, lateness, traces, step_s)
        return RankReport(times, straggler, link)


def suspect_rank(lateness: Lateness) -> int | None:
    """Return the rank that costs the others most, where it is far ahead of the next one."""
    (most, rank), (next_most, _), *_ = sorted(((late, rank) for rank, late in lateness.late.items()), reverse=True)
    return rank if most > SHARE and most > LEAD * next_most else None


def suspect_link(cost: LinkCost | None) -> Ranks | None:
    """Return the ranks whose link costs the others most, where it is far ahead of the next one."""
    return cost.ranks if cost is not None and cost.share > SHARE and cost.share > LEAD * cost.next_share else None


def _find_agreed(suspects: Sequence[Suspect | None]) -> Suspect | None:
    """Return what the last looks all suspect; None where they do not agree, or have been too few."""
    return suspects[-1] if len(suspects) == LOOKS and len(set(suspects)) == 1 else None


def _describe_link(cost: LinkCost, traces: Mapping[int, RankTrace], step_s: float) -> SlowLink:
    hosts = tuple(dict.fromkeys(traces[rank].host for rank in cost.ranks))
    return SlowLink(cost.ranks, hosts, cost.share * step_s, cost.share)


def _describe_straggler(rank: int, lateness: Lateness, traces: Mapping[int, RankTrace], step_s: float) -> Straggler:
    share = lateness.late[rank]
    others = median(trace.beat.data_seconds for other, trace in traces.items() if other != rank)
    # A host that launches late makes its device late; a device that is late keeps its host as busy as the others.
    cause: Literal["input", "host", "device"] = "host"
    if lateness.on_device and lateness.host_late[rank] < 0.5 * share:
        cause = "device"
    if traces[rank].beat.data_seconds - others > 0.5 * share * step_s:
        cause = "input"
    return Straggler(rank, traces[rank].host, cause, share * step_s, share)
