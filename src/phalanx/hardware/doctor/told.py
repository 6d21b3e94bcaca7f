"""What ranks tell rank 0 through a store, each by itself: one that says nothing is named, and keeps nobody else waiting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from phalanx.errors import PhalanxError
from phalanx.hardware.doctor.finding import rank_words
from phalanx.layout.mesh import Ranks

_KEY = "doctor"
_POLL_S = 0.02
_PARTING_S = 10.0
"""Seconds that rank 0 keeps the store for the others to leave."""


class Told:
    """The ranks of a job that have met in `store`. All of them make the same calls."""

    def __init__(self, store: dist.Store, ranks: Ranks, patience_s: float) -> None:
        """patience_s: seconds that any rank has to say something."""
        self._store, self._ranks, self._patience_s = store, ranks, patience_s

    def all(self, about: str, mine: Any) -> list[Any]:
        """What every rank says about something, by rank, on rank 0; elsewhere what this rank says, once rank 0 has heard it.

        mine: what JSON can carry. Raises PhalanxError where some rank says nothing in time; rank 0 names those.
        """
        self._store.set(f"{_KEY}/{about}/{self._ranks.rank}", json.dumps(mine))
        return self._heard(about) if self._ranks.first else [self._waited(about, mine)]

    def _heard(self, about: str) -> list[Any]:
        keys = [f"{_KEY}/{about}/{rank}" for rank in range(self._ranks.world_size)]
        came = _until(lambda: self._store.check(keys), self._patience_s)
        missing = [] if came else [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        self._store.set(f"{_KEY}/{about}/heard", "no" if missing else "yes")
        if missing:
            self._wait_for_parting(len(keys) - len(missing))
            raise PhalanxError(
                f"{rank_words(missing)} of {self._ranks.world_size:,} did not say their {about} within "
                f"{self._patience_s:.0f} s; look at the log of their nodes, or leave those nodes out"
            )
        return [json.loads(self._store.get(key)) for key in keys]

    def _waited(self, about: str, mine: Any) -> Any:
        key = f"{_KEY}/{about}/heard"
        # Rank 0 may begin to listen as late as it may begin to speak.
        came = _until(lambda: self._store.check([key]), 2 * self._patience_s)
        if not came or self._store.get(key) != b"yes":
            self.end()
            who = "not all ranks; rank 0 names those that are missing" if came else "not even rank 0"
            raise PhalanxError(f"ranks did not say their {about} in time: {who}")
        return mine

    def end(self) -> None:
        """Rank 0, with whom the store may go, leaves last."""
        if self._ranks.first:
            self._wait_for_parting(self._ranks.world_size)
        else:
            self._store.add(f"{_KEY}/left", 1)

    def _wait_for_parting(self, present: int) -> None:
        _until(lambda: self._store.add(f"{_KEY}/left", 0) >= present - 1, _PARTING_S)


def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether something has become true within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True
