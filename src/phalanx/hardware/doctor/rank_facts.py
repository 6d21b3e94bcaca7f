"""Facts of one rank, its host and its device. Nothing here waits for another rank."""

from __future__ import annotations

import hashlib
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
import torch.distributed as dist

from phalanx import __version__
from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.collectives import bus_bandwidth
from phalanx.hardware.device import device_name, synchronize
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
        # macOS has no affinity.
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


_SIDE, _CPU_SIDE = 8192, 512
"""Rows and columns of the timed matrix product."""
_COPIED, _CPU_COPIED = 2**30, 2**25
"""Bytes of the timed copy in memory."""
_SENT, _CPU_SENT = 2**28, 2**22
"""Bytes of the timed all-reduce."""
_REPEATS = 3


@dataclass(frozen=True)
class DeviceRates:
    """Measurements of one rank."""

    rank: int
    matmul_tflops: float
    copy_gb_s: float
    """Bytes read plus bytes written per second, GB/s."""
    same: bool
    """Whether one product gave the same bits every time."""
    digest: str
    """Digest of that product's bits, which equal devices share; empty on the CPU, of which there are many kinds."""
    node_gb_s: float | None = None
    """Bus bandwidth of an all-reduce among the ranks of the node, GB/s: 2 (n - 1) / n of its bytes over its time."""
    world_gb_s: float | None = None
    """Bus bandwidth of an all-reduce among all ranks, GB/s."""
    sums_right: bool = True
    """Whether these all-reduces gave the right sums."""


def measure_device(rank: int, device: torch.device) -> DeviceRates:
    """Measure this rank's device in a second or two, without waiting for any other rank."""
    cpu = device.type == "cpu"
    side, copied = (_CPU_SIDE, _CPU_COPIED) if cpu else (_SIDE, _COPIED)
    dtype = torch.float32 if cpu else torch.bfloat16
    clock = Clock(device, span_s=0.02 if cpu else 0.2, samples=_REPEATS)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = clock.seconds(lambda: torch.mm(a, b, out=out))
    products = [torch.mm(a, b) for _ in range(_REPEATS)]
    same = all(torch.equal(product, products[0]) for product in products)
    # numpy has no bfloat16, so the digest is taken of the bytes.
    bits = products[0].view(torch.uint8).cpu().numpy().tobytes()
    digest = "" if cpu else hashlib.sha256(bits).hexdigest()[:16]
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copying = clock.seconds(lambda: target.copy_(source))
    return DeviceRates(
        rank=rank,
        matmul_tflops=2 * side**3 / seconds / 1e12,
        copy_gb_s=2 * copied / copying / 1e9,
        same=same,
        digest=digest,
    )


def measure_all_reduce(device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, bool]:
    """Return the bus bandwidth of an all-reduce in GB/s and whether its sums are right, among `group` or all ranks.

    Every rank of the group calls this function together.
    """
    members, here = dist.get_world_size(group), dist.get_rank(group)
    size = _CPU_SENT if device.type == "cpu" else _SENT
    numbers = torch.full((size // 4,), float(here + 1), device=device)
    dist.all_reduce(numbers, group=group)
    right = bool((numbers == members * (members + 1) / 2).all())
    clock = Clock(device, span_s=0.1, samples=_REPEATS)
    synchronize(device)
    # A maximum leaves the numbers as they are, however often it is repeated; sums would grow.
    seconds = clock.seconds(lambda: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group), calls=4)
    return float(bus_bandwidth("all_reduce", size, members, seconds)) / 1e9, right
