"""Stopping in good order: a first signal that asks for it ends the run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.launch.parent import ONE_WISH_S, STOP_SIGNALS, is_ignored

DIRECTORY_GONE = 1000
"""In place of a signal's number: the run directory is gone, and no step more can be kept. Outranks signals."""


class StopRequest:
    """Turns the first of `STOP_SIGNALS` into a wish to stop after the current step; a second one stops at once.

    Signals within `ONE_WISH_S` seconds of the first are the same wish.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._asked_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if not is_ignored(number):
                    self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number, self._asked_at = number, now
        elif now - self._asked_at >= ONE_WISH_S:
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)

    def agreed(self, device: torch.device) -> int:
        """The signal that any rank was sent, or 0; the same answer on every rank."""
        if not dist.is_initialized():
            return self.signal_number
        flag = torch.tensor(self.signal_number, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag)
