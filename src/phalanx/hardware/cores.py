"""The CPU cores of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping


def available_cores() -> int:
    """Those it may run on: taskset and Slurm give a process fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def passive_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that has idle OpenMP threads sleep, none where `environment` says already how they wait.

    By default they spin, which takes a core from the thread that they wait for wherever there are fewer cores than threads.
    It has to be set before torch is loaded.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}
