"""Reads of PyTorch's flight recorders which rank of a node never entered a collective, and which comes last to all.

Every rank writes its last collectives to a file (see `heartbeat`); the process that watches reads them. No torch here.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.launch.heartbeat import collectives_file

RECORDER_VARIABLES = {"TORCH_FR_BUFFER_SIZE": "512", "TORCH_NCCL_ENABLE_TIMING": "1"}
"""Environment in which PyTorch remembers so many of a rank's last collectives, and NCCL measures when each begins on the
device and how long it takes there. Set before PyTorch is loaded: gloo of 2.10 reads it then."""


@dataclass(frozen=True)
class Collective:
    """One collective as one rank entered it."""

    group: str
    """Name of its process group, the same on all of its ranks."""
    number: int
    """Place among the collectives of that group and backend, from 1."""
    name: str
    """all_reduce, all_gather and so on."""
    entered_s: float
    """When this rank entered it, by the clock of the host."""
    device_s: float | None
    """How long it took on the device, waiting for others included; None where nothing measures that."""
    finished: bool
    began: bool = False
    """Whether the rank's device is known to have begun it; without a device nothing tells."""
    backend: str = "gloo"

    @property
    def sequence(self) -> tuple[str, str]:
        """What its number counts in: a group has one sequence for each backend."""
        return self.backend, self.group

    @property
    def measured(self) -> bool:
        """Whether it is done and all is known of it: a device's time comes a moment after its end."""
        return self.finished and (self.device_s is not None or not self.began)


def read_collectives(folder: Path, rank: int) -> list[Collective]:
    """Return the last collectives of a rank in their order; none where it has written none yet."""
    try:
        records = json.loads(collectives_file(folder, rank).read_text())
    except (OSError, ValueError):
        return []
    return [_parse_entry(entry) for record in records for entry in record.get("entries", ()) if not entry.get("is_p2p")]


def _parse_entry(entry: Mapping[str, Any]) -> Collective:
    duration = entry.get("duration_ms")
    name, description = (*entry["process_group"], "")[:2]
    backend, _, operation = str(entry["profiling_name"]).rpartition(":")
    # What gloo has done it calls "scheduled" for ever; both backends note that they are done with a collective.
    state = entry.get("state")
    return Collective(
        group=f"{name} {'' if description == 'undefined' else description}".strip(),
        number=int(entry["collective_seq_id"]),
        # NCCL calls a gather into one tensor _all_gather_base.
        name=operation.strip("_").removesuffix("_base"),
        entered_s=entry["time_created_ns"] / 1e9,
        device_s=None if duration is None else duration / 1e3,
        finished=bool(entry.get("retired")) or state == "completed",
        began=state in ("started", "completed"),
        backend=backend,
    )


def absent_ranks(records: Mapping[int, Sequence[Collective]]) -> tuple[list[int], list[str]]:
    """Return the ranks that others wait for and that wait for nobody, and a sentence on each collective that is held up.

    A rank is waited for where it never entered the collective, or where its device never began it. Those that are held up
    in another group themselves are left out, unless all are. records: each rank's last collectives. Only ranks that have
    used a group before are known to belong to it.
    """
    members: dict[tuple[str, str], dict[int, _Progress]] = defaultdict(dict)
    for rank, collectives in records.items():
        for one in collectives:
            members[one.sequence].setdefault(rank, _Progress()).add(one)
    absent: dict[int, None] = {}
    held_up: set[int] = set()
    sentences = []
    for (_, group), ranks in members.items():
        found = _find_held_up(ranks)
        if found is None:
            continue
        absent |= dict.fromkeys(found.late)
        held_up |= set(found.waiting)
        sentences.append(found.in_words(group))
    return [rank for rank in absent if rank not in held_up] or list(absent), sentences


class _Progress:
    """How far one rank has come in one sequence of collectives."""

    def __init__(self) -> None:
        self.entered: dict[int, Collective] = {}
        self.finished = 0
        """Number of the last collective that is done; all before it are, in whatever state they were recorded."""

    def add(self, one: Collective) -> None:
        """Take up a collective. Several records of one number are one launch, which begins and ends as a whole."""
        known = self.entered.get(one.number)
        if known is None or (one.finished, one.began) > (known.finished, known.began):
            self.entered[one.number] = one
        if one.finished:
            self.finished = max(self.finished, one.number)

    @property
    def pending(self) -> Collective | None:
        """The first collective that was entered and is not done; None while there is none."""
        return min(
            (one for one in self.entered.values() if one.number > self.finished),
            key=lambda one: one.number,
            default=None,
        )


