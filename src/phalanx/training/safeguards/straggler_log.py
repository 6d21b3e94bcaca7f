"""Times of ranks in the logs of a run, and a line where one of them, or a link, holds up the others."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from phalanx.launch.heartbeat import Heartbeat
from phalanx.launch.stragglers import RankReport, read_report
from phalanx.report.run_log import SLOW_LINK_EVENT
from phalanx.training.logs import RunLog
from phalanx.training.metrics import StepMetrics

_LOOK_S = 0.5
"""Seconds between two looks at what the process that watches this node has found."""


class StragglerLog:
    """Takes up what the process that watches this node finds; see `launch.stragglers`."""

    def __init__(self, heartbeat: Heartbeat, log: RunLog) -> None:
        # Every rank of a node would find the same; the first rank's log alone goes anywhere.
        self._folder = heartbeat.folder if heartbeat.rank == 0 else None
        self._log = log
        self._next = 0.0
        self._last: RankReport | None = None
        self._known: int | None = None
        self._known_link: tuple[int, ...] | None = None

    def add_times(self, metrics: StepMetrics) -> StepMetrics:
        """Return `metrics` with the times of the ranks, where there are new ones, and say who has become slow."""
        now = time.monotonic()
        if self._folder is None or now < self._next:
            return metrics
        self._next = now + _LOOK_S
        report = read_report(self._folder)
        if report is None or report == self._last:
            return metrics
        self._last = report
        slow = report.straggler
        # Once for each rank that has become slow.
        before, self._known = self._known, None if slow is None else slow.rank
        if slow is not None and slow.rank != before:
            self._log.note(f"warning: {slow.in_words()}")
            self._log.event("straggler", metrics.step, **asdict(slow))
        link = report.slow_link
        link_before, self._known_link = self._known_link, None if link is None else link.ranks
        if link is not None and link.ranks != link_before:
            self._log.note(f"warning: {link.in_words()}")
            self._log.event(SLOW_LINK_EVENT, metrics.step, **asdict(link))
        return replace(
            metrics,
            node_compute_seconds=tuple(round(one.compute, 6) for one in report.times),
            node_wait_seconds=tuple(round(one.wait, 6) for one in report.times),
            straggler=None if slow is None else slow.rank,
            slow_link=None if link is None else link.ranks,
        )
