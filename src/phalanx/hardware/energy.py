"""Energy that devices count themselves: NVIDIA's by NVML, AMD's by AMD SMI, a host's processors by RAPL.

Counters are read, nothing is sampled. NVML needs the package nvidia-ml-py (the extra `energy`), AMD SMI the package amdsmi
that comes with ROCm; RAPL needs files that many hosts let only root read. Where there is no counter there is no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from phalanx.torch_compat.common import amd_smi_handle, is_rocm

RAPL = Path("/sys/class/powercap")
"""Where Linux shows the counters of processor packages."""
Counter = Callable[[], float]
"""Gives joules since some moment; never falls."""


@dataclass
class EnergyMeter:
    """Joules of a step, by a counter that some ranks share."""

    counter: Counter
    source: str
    """Name of the counter: NVML, AMD SMI or RAPL."""
    ranks: int = 1
    """Ranks whose work it counts."""
    _last: tuple[float, float] = field(init=False)
    """Joules and seconds of the clock when it was read last."""

    def __post_init__(self) -> None:
        self._last = self.counter(), time.perf_counter()

    def step_joules(self, seconds: float) -> float:
        """Return the joules of a step that took `seconds` and has ended, at the mean power since the last call.

        What was drawn between steps, as by an evaluation, is no part of a step: power and not energy goes over.
        """
        joules, now = self.counter(), time.perf_counter()
        before, then = self._last
        self._last = joules, now
        return (joules - before) / max(now - then, 1e-9) * seconds


def open_energy_meter(device: torch.device, ranks_per_node: int) -> EnergyMeter | None:
    """Return a meter of `device`, or of this host's processors for the CPU; None where nothing counts.

    ranks_per_node: ranks of the run on this host, which all its processors work for.
    """
    if device.type == "cpu":
        rapl = open_rapl(RAPL)
        return None if rapl is None else EnergyMeter(rapl, "RAPL", ranks_per_node)
    if device.type != "cuda":
        return None
    if is_rocm():
        # An MI250 or MI250X shows two devices, of which the first counts for both and the second stays at 0.
        try:
            smi: Any = import_module("amdsmi")
            handle = amd_smi_handle(device)
        except (ImportError, RuntimeError):
            return None

        def read() -> float:
            found = smi.amdsmi_get_energy_count(handle)
            # Until ROCm 6.1 the counter was called power. Its unit is given in microjoules.
            count = found["energy_accumulator"] if "energy_accumulator" in found else found["power"]
            return float(count) * float(found["counter_resolution"]) / 1e6

        try:
            counted = read()
        except (smi.AmdSmiException, KeyError, ValueError):
            return None
        # A counter at 0 is the second die's, which never moves.
        if counted == 0.0:
            return None
        dies = 2 if "mi250" in torch.cuda.get_device_properties(device).name.lower() else 1
        return EnergyMeter(read, "AMD SMI", min(dies, ranks_per_node))
    counter = _open_nvml(device)
    return None if counter is None else EnergyMeter(counter, "NVML")


def _open_nvml(device: torch.device) -> Counter | None:
    """Return the counter of an NVIDIA device; None without NVML, and for devices before Volta, which have none."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By identity: CUDA_VISIBLE_DEVICES numbers devices in its own way.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

        def read() -> float:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        read()
    except nvml.NVMLError:
        return None
    return read


def open_rapl(folder: Path) -> Counter | None:
    """Return the counter of all processor packages of this host together; None where none can be read."""
    packages = [_Package(zone) for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    try:
        for package in packages:
            package.read()
    except (OSError, ValueError):
        return None
    return (lambda: sum(package.read() for package in packages)) if packages else None


class _Package:
    """The counter of one processor package, which begins anew at its range."""

    def __init__(self, zone: Path) -> None:
        self._zone = zone
        self._last: int | None = None
        self._total = 0

    def read(self) -> float:
        """Return joules since the first reading. Raises OSError, ValueError where the files are not readable numbers."""
        now = int((self._zone / "energy_uj").read_text())
        if self._last is not None:
            passed = now - self._last
            self._total += passed if passed >= 0 else passed + int((self._zone / "max_energy_range_uj").read_text())
        self._last = now
        return self._total / 1e6