@dataclass(frozen=True)
class _HeldUp:
    """A collective in which ranks wait for others."""

    collective: Collective
    waiting: list[int]
    late: list[int]
    entered: bool
    """Whether the hosts of those that are late have entered it, and only their devices have not come to it."""

    def in_words(self, group: str) -> str:
        """Return one sentence for a report."""
        late = _name_ranks(self.late)
        who = f"the device of {late} never began" if self.entered else f"{late} never entered"
        verb = "waits" if len(self.waiting) == 1 else "wait"
        return (
            f"{who} {self.collective.name} {self.collective.number:,} of group {group}, in which "
            f"{_name_ranks(self.waiting)} {verb}"
        )


def _find_held_up(ranks: Mapping[int, _Progress]) -> _HeldUp | None:
    """Return the collective of a sequence that the ranks furthest ahead wait in; None where nobody waits for another."""
    pending = {rank: one for rank, progress in ranks.items() if (one := progress.pending) is not None}
    if not pending:
        return None
    newest = max(pending.values(), key=lambda one: one.number)
    ahead = {rank: one for rank, one in pending.items() if one.number == newest.number}
    behind = {rank for rank, one in pending.items() if one.number < newest.number}
    never = sorted(rank for rank, progress in ranks.items() if max(progress.entered) < newest.number)
    # Launches queue on a device behind what it has to do before: one that never began there was not held up by others.
    begun = [rank for rank, one in ahead.items() if one.began]
    not_begun = sorted(behind | {rank for rank, one in ahead.items() if begun and not one.began})
    late = never or not_begun
    waiting = sorted(rank for rank in ahead if rank not in late and (rank in begun or not begun))
    return _HeldUp(newest, waiting, late, entered=not never) if late and waiting else None


