"""Facts of one rank, its host and its device. Nothing here waits for another rank."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx import __version__
from phalanx.hardware.device import device_name
from phalanx.hardware.doctor.environment import Surroundings
from phalanx.layout.mesh import Ranks
from phalanx.torch_compat import common as compat

_SHARED = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.sshfs", "afs", "panfs", "wekafs", "dvs")
)
"""Types of file systems that several hosts share, as /proc/mounts calls them."""
_LOOKUP_S = 10.0
"""Longest wait for the lookup of a host name, seconds."""


@dataclass(frozen=True)
class RankFacts:
    """One rank: its numbers, host, cores, device and software."""

    rank: int
    local_rank: int
    host: str
    cores: tuple[int, ...]
    """Cores that the rank may run on."""
    device: str
    """Name of the device; `cpu` for none."""
    address: str
    """PCI address of the device; empty where it has none."""
    near: tuple[int, ...]
    """Cores nearest to the device; empty where the host does not say."""
    memory_gib: float | None
    """Memory of the device, GiB."""
    free_gib: float | None
    """Free memory of the device, GiB."""
    versions: dict[str, str]
    """Versions of phalanx, torch and Python, and what torch is built for."""

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> RankFacts:
        """Return the facts that `dataclasses.asdict` turned into `values`."""
        return cls(**{**values, "cores": tuple(values["cores"]), "near": tuple(values["near"])})

    @property
    def words(self) -> str:
        """The rank and where it runs: `rank 5 (nid0012, device 5)`."""
        where = self.host if self.device == "cpu" else f"{self.host}, device {self.local_rank}"
        return f"rank {self.rank} ({where})"


def collect_facts(ranks: Ranks, device: torch.device) -> RankFacts:
    """Return the facts of this rank."""
    address, memory, free = "", None, None
    if device.type != "cpu":
        address = compat.device_address(device)
        free, memory = torch.get_device_module(device).mem_get_info(device)
    built_for = "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    if compat.is_rocm():
        built_for = f"ROCm {torch.version.hip}"
    return RankFacts(
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        device=device_name(device),
        address=address,
        near=read_near_cores(address),
        memory_gib=None if memory is None else memory / 2**30,
        free_gib=None if free is None else free / 2**30,
        versions={
            "phalanx": __version__,
            "torch": torch.__version__,
            "built for": built_for,
            "python": platform.python_version(),
        },
    )


def describe_surroundings(ranks: Ranks, facts: RankFacts, nodes: int) -> Surroundings:
    """Return what surrounds this rank's process, which its environment has to fit."""
    mounts = _read_mounts()
    return Surroundings(
        world_size=ranks.world_size,
        nodes=nodes,
        cores=len(facts.cores) or os.cpu_count() or 1,
        interfaces=frozenset(name for _, name in socket.if_nameindex()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        python=sys.prefix,
        rocm=compat.is_rocm(),
        shared=lambda path: find_shared_type(path, mounts),
    )


def read_near_cores(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """Return the cores nearest to the device at a PCI address; none where the host does not say."""
    try:
        text = (devices / address / "local_cpulist").read_text() if address else ""
    except OSError:
        return ()
    return parse_cores(text)


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores in a list such as `0-3,8`, as Linux writes it."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _read_mounts() -> list[tuple[str, str]]:
    """Return (folder, type) of every mounted file system of this host."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return []
    # Linux writes spaces in folders as octal escapes.
    return [(words[1].replace("\\040", " "), words[2]) for line in lines if len(words := line.split()) > 2]


def find_shared_type(path: str, mounts: Iterable[tuple[str, str]]) -> str | None:
    """Return the type of the file system of `path`, which need not exist, if several hosts share it; else None."""
    real = os.path.realpath(path)
    over = [(folder, kind) for folder, kind in mounts if real == folder or real.startswith(folder.rstrip("/") + "/")]
    kind = max(over, key=lambda one: len(one[0]), default=("", ""))[1]
    return kind if kind in _SHARED else None


def time_lookup(address: str) -> float:
    """Return the seconds of a lookup of the host name `address`, found or not; about 10 where it takes longer."""

    def look_up() -> None:
        try:
            socket.getnameinfo((socket.gethostbyname(address), 0), 0)
        except OSError:
            return

    start = time.perf_counter()
    # A lookup cannot be interrupted; a daemon thread is left behind where it takes too long.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOKUP_S)
    return time.perf_counter() - start
