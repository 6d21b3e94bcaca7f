"""Reports of all ranks to rank 0 through a store, which needs no collective: ranks that stay silent are named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from phalanx.errors import PhalanxError
from phalanx.hardware.doctor.finding import format_ranks
from phalanx.layout.mesh import Ranks

_KEY = "doctor"


class RankReports:
    """Collects reports of the ranks that share `store`. All ranks make the same calls in the same order."""

    def __init__(self, store: dist.Store, ranks: Ranks, patience_s: float) -> None:
        """Use `store`. patience_s: seconds that rank 0 waits for the slowest report."""
        self._store, self._ranks, self._patience_s = store, ranks, patience_s

    def gather(self, about: str, mine: Any) -> list[Any]:
        """Return the reports of all ranks, in their order, on rank 0; on other ranks `[mine]`, once rank 0 has all reports.

        about: what the reports are about, in one word. mine: this rank's report, as JSON can carry it. Raises PhalanxError
        where a rank stays silent; on rank 0 the message names those ranks.
        """
        self._store.set(f"{_KEY}/{about}/{self._ranks.rank}", json.dumps(mine))
        return self._collect(about) if self._ranks.first else [self._wait_for_rank_0(about, mine)]

    def _collect(self, about: str) -> list[Any]:
        keys = [f"{_KEY}/{about}/{rank}" for rank in range(self._ranks.world_size)]
        came = _wait_until(lambda: self._store.check(keys), self._patience_s)
        missing = [] if came else [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        self._store.set(f"{_KEY}/{about}/heard", "no" if missing else "yes")
        if missing:
            self._wait_for_leavers(len(keys) - len(missing))
            raise PhalanxError(
                f"{format_ranks(missing)} of {self._ranks.world_size:,} did not say their {about} within "
                f"{self._patience_s:.0f} s; look at the log of their nodes, or leave those nodes out"
            )
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait_for_rank_0(self, about: str, mine: Any) -> Any:
        key = f"{_KEY}/{about}/heard"
        # Rank 0 may itself start as late as the others may, and only then begins to wait for them.
        came = _wait_until(lambda: self._store.check([key]), 2 * self._patience_s)
        if not came or self._store.get(key) != b"yes":
            self.end()
            who = "not all ranks; rank 0 names those that are missing" if came else "not even rank 0"
            raise PhalanxError(f"ranks did not say their {about} in time: {who}")
        return mine

    def end(self) -> None:
        """Leave; rank 0, whose end may end the store, waits up to 10 s for the others to leave first."""
        if self._ranks.first:
            self._wait_for_leavers(self._ranks.world_size)
        else:
            self._store.add(f"{_KEY}/left", 1)

    def _wait_for_leavers(self, present: int) -> None:
        _wait_until(lambda: self._store.add(f"{_KEY}/left", 0) >= present - 1, 10.0)


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `condition` became true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
