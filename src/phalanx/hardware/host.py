"""The host this process runs on: its cores, addresses to listen at, and processes that are killed because memory ran out.

This module imports nothing that takes time, so that a launcher may ask before torch is loaded.
"""

from __future__ import annotations

import ipaddress
import os
import socket
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


def is_loopback(address: str) -> bool:
    """Return whether `address` is by its name one that no other machine reaches."""
    return address in ("localhost", "::1") or address.startswith("127.")


def listening_socket(address: str, port: int, *, one_machine: bool) -> int | None:
    """Return a descriptor that listens at `address` alone, None where that cannot be, and a server has to listen everywhere.

    PyTorch's store does so by itself, and whoever reaches it may read and write. one_machine: whether all ranks are here.
    On several machines a name that stands for this machine's loopback in its own tables is another address elsewhere.
    """
    local_only = one_machine or is_loopback(address)
    for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        if ipaddress.ip_address(place[0]).is_loopback and not local_only:
            continue
        listener = socket.socket(family)
        # A run that is started again at once finds its port in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(socket.SOMAXCONN)
        except OSError:
            # Taken, or an address that is translated on its way here: the store says which.
            listener.close()
            continue
        return listener.detach()
    return None
