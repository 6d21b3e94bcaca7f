"""The host this process runs on: its CPU cores, and processes that its kernel kills because memory ran out.

This module imports nothing that takes time, so that a launcher may ask before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KILLED_FOR_MEMORY = "killed by the kernel because the memory of this host, or of this job, ran out"
"""What messages say of a process that the out-of-memory killer ended."""
LESS_MEMORY = (
    "lower layout.microbatch, set layout.recompute=full, or shard over more ranks (layout.dp_shard, layout.tp)"
)
"""What messages advise where memory ran out."""


def available_cores() -> int:
    """Return the number of cores this process may run on; taskset and Slurm give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be taken on this host, by the limits of its control group too; None where no file of
    the kernel says so. root: of the file system."""
    free: list[int] = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        # Of the second version, in which all limits are one tree. A container sees its own group as the root.
        group = (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except (OSError, ValueError, IndexError):
        return min(free, default=None)
    tree = root / "sys/fs/cgroup"
    for folder in (tree / group, *(tree / group).parents):
        try:
            limit, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
            counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            # No limit ("max"), or no such file.
            continue
        # Pages of files are given up where memory is short.
        free.append(limit - used + int(counted.get("inactive_file", 0)) + int(counted.get("active_file", 0)))
    return min(free, default=None)


def passive_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets idle OpenMP threads sleep, or nothing where `environment` already says how they wait.

    Idle threads spin by default, which takes a core from the thread they wait for wherever there are fewer cores than
    threads. The variable must be set before torch is loaded.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def prefer_to_be_killed() -> None:
    """Ask the kernel to kill this process and its children first when memory runs out, before the one that started it."""
    file = Path("/proc/self/oom_score_adj")
    if file.exists():
        file.write_text("500")


class KillCount:
    """Tells whether the kernel has killed processes for lack of memory since this object was made."""

    def __init__(self, counters: Path = Path("/proc/vmstat")) -> None:
        """Remember the count so far. counters: file of the kernel's counters."""
        self._counters = counters
        self._before = self._read_count()

    def grew(self) -> bool:
        """Return whether the kernel has killed since; False on systems that do not count (all but Linux)."""
        return self._read_count() > self._before

    def _read_count(self) -> int:
        try:
            lines = self._counters.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
