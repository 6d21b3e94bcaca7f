"""What PyTorch's flight recorder says of the ranks of a node: which never entered a collective, and which comes last to all.

Every rank writes its last collectives to a file (see `heartbeat`); the process that watches reads them. No torch here.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.launch.heartbeat import collectives_file


@dataclass(frozen=True)
class Collective:
    """One collective as one rank entered it."""

    group: str
    """Name of its process group, the same on all of its ranks."""
    number: int
    """Place among the collectives of that group, from 1."""
    name: str
    """all_reduce, all_gather and so on."""
    entered_s: float
    """When this rank entered it, by the clock of the host."""
    device_s: float | None
    """How long it took on the device, waiting for others included; None where nothing measures that."""
    finished: bool


def read_collectives(folder: Path, rank: int) -> list[Collective]:
    """Return the last collectives of a rank in their order; none where it has written none yet."""
    try:
        record = json.loads(collectives_file(folder, rank).read_text())
    except (OSError, ValueError):
        return []
    return [_parse_entry(entry) for entry in record.get("entries", ()) if not entry.get("is_p2p")]


def _parse_entry(entry: Mapping[str, Any]) -> Collective:
    duration = entry.get("duration_ms")
    name, description = (*entry["process_group"], "")[:2]
    return Collective(
        group=f"{name} {description}".strip(),
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).rpartition(":")[2],
        entered_s=entry["time_created_ns"] / 1e9,
        device_s=None if duration is None else duration / 1e3,
        finished=bool(entry.get("retired")),
    )


def absent_ranks(records: Mapping[int, Sequence[Collective]]) -> tuple[list[int], list[str]]:
    """Return the ranks that never entered a collective in which others of their group wait, and a sentence on each.

    records: each rank's last collectives. Only ranks that have used a group before are known to belong to it.
    """
    latest: dict[str, dict[int, Collective]] = defaultdict(dict)
    for rank, collectives in records.items():
        for one in collectives:
            known = latest[one.group].get(rank)
            if known is None or known.number < one.number:
                latest[one.group][rank] = one
    absent: dict[int, None] = {}
    sentences = []
    for group, members in latest.items():
        newest = max(members.values(), key=lambda one: one.number)
        late = sorted(rank for rank, one in members.items() if one.number < newest.number)
        waiting = sorted(rank for rank, one in members.items() if one.number == newest.number and not one.finished)
        if late and waiting:
            absent |= dict.fromkeys(late)
            sentences.append(
                f"{_name_ranks(late)} never entered {newest.name} {newest.number:,} of group {group}, in which "
                f"{_name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''}"
            )
    return list(absent), sentences


def _name_ranks(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


@dataclass(frozen=True)
class Arrival:
    """One collective that all ranks of a node took part in: who came last, and who waited how long."""

    moment: float
    """When the last rank entered it, by the clock of the host."""
    span_s: float
    """Wall time since the one before, as far as it is known what happened in between."""
    last: int
    late_s: float
    """What the others would gain if the last rank came as early as the last but one."""
    waits: dict[int, float]
    """Seconds that each rank waits for the last."""
    on_device: bool
    """Whether devices measured it themselves, rather than hosts as they launch it."""


@dataclass(frozen=True)
class Lateness:
    """How late each rank of a node comes to the collectives they share. Shares are medians over time."""

    late: dict[int, float]
    """Share of wall time that the others would gain if the rank came as early as the last but one."""
    waits: dict[int, float]
    """Share of wall time that each rank waits for the last one."""
    on_device: bool
    """Whether it is devices that are late, and not the hosts that launch their work."""


CHUNKS = 8
"""Parts that the time is cut into: their median does not see what happened once, such as a garbage collection."""
_KEPT = 20_000
"""Collectives that are remembered."""


class ArrivalHistory:
    """What is known of the last collectives of the ranks of a node, from records that overlap in time or leave gaps."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque(maxlen=_KEPT)

    def add(self, records: Mapping[int, Sequence[Collective]]) -> None:
        """Take up each rank's last collectives; those that all ranks have entered count."""
        entered = {rank: {(one.group, one.number): one for one in found} for rank, found in records.items()}
        if len(entered) < 2:
            return
        shared = [
            {rank: mine[key] for rank, mine in entered.items()} for key in set.intersection(*map(set, entered.values()))
        ]
        shared.sort(key=_moment)
        newest = self._arrivals[-1].moment if self._arrivals else 0.0
        # The first of a record only tells when the time of the second begins.
        for before, ranks in pairwise(shared):
            if _moment(ranks) > newest:
                self._arrivals.append(_compare_arrivals(before, ranks, _moment(ranks) - max(newest, _moment(before))))
                newest = _moment(ranks)

    def lateness(self, seconds: float) -> Lateness | None:
        """Return how late ranks came over the last `seconds` that are known; None where less is known."""
        known, recent = 0.0, []
        for arrival in reversed(self._arrivals):
            if known >= seconds:
                break
            known += arrival.span_s
            recent.append(arrival)
        if known < seconds or len(recent) < 2 * CHUNKS:
            return None
        ranks = list(recent[0].waits)
        late = [dict.fromkeys(ranks, 0.0) for _ in range(CHUNKS)]
        waits = [dict.fromkeys(ranks, 0.0) for _ in range(CHUNKS)]
        chunk_s, passed = known / CHUNKS, 0.0
        for arrival in recent:
            chunk = min(CHUNKS - 1, int(passed / chunk_s))
            passed += arrival.span_s
            late[chunk][arrival.last] += arrival.late_s / chunk_s
            for rank, wait in arrival.waits.items():
                waits[chunk][rank] += wait / chunk_s
        return Lateness(
            late={rank: median(part[rank] for part in late) for rank in ranks},
            waits={rank: median(part[rank] for part in waits) for rank in ranks},
            on_device=all(arrival.on_device for arrival in recent),
        )


def _moment(ranks: Mapping[int, Collective]) -> float:
    return max(one.entered_s for one in ranks.values())


def _compare_arrivals(before: Mapping[int, Collective], ranks: Mapping[int, Collective], span_s: float) -> Arrival:
    """Return who came last to a collective by its own doing since the one before.

    A host that launches work for a device runs ahead of it, and all hosts are early. There the time that the collective took
    on each device counts, where it was measured: the rank that comes last waits for nobody, so its stay is the shortest.
    """
    released = _moment(before)
    on_device = all(one.device_s is not None for one in ranks.values())

    def own_seconds(rank: int, one: Collective) -> float:
        if on_device:
            return -(one.device_s or 0.0)
        # A rank that was here before all had come to the last one did not wait there: its lag from then is no new one.
        return one.entered_s - (released if one.entered_s >= released else before[rank].entered_s)

    own = {rank: own_seconds(rank, one) for rank, one in ranks.items()}
    last = max(own, key=own.__getitem__)
    second = sorted(own.values())[-2]
    waits = {rank: own[last] - mine for rank, mine in own.items()}
    return Arrival(_moment(ranks), span_s, last, own[last] - second, waits, on_device)
