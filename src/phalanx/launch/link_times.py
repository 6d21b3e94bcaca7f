"""How long collectives take once all of their ranks have come: which ranks have a slow link between them.

Groups of like shape that other groups join, such as the tensor-parallel pairs of data-parallel ranks, run one program: what
takes longer between the ranks of one of them, step after step, is their link, as long as each of these ranks is as quick
as others after what it exchanges elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from phalanx.launch.collectives import CHUNKS, Collective, match_collectives, moment_of

_KEPT = 20_000
"""Collectives that are remembered."""
_OWN = 0.25
"""Share of what a link seems to cost in each collective that its ranks may be late after others: more is their own doing."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """One collective of some ranks."""

    moment: float
    """When the last of them entered it, by the clock of the host."""
    ranks: Ranks
    seconds: float
    """From then until the first of them goes on: of a device the collective alone, of a host what it computes next too."""
    lag_s: dict[int, float]
    """How much later each rank goes on to its next collective than the first of them; empty where devices measure."""


@dataclass(frozen=True)
class LinkCost:
    """Ranks whose collectives take longer than those of others like them."""

    ranks: Ranks
    share: float
    """Share of wall time that it takes longer."""
    next_share: float
    """The same of the group that comes next."""


class TransferHistory:
    """Keeps how long collectives took, from records that overlap in time or leave gaps."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, str], int], Transfer] = {}
        """By sequence and number, in the order in which they were found."""

    def add(self, records: Mapping[int, Sequence[Collective]]) -> None:
        """Take up each rank's last collectives of all groups."""
        measured = {rank: [one for one in found if one.measured] for rank, found in records.items()}
        if len(measured) < 2 or not all(measured.values()):
            return
        # Outside of what all remember, what would be compared is incomplete.
        known_from = max(min(one.entered_s for one in mine) for mine in measured.values())
        known_until = min(max(one.entered_s for one in mine) for mine in measured.values())
        shared = [ranks for ranks in match_collectives(measured) if known_from <= moment_of(ranks) <= known_until]
        shared.sort(key=moment_of)
        for key, transfer in _measure_transfers(shared):
            self._known.setdefault(key, transfer)
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def slowest(self, seconds: float) -> LinkCost | None:
        """Return the ranks whose collectives cost most beside those of groups like theirs, over the last `seconds`.

        None where less is known, or no group is like another.
        """
        newest = max((one.moment for one in self._known.values()), default=0.0)
        recent = [one for one in self._known.values() if one.moment > newest - seconds]
        if len(recent) < 2 * CHUNKS or len(recent) == len(self._known):
            return None
        costs = []
        shares = _shares_of_time(recent, newest, seconds)
        for alike in _groups_alike(set(shares)):
            for ranks in alike:
                others = [median(shares[other][chunk] for other in alike if other != ranks) for chunk in range(CHUNKS)]
                excess = median(mine - usual for mine, usual in zip(shares[ranks], others, strict=True))
                costs.append((excess, ranks, alike))
        if not costs:
            return None
        excess, ranks, alike = max(costs)
        count = sum(one.ranks == ranks for one in recent)
        if _own_lag(recent, ranks) > _OWN * excess * seconds / count:
            return None
        following = max(cost for cost, other, group in costs if group == alike and other != ranks)
        return LinkCost(ranks, excess, max(0.0, following))


def _measure_transfers(
    shared: Sequence[Mapping[int, Collective]],
) -> Iterator[tuple[tuple[tuple[str, str], int], Transfer]]:
    """Yield the key and the transfer of each collective that all of its ranks have gone on from. shared: in their order."""
    gone_on: list[dict[int, float]] = [{} for _ in shared]
    last: dict[int, int] = {}
    for place, ranks in enumerate(shared):
        for rank, one in ranks.items():
            if rank in last:
                before = shared[last[rank]]
                # A rank that did not wait for the last collective had gone on already.
                released = moment_of(before)
                gone_on[last[rank]][rank] = one.entered_s - min(released, one.entered_s)
            last[rank] = place
    for ranks, gone in zip(shared, gone_on, strict=True):
        one = next(iter(ranks.values()))
        stays = [each.device_s for each in ranks.values() if each.device_s is not None]
        on_device = len(stays) == len(ranks)
        if not on_device and len(gone) < len(ranks):
            continue
        # The rank that comes last to a device's collective waits for nobody.
        seconds = min(stays) if on_device else min(gone.values())
        lag = {} if on_device else {rank: each - seconds for rank, each in gone.items()}
        yield (one.sequence, one.number), Transfer(moment_of(ranks), tuple(sorted(ranks)), seconds, lag)


def _groups_alike(groups: set[Ranks]) -> list[tuple[Ranks, ...]]:
    """Return groups that run one program: of as many ranks, as far apart, and joined by smaller groups than that of all.

    Stages of a pipeline are joined by none, and need not compute alike.
    """
    everyone = set().union(*groups)
    joined = {ranks: ranks for ranks in groups}

    def root(ranks: Ranks) -> Ranks:
        while joined[ranks] != ranks:
            ranks = joined[ranks]
        return ranks

    smaller = sorted(ranks for ranks in groups if len(ranks) < len(everyone))
    first_of: dict[int, Ranks] = {}
    for ranks in smaller:
        for rank in ranks:
            joined[root(ranks)] = root(first_of.setdefault(rank, ranks))
    found: dict[tuple[Ranks, Ranks], list[Ranks]] = defaultdict(list)
    for ranks in smaller:
        found[tuple(rank - ranks[0] for rank in ranks), root(ranks)].append(ranks)
    return [tuple(alike) for alike in found.values() if len(alike) > 1]


def _shares_of_time(recent: Sequence[Transfer], newest: float, seconds: float) -> dict[Ranks, list[float]]:
    """Return the share of each chunk of the last `seconds` that collectives took, by their ranks."""
    found: dict[Ranks, list[float]] = defaultdict(lambda: [0.0] * CHUNKS)
    for one in recent:
        chunk = min(CHUNKS - 1, int((newest - one.moment) / seconds * CHUNKS))
        found[one.ranks][chunk] += one.seconds / (seconds / CHUNKS)
    return found


def _own_lag(recent: Sequence[Transfer], ranks: Ranks) -> float:
    """Return the seconds that each of `ranks` is late after a collective of another group, the median over them."""
    late: dict[int, list[float]] = {rank: [] for rank in ranks}
    for one in recent:
        if one.ranks != ranks:
            for rank in one.lag_s.keys() & late.keys():
                late[rank].append(one.lag_s[rank])
    return median(median(lags) if lags else 0.0 for lags in late.values())
