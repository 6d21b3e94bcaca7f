"""Time that ends: whether it leaves room for another step and the last checkpoint, by what both took so far."""

from __future__ import annotations

import math
import time

from phalanx.launch.wall_time import Grace

ENDING_S = 5.0
"""Seconds left for what no run measures: closing logs, leaving the process group."""


class TimeLimit:
    """Tells when a run has to save and stop."""

    def __init__(self, granted_s: float | None, save_s: float) -> None:
        """Begin now. granted_s: seconds until the end; None for no end. save_s: what a save took before, or will by size."""
        self._end = math.inf if granted_s is None else time.monotonic() + granted_s
        self._save_s = save_s
        self._longest_s = 0.0
        """Longest pass of the loop so far: a step, with the checkpoint and the evaluation that were due behind it."""
        self._looked_at: float | None = None

    def is_near(self, save_s: float, passes: int) -> bool:
        """Return whether the run has to stop behind its present step. Called once a pass of the training loop.

        save_s: time of the newest save; 0 where it is not known. passes: of the loop that come before the run can stop.
        """
        now = time.monotonic()
        # The first pass compiles, and none of those to come does.
        if self._looked_at is not None:
            self._longest_s = max(self._longest_s, now - self._looked_at)
        self._looked_at = now
        self._save_s = max(self._save_s, save_s)
        # Twice: one save may still be under way in the background, and storage is slower at times.
        return self._end - now < 2.0 * self._save_s + passes * self._longest_s + ENDING_S


class GraceCheck:
    """Warns, once, of a checkpoint that takes longer than ranks have once they are told to stop."""

    def __init__(self, grace: Grace | None) -> None:
        self._grace = grace

    def warn(self, save_s: float) -> str | None:
        """Return the warning; None where there is time enough, or it was given. save_s: what a save took, or is to take."""
        grace = self._grace
        if grace is None or save_s <= grace.seconds:
            return None
        self._grace = None
        # As the wall time does: one save may be under way, another follows it.
        wanted = math.ceil(2.0 * save_s + ENDING_S)
        remedy = "a smaller checkpoint.every loses less" if grace.option is None else f"give {grace.option} {wanted}"
        return (
            f"warning: a checkpoint takes about {save_s:.0f} s, longer than the {grace.seconds:g} s that {grace.whose} "
            f"ranks that are told to stop: they would be killed before it is whole, and go on from the one before; {remedy}"
        )
