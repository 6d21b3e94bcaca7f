"""Times calls on a device: medians over samples of many calls each, without the time the host needs to issue them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from phalanx.hardware.device import Moment, synchronize

Call = Callable[[], object]

_SHORT_S = 2e-3
"""Calls shorter than this are queued behind other work, so that the device never waits for the host between them."""
_QUEUED = 50
"""Short calls in a sample."""
_BLOCKER = 8192
"""Rows and columns of the products queued before short calls."""
_BLOCKED = 2.0
"""Time of these products over the time in which the host issues the calls; more than 1, as a host is not always as quick."""
_ISSUED = 5
"""Calls over which the host's time to issue one is averaged."""


@dataclass(frozen=True)
class Clock:
    """Times calls on one device."""

    device: torch.device
    span_s: float
    """Seconds of a sample, about. Samples follow one another without a pause, so that the device gets as warm, and its
    clocks as low, as in training."""
    samples: int = 5

    def seconds(self, call: Call, *, calls: int | None = None) -> float:
        """Return the median seconds of one call.

        calls: number in a sample; give it where all ranks must make equally many, as for collectives.
        """
        # The first call compiles kernels, loads libraries and fills caches; it is not timed.
        call()
        first = self._wall(call)
        if calls is None:
            calls = max(1, min(_QUEUED if first < _SHORT_S else 1000, round(self.span_s / max(first, 1e-6))))
        if self.device.type == "cpu":
            return statistics.median(self._wall(call, calls) for _ in range(self.samples))
        blockers = 0 if first >= _SHORT_S else self._blockers(_BLOCKED * calls * self._issued(call))
        return statistics.median(self._on_device(call, calls, blockers) for _ in range(self.samples))

    def _issued(self, call: Call) -> float:
        """Return the seconds in which the host issues `call`, without waiting for the device."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(_ISSUED):
            call()
        issued = (time.perf_counter() - start) / _ISSUED
        synchronize(self.device)
        return issued

    def _blockers(self, seconds: float) -> int:
        """Return how many products keep the device busy for `seconds`."""
        blocker = _blocking_factor(self.device)
        return 1 + math.ceil(seconds / self._on_device(lambda: torch.mm(blocker, blocker), 3, 0))

    def host_seconds(self, call: Call, *, calls: int | None = None) -> float:
        """Return the median seconds in which the host issues `call`, which the device computes faster than that.

        calls: as for `seconds`.
        """
        call()
        if calls is None:
            calls = max(1, min(200, round(self.span_s / max(self._wall(call), 1e-6))))
        return statistics.median(self._wall(call, calls) for _ in range(self.samples))

    def _wall(self, call: Call, calls: int = 1) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(self.device)
        return (time.perf_counter() - start) / calls

    def _on_device(self, call: Call, calls: int, blockers: int) -> float:
        # While the device works on these, the host queues all calls: the device then never waits for it.
        if blockers:
            blocker = _blocking_factor(self.device)
            for _ in range(blockers):
                torch.mm(blocker, blocker)
        start = Moment(self.device)
        for _ in range(calls):
            call()
        end = Moment(self.device)
        synchronize(self.device)
        return end.seconds_since(start) / calls


@cache
def _blocking_factor(device: torch.device) -> torch.Tensor:
    return torch.randn(_BLOCKER, _BLOCKER, device=device, dtype=torch.bfloat16)
