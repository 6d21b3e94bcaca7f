"""Asynchronous steps: launching the next step while the device computes the last one.

A step ends with observations that the host reads (loss and gradient norm), and waits for. What the host does until the
next step's first kernel is launched (taking a batch, gathering parameters, filling in a captured graph) would leave the
device idle: a large part of a short step. So the observations of short steps are read when the step behind is launched
already. Long steps gain nothing, and who asks a run to stop would wait for two of them.

All ranks must do the same: a rank that stops a step earlier than the others leaves them waiting. So what decides, the
seconds of a step and the signals that ranks were sent, is agreed on beside the loss, and read with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.hardware.device import HostCopy, Moment

SHORT_S = 2.0
"""Steps that take less than this, seconds, are asynchronous."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still compute."""

    step: int
    lr: float
    observations: HostCopy
    """Loss and gradient norm, and what ranks agree on beside."""
    launched: Moment
    data_wait: float
    """Seconds that the launch waited for the batch."""
    stall: float
    """Seconds of a checkpoint before."""


class AsynchronousSteps:
    """Whether the host launches the next step before it reads what the last one gave. The same on all ranks."""

    def __init__(self, device: torch.device, *, allowed: bool) -> None:
        """Begin with steps that are read at once. allowed: never true where the host computes the steps itself."""
        self.device = device
        self.allowed = allowed
        self.ahead = False
        """Whether steps are asynchronous, where nothing else makes the host wait for one."""
        self.signal_number = 0
        """Signal that some rank was sent by the time of the last step that was read, or 0."""

    def share(self, observations: Tensor, signal_number: int, seconds: float) -> HostCopy:
        """Return the copy to `read` of a step's observations, float64 [n], and what ranks agree on; wait for nothing.

        signal_number: what this rank was sent, or 0. seconds: of the last step that was read.
        """
        if not self.allowed:
            return HostCopy(observations)
        agreed = torch.tensor([signal_number, seconds], dtype=torch.float64).to(self.device, non_blocking=True)
        if dist.is_initialized():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return HostCopy(torch.cat((observations, agreed)))

    def read(self, shared: HostCopy) -> list[float]:
        """Return the step's own observations once the device has computed them, and take up what ranks agreed on."""
        values: list[float] = shared.read()
        if self.allowed:
            *values, signal_number, seconds = values
            self.signal_number = int(signal_number)
            self.ahead = seconds < SHORT_S
        return values