def _name_ranks(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


@dataclass(frozen=True)
class Arrival:
    """One collective that ranks of a node took part in: who came last, and who waited how long."""

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
    host_last: int
    """The rank whose host launched it last."""
    host_late_s: float
    """By how much, after the last but one."""


@dataclass(frozen=True)
class Lateness:
    """How late each rank of a node comes to the collectives they share. Shares are medians over time."""

    late: dict[int, float]
    """Share of wall time that the others would gain if the rank came as early as the last but one."""
    waits: dict[int, float]
    """Share of wall time that each rank waits for the last one."""
    host_late: dict[int, float]
    """The same as `late` of the hosts that launch collectives, whatever their devices then do."""
    on_device: bool
    """Whether devices measured how late ranks come, and not the hosts that launch their work."""


CHUNKS = 8
"""Parts that the time is cut into: their median does not see what happened once, such as a garbage collection."""
_KEPT = 20_000
"""Collectives that are remembered."""


class ArrivalHistory:
    """Keeps what is known of the last collectives of a node's ranks, from records that overlap in time or leave gaps."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque(maxlen=_KEPT)

    def add(self, records: Mapping[int, Sequence[Collective]]) -> None:
        """Take up each rank's last collectives of all groups; those that all of a group's ranks here are done with count."""
        entered = {rank: [one for one in found if one.measured] for rank, found in records.items()}
        if len(entered) < 2 or not all(entered.values()):
            return
        # Beyond it somebody's record is not yet written: what would be compared there is incomplete.
        known_until = min(max(one.entered_s for one in mine) for mine in entered.values())
        shared = [ranks for ranks in match_collectives(entered) if moment_of(ranks) <= known_until]
        shared.sort(key=moment_of)
        newest = self._arrivals[-1].moment if self._arrivals else 0.0
        pasts = {rank: _Past() for rank in entered}
        before = 0.0
        for ranks in shared:
            moment = moment_of(ranks)
            charged = dict.fromkeys(ranks, 0.0)
            # The first of a record only tells when the time of the second begins.
            if before and all(pasts[rank].knows(one) for rank, one in ranks.items()):
                arrival = _compare_arrivals(pasts, ranks, moment - max(newest, before))
                charged[arrival.last] = arrival.late_s
                if moment > newest:
                    self._arrivals.append(arrival)
                    newest = moment
            before = moment
            shortest = min(one.device_s or 0.0 for one in ranks.values())
            for rank, one in ranks.items():
                pasts[rank].add(one, moment, charged[rank] + (one.device_s or 0.0) - shortest)

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
        ranks = sorted({rank for arrival in recent for rank in arrival.waits})
        late = [dict.fromkeys(ranks, 0.0) for _ in range(CHUNKS)]
        host_late = [dict.fromkeys(ranks, 0.0) for _ in range(CHUNKS)]
        waits = [dict.fromkeys(ranks, 0.0) for _ in range(CHUNKS)]
        chunk_s, passed = known / CHUNKS, 0.0
        on_device = 2 * sum(arrival.on_device for arrival in recent) > len(recent)
        for arrival in recent:
            chunk = min(CHUNKS - 1, int(passed / chunk_s))
            passed += arrival.span_s
            # Beside those of devices hosts exchange a little among themselves, as they save, which says nothing of steps.
            if on_device and not arrival.on_device:
                continue
            late[chunk][arrival.last] += arrival.late_s / chunk_s
            host_late[chunk][arrival.host_last] += arrival.host_late_s / chunk_s
            for rank, wait in arrival.waits.items():
                waits[chunk][rank] += wait / chunk_s
        return Lateness(
            late={rank: median(part[rank] for part in late) for rank in ranks},
            host_late={rank: median(part[rank] for part in host_late) for rank in ranks},
            waits={rank: median(part[rank] for part in waits) for rank in ranks},
            on_device=on_device,
        )


def match_collectives(entered: Mapping[int, Sequence[Collective]]) -> Iterator[dict[int, Collective]]:
    """Yield each collective of two ranks or more, of all that are known to belong to its group, by rank."""
    members: dict[tuple[str, str], dict[int, dict[int, Collective]]] = defaultdict(dict)
    for rank, mine in entered.items():
        for one in mine:
            members[one.sequence].setdefault(rank, {})[one.number] = one
    for ranks in members.values():
        if len(ranks) > 1:
            for number in set.intersection(*map(set, ranks.values())):
                yield {rank: mine[number] for rank, mine in ranks.items()}


class _Past:
    """What one rank did before a collective, in whatever groups."""

    def __init__(self) -> None:
        self.last: Collective | None = None
        self.released = 0.0
        """When all ranks had entered the last one, by the clock of the host."""
        self._explained = 0.0
        """Seconds by which it has come later to what followed, as far as collectives so far have told why: its device waited
        for others there, or was itself late."""
        self._explained_by: dict[tuple[str, str], float] = {}
        """The same at the last collective of each group."""

    def add(self, one: Collective, moment: float, explained_s: float) -> None:
        """Take up a collective that all entered by `moment`, in which the device waited or was late for `explained_s`."""
        self.last, self.released = one, moment
        self._explained += explained_s
        self._explained_by[one.sequence] = self._explained

    def knows(self, one: Collective) -> bool:
        """Return whether there is one before to compare with: on a device of the same group."""
        return one.sequence in self._explained_by if one.device_s is not None else self.last is not None

    def host_seconds(self, one: Collective) -> float:
        """Return how long the host took to enter `one`, since all had come to the one before."""
        assert self.last is not None
        # A rank that was here before all had come to the last one did not wait there: its lag from then is no new one.
        return one.entered_s - (self.released if one.entered_s >= self.released else self.last.entered_s)

    def device_lag(self, one: Collective) -> float:
        """Return how late the device came to `one` by its own doing, up to a constant that its group shares."""
        assert one.device_s is not None
        # What other groups have seen meanwhile made it late to this one, and counts there.
        return -one.device_s - (self._explained - self._explained_by[one.sequence])


def moment_of(ranks: Mapping[int, Collective]) -> float:
    """Return when the last rank entered a collective, by the clock of the host."""
    return max(one.entered_s for one in ranks.values())


def _compare_arrivals(pasts: Mapping[int, _Past], ranks: Mapping[int, Collective], span_s: float) -> Arrival:
    """Return who came last to a collective by its own doing since those that each rank took part in before.

    A rank that was held up in another group comes late to this one and is not to blame: its time counts from when it was
    released there. A host that launches work for a device runs ahead of it, and all hosts are early. There the time that the
    collective took on each device counts, where it was measured: the rank that comes last waits for nobody, so its stay is
    the shortest.
    """
    hosts = {rank: pasts[rank].host_seconds(one) for rank, one in ranks.items()}
    on_device = all(one.device_s is not None for one in ranks.values())
    own = {rank: pasts[rank].device_lag(one) for rank, one in ranks.items()} if on_device else hosts
    (last, late_s), (host_last, host_late_s) = _find_last(own), _find_last(hosts)
    waits = {rank: own[last] - mine for rank, mine in own.items()}
    return Arrival(moment_of(ranks), span_s, last, late_s, waits, on_device, host_last, host_late_s)


def _find_last(seconds: Mapping[int, float]) -> tuple[int, float]:
    """Return the rank with the most seconds, and how many more it has than the next."""
    last = max(seconds, key=seconds.__getitem__)
    return last, seconds[last] - sorted(seconds.values())[-2]
