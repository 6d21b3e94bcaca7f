"""The CPU cores of this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Those it may run on: taskset and Slurm give a process fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
