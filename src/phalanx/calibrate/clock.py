"""Seconds of a call on a device: medians over samples of many calls each, without what the host takes to issue them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.cluster.device import Moment, synchronize

Call = Callable[[], object]

_SHORT_S = 2e-3
"""Calls that take less are queued behind other work, so that the device never waits for the host between them."""
_QUEUED = 50
"""Short calls in a sample: few enough for the host to issue while the work in front of them runs."""
_BLOCKER = 8192
"""Sides of the product in front of them."""


@dataclass(frozen=True)
class Clock:
    """Times calls on one device."""

    device: torch.device
    span_s: float
    """What a sample takes, about. Samples follow one another without a pause: the device gets as warm, and its clocks as
    low, as in training."""
    samples: int = 5

    def seconds(self, call: Call, *, calls: int | None = None) -> float:
        """Of one call, the median over samples. calls: in a sample; where all ranks have to make equally many, say so."""
        call()
        first = self._wall(call)
        if calls is None:
            calls = max(1, min(_QUEUED if first < _SHORT_S else 1000, round(self.span_s / max(first, 1e-6))))
        if self.device.type == "cpu":
            return statistics.median(self._wall(call, calls) for _ in range(self.samples))
        return statistics.median(self._on_device(call, calls, first < _SHORT_S) for _ in range(self.samples))

    def host_seconds(self, call: Call, *, calls: int | None = None) -> float:
        """What the host takes to issue `call`, the median: for calls that the device does faster than that. calls: as for
        `seconds`."""
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

    def _on_device(self, call: Call, calls: int, short: bool) -> float:
        if short:
            blocker = _blocker(self.device)
            for _ in range(3):
                torch.mm(blocker, blocker)
        start = Moment(self.device)
        for _ in range(calls):
            call()
        end = Moment(self.device)
        synchronize(self.device)
        return end.seconds_since(start) / calls


_blockers: dict[torch.device, torch.Tensor] = {}


def _blocker(device: torch.device) -> torch.Tensor:
    if device not in _blockers:
        _blockers[device] = torch.randn(_BLOCKER, _BLOCKER, device=device, dtype=torch.bfloat16)
    return _blockers[device]
