"""Ranks that the others of their node wait for, step after step: which, by how much, and whether host or device is slow.

The process that watches a node looks; what it finds lies in the folder of heartbeats, where the first rank reads it for its
logs.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from phalanx.launch.collectives import ArrivalHistory, Lateness, read_collectives
from phalanx.launch.heartbeat import Beat, beat_file, read_beat

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
_COST = 0.05
"""Most of its own time that the watching process spends looking."""


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
class RankTime:
    """Seconds of a rank in a step, a median over some steps."""

    rank: int
    step: float
    compute: float
    """Without waiting for other ranks."""
    wait: float
    """For the rank that comes last."""


@dataclass(frozen=True)
class RankReport:
    """One look at the ranks of a node."""

    times: tuple[RankTime, ...]
    straggler: Straggler | None


def read_report(folder: Path) -> RankReport | None:
    """Return the newest look at the ranks of this node; None where there was none."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return None
    slow = found["straggler"]
    return RankReport(tuple(RankTime(**row) for row in found["times"]), None if slow is None else Straggler(**slow))


class StragglerWatch:
    """Looks at the ranks of a node again and again."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        """Watch `ranks`, whose heartbeats are in `folder`."""
        self._folder = folder
        self._ranks = ranks
        self._history = ArrivalHistory()
        self._suspects: list[int | None] = []
        self._next = 0.0

    def look(self) -> RankReport | None:
        """Look, if it is time to, and write what there is to see; return it."""
        started = time.monotonic()
        if started < self._next or len(self._ranks) < 2:
            return None
        report = self._compare()
        if report is not None:
            # A reader meets the old file or the new one. The folder may be going already.
            with suppress(OSError):
                part = self._folder / f"{FILE}.part"
                part.write_text(json.dumps(asdict(report)))
                os.replace(part, self._folder / FILE)
        took = time.monotonic() - started
        self._next = started + max(_LOOK_S, took / _COST)
        return report

    def _compare(self) -> RankReport | None:
        """Return what the ranks did since the last look; None while one has not begun, or some do something else."""
        beats = {rank: read_beat(beat_file(self._folder, rank)) for rank in self._ranks}
        known = {rank: beat for rank, beat in beats.items() if beat is not None and beat.step_seconds > 0.0}
        if len(known) < len(self._ranks):
            return None
        self._history.add({rank: read_collectives(self._folder, rank) for rank in self._ranks})
        step_s = median(beat.step_seconds for beat in known.values())
        # What ranks do in an evaluation or a checkpoint is no step.
        if any(beat.phase in ("evaluate", "checkpoint") for beat in known.values()):
            return None
        lateness = self._history.lateness(WINDOW_STEPS * step_s)
        if lateness is None:
            return None
        self._suspects = [*self._suspects[1 - LOOKS :], suspect_rank(lateness)]
        agreed = len(self._suspects) == LOOKS and len(set(self._suspects)) == 1
        slow = self._suspects[-1] if agreed else None
        times = tuple(
            RankTime(rank, step_s, max(0.0, step_s * (1.0 - share)), step_s * share)
            for rank, share in sorted(lateness.waits.items())
        )
        return RankReport(times, None if slow is None else _describe_straggler(slow, lateness, known, step_s))


def suspect_rank(lateness: Lateness) -> int | None:
    """Return the rank that costs the others most, where it is far ahead of the next one."""
    (most, rank), (next_most, _), *_ = sorted(((late, rank) for rank, late in lateness.late.items()), reverse=True)
    return rank if most > SHARE and most > LEAD * next_most else None


def _describe_straggler(rank: int, lateness: Lateness, beats: Mapping[int, Beat], step_s: float) -> Straggler:
    share = lateness.late[rank]
    others = median(beat.data_seconds for other, beat in beats.items() if other != rank)
    # A host that launches late makes its device late; a device that is late keeps its host as busy as the others.
    cause: Literal["input", "host", "device"] = "host"
    if lateness.on_device and lateness.host_late[rank] < 0.5 * share:
        cause = "device"
    if beats[rank].data_seconds - others > 0.5 * share * step_s:
        cause = "input"
    return Straggler(rank, platform.node(), cause, share * step_s, share)
