"""What a rank can say of itself, its host and its device without asking anybody: nothing here waits for another rank."""

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
from phalanx.hardware.doctor.environment import Place
from phalanx.layout.mesh import Ranks
from phalanx.torch_compat import common as compat

_SHARED = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "cifs",
    "smb3",
    "ceph",
    "fuse.sshfs",
    "afs",
    "panfs",
    "wekafs",
    "dvs",
)
"""Types of file systems that several hosts share, as /proc/mounts calls them."""
_PATIENCE_S = 10.0
"""For the name of an address."""


@dataclass(frozen=True)
class RankFacts:
    """One rank: who it is, where it runs, and on what."""

    rank: int
    local_rank: int
    host: str
    cores: tuple[int, ...]
    """That it may run on."""
    device: str
    """Name of its device, `cpu` for none."""
    address: str
    """What tells the device from all others of the host; empty where nothing does."""
    near: tuple[int, ...]
    """Cores that are nearest to the device; empty where the host does not say."""
    memory_gib: float | None
    """Of the device, and what of it is free."""
    free_gib: float | None
    versions: dict[str, str]
    """phalanx, torch, what torch is built for, and Python."""

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> RankFacts:
        """From what `dataclasses.asdict` made and JSON carried."""
        return cls(**{**values, "cores": tuple(values["cores"]), "near": tuple(values["near"])})

    @property
    def words(self) -> str:
        """`rank 5 (nid0012, device 5)`."""
        where = self.host if self.device == "cpu" else f"{self.host}, device {self.local_rank}"
        return f"rank {self.rank} ({where})"


def rank_facts(ranks: Ranks, device: torch.device) -> RankFacts:
    """This rank's."""
    address, memory, free = "", None, None
    if device.type != "cpu":
        address = compat.device_address(device)
        free, memory = torch.get_device_module(device).mem_get_info(device)
    return RankFacts(
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        device=device_name(device),
        address=address,
        near=cores_near(address),
        memory_gib=None if memory is None else memory / 2**30,
        free_gib=None if free is None else free / 2**30,
        versions={
            "phalanx": __version__,
            "torch": torch.__version__,
            "built for": _built_for(),
            "python": platform.python_version(),
        },
    )


def _built_for() -> str:
    if compat.is_rocm():
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def place_of(ranks: Ranks, facts: RankFacts, nodes: int) -> Place:
    """Where this rank runs."""
    mounts = _mounts()
    return Place(
        world_size=ranks.world_size,
        nodes=nodes,
        cores=len(facts.cores) or os.cpu_count() or 1,
        interfaces=frozenset(name for _, name in socket.if_nameindex()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        python=sys.prefix,
        rocm=compat.is_rocm(),
        shared=lambda path: shared_file_system(path, mounts),
    )


def cores_near(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """Cores nearest to the device at a PCI address; none where the host does not say, or says all."""
    try:
        text = (devices / address / "local_cpulist").read_text() if address else ""
    except OSError:
        return ()
    return parse_cores(text)


def parse_cores(text: str) -> tuple[int, ...]:
    """`0-3,8` as Linux writes lists of cores."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _mounts() -> list[tuple[str, str]]:
    """(folder, type) of every file system of this host."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return []
    return [(words[1].replace("\\040", " "), words[2]) for line in lines if len(words := line.split()) > 2]


def shared_file_system(path: str, mounts: Iterable[tuple[str, str]]) -> str | None:
    """The type of the file system that `path` lies on, or would, if several hosts share it."""
    real = os.path.realpath(path)
    over = [(folder, kind) for folder, kind in mounts if real == folder or real.startswith(folder.rstrip("/") + "/")]
    kind = max(over, key=lambda one: len(one[0]), default=("", ""))[1]
    return kind if kind in _SHARED else None


def name_seconds(address: str) -> float:
    """Seconds until the name of `address` is known, or is known not to exist; _PATIENCE_S where that takes longer."""

    def ask() -> None:
        try:
            socket.getnameinfo((socket.gethostbyname(address), 0), 0)
        except OSError:
            return

    start = time.perf_counter()
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    return time.perf_counter() - start
