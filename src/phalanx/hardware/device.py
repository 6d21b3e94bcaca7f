"""The device this process runs on: which one, what it can do at most, and how fast its matmuls really are."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml
from torch import Tensor

from phalanx.errors import ConfigError

_SMALLEST, _LONG_S = 128, 0.1
"""Of the products that tell a CPU's rate: rows and columns that no fewer are tried of, and seconds that are too many."""


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a device type from `devices.yaml`, which says where they are from; None and {} where they are not known."""

    name: str
    peak_tflops: dict[str, float]
    """Nominal dense peak in TFLOP/s by precision name (bf16, fp16, fp8, fp32, fp64)."""
    memory_gb: float | None = None
    """Device memory as vendors count it, in units of 2^30 bytes."""
    bandwidth_gb_s: float | None = None
    """Nominal memory bandwidth, GB/s."""
    source: str = ""
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    """Highest TFLOP/s that anybody reports for a large matrix product, by precision name."""
    power_w: float | None = None
    """Board power in watts, of one device."""
    cache_mb: float | None = None
    """Last cache that all of the device shares, in units of 2^20 bytes."""

    @property
    def memory_bytes(self) -> int | None:
        """Device memory in bytes. The driver keeps about a hundredth of it for itself."""
        return None if self.memory_gb is None else round(self.memory_gb * 2**30)


@cache
def known_devices() -> tuple[tuple[tuple[str, ...], DeviceFacts], ...]:
    """The table of devices: for each the lower-case name parts it matches, and its facts."""
    text = files("phalanx.hardware").joinpath("devices.yaml").read_text()
    rows = []
    for row in yaml.safe_load(text):
        match = tuple(row.pop("match"))
        rows.append((match, DeviceFacts(**row)))
    return tuple(rows)


def find_facts(reported_name: str) -> DeviceFacts | None:
    """Facts of the device PyTorch calls `reported_name`, or None when the table has no entry: a guess would lie."""
    lower = reported_name.lower()
    for match, facts in known_devices():
        if any(part in lower for part in match):
            return facts
    return None


def device_kind(reported_name: str) -> str:
    """What the device that `device_name` calls `reported_name` is called in machine descriptions: its name in
    `devices.yaml`, CPU, or the driver's name where the table has no entry."""
    if reported_name == "cpu":
        return "CPU"
    facts = find_facts(reported_name)
    return reported_name if facts is None else facts.name


def device_facts(name: str) -> DeviceFacts:
    """Facts of the device that `devices.yaml` calls `name`, as a machine's description does. Raises ConfigError."""
    rows = {facts.name: facts for _, facts in known_devices()}
    if name not in rows:
        raise ConfigError(f"device {name} is not in devices.yaml; it knows {', '.join(rows)}")
    return rows[name]


def choose_device(requested: str, local_rank: int = 0) -> torch.device:
    """The device of this rank: `auto` is the accelerator PyTorch finds, else the CPU.

    A process that sees fewer devices than ranks on its node (one visible device a task, as under Slurm's
    --gpus-per-task=1) takes the only one it sees. Raises ConfigError for a device type PyTorch cannot use here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if requested == "cpu" or (requested == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or requested not in ("auto", accelerator.type):
        found = "none" if accelerator is None else accelerator.type
        raise ConfigError(
            f"cluster.device={requested} cannot be used: PyTorch {torch.__version__} finds accelerator: {found}; "
            f"allowed here: auto, cpu{'' if accelerator is None else ', ' + accelerator.type}"
        )
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device: this node shows {count}; start at most {count} ranks"
        )
    return torch.device(accelerator.type, local_rank if count > 1 else 0)


def device_name(device: torch.device) -> str:
    """The name the driver reports for an accelerator, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory as its driver reports them; None for the CPU, whose memory is shared."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Moment:
    """When a device is through with what has been launched on its current stream so far. The CPU is when it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._at: float | None = None
        self._event: Any = None
        if device.type == "cpu":
            self._at = time.perf_counter()
        else:
            self._event = torch.get_device_module(device).Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Until it is past."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Between two moments of one device, both past."""
        if self._at is not None:
            assert earlier._at is not None
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostCopy:
    """Numbers of a device on their way to the host: they can be read when they are there, whatever was launched since.

    A plain copy would be made when it is asked for, behind all that.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self.made = Moment(values.device)

    def read(self) -> list[Any]:
        """The numbers, once they are there."""
        self.made.wait()
        found: list[Any] = self._values.tolist()
        return found


def measure_matmul_tflops(device: torch.device, dtype: torch.dtype, *, size: int | None = None) -> float:
    """TFLOP/s of a square matmul on random data: the fastest of single timed products. Whatever else the machine does at the
    time makes products slower, and none faster.

    size: rows and columns; by default 8192 on an accelerator; on the CPU 1024, or a power of two below of which a product
    takes less than a tenth of a second: without instructions for it, 16-bit numbers are multiplied a thousand times slower.
    """
    if size is None:
        size = 8192 if device.type != "cpu" else 1024
        while device.type == "cpu" and size > _SMALLEST and _product_seconds(device, dtype, size, 1)[0] > _LONG_S:
            size //= 2
    return 2 * size**3 / min(_product_seconds(device, dtype, size, 10)) / 1e12


def _product_seconds(device: torch.device, dtype: torch.dtype, size: int, count: int) -> list[float]:
    # How many numbers are drawn depends on how fast the device is: they are none of the run's.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds
