"""Launching the next step while the device computes the last one.

A step ends with figures that the host reads, and it waits for them. What it does until the next step's first kernel is
launched (taking a batch, gathering parameters, filling in a recorded program) would leave the device idle: a large part of
a short step. So of short steps the figures are read when the step behind is launched already. Long steps gain nothing, and
who asks a run to stop would wait for two of them.

All ranks must do the same: a rank that stops a step earlier than the others leaves them waiting. So what decides, the
seconds of a step and the signals that ranks were sent, is agreed on beside the loss, and read with it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.device import HostCopy

SHORT_S = 2.0
"""Steps that take less than this, seconds, are launched ahead."""


class RunAhead:
    """Whether the host goes on to the next step before it reads what the last one gave. The same on all ranks."""

    def __init__(self, device: torch.device, *, allowed: bool) -> None:
        """allowed: never true where the host computes the steps itself."""
        self.device = device
        self.allowed = allowed
        self.ahead = False
        """Holds for steps that nothing else makes the host wait for."""
        self.signal_number = 0
        """That some rank was sent by the time of the last step that was read."""

    def told(self, found: Tensor, signal_number: int, seconds: float) -> HostCopy:
        """A step's figures, float64 [n], with what is to be agreed on behind them, for `read`; waits for nothing.

        signal_number: that this rank was sent, or 0. seconds: of the last step that was read.
        """
        if not self.allowed:
            return HostCopy(found)
        note = torch.tensor([signal_number, seconds], dtype=torch.float64).to(self.device, non_blocking=True)
        if dist.is_initialized():
            dist.all_reduce(note, op=dist.ReduceOp.MAX)
        return HostCopy(torch.cat((found, note)))

    def read(self, found: HostCopy) -> list[float]:
        """The step's own figures, once the device has computed them. Takes up what was agreed on with it."""
        values: list[float] = found.read()
        if self.allowed:
            *values, signal_number, seconds = values
            self.signal_number = int(signal_number)
            self.ahead = seconds < SHORT_S
        return values
