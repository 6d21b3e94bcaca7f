"""A kernel that keeps a device busy for a while. Private names are used here alone."""

from __future__ import annotations

from functools import cache

import torch

_SAMPLE_CYCLES = 20_000_000
"""About ten milliseconds."""


def keep_device_busy(device: torch.device, seconds: float) -> None:
    """Have what is launched on the current stream of a CUDA or ROCm `device` from now on begin `seconds` later.

    The host does not wait.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(round(seconds * _cycles_per_second(device)))


@cache
def _cycles_per_second(device: torch.device) -> float:
    """Return how fast the counter of `device` runs that such a kernel counts by. Waits for the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The first launch loads the kernel.
    torch.cuda._sleep(1)
    begin.record()
    torch.cuda._sleep(_SAMPLE_CYCLES)
    end.record()
    end.synchronize()
    return 1e3 * _SAMPLE_CYCLES / float(begin.elapsed_time(end))
