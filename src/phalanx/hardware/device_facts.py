"""What vendors say of device types: a table, read without torch, by the names that drivers and machine descriptions use."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import yaml

from phalanx.errors import ConfigError


@dataclass(frozen=True)
class DeviceFacts:
    """Vendor facts of a device type, from `devices.yaml`, which names the sources; None and {} where they are not known."""

    name: str
    peak_tflops: dict[str, float]
    """Nominal dense peak in TFLOP/s by precision name (bf16, fp16, fp8, fp32, fp64)."""
    memory_gb: float | None = None
    """Device memory as vendors count it, in units of 2^30 bytes."""
    bandwidth_gb_s: float | None = None
    """Nominal memory bandwidth, GB/s."""
    source: str = ""
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    """Highest published TFLOP/s of a large matrix product, by precision name."""
    power_w: float | None = None
    """Board power in watts, of one device."""
    training_w: float | None = None
    """Watts that it draws while it trains, as measured."""
    cache_mb: float | None = None
    """Last-level cache shared by the whole device, in units of 2^20 bytes."""

    @property
    def memory_bytes(self) -> int | None:
        """Device memory in bytes; the driver keeps about 1% of it for itself."""
        return None if self.memory_gb is None else round(self.memory_gb * 2**30)


@cache
def known_devices() -> tuple[tuple[tuple[str, ...], DeviceFacts], ...]:
    """Return the table of devices: for each row the lower-case name parts it matches, and its facts."""
    text = files("phalanx.hardware").joinpath("devices.yaml").read_text()
    rows = []
    for row in yaml.safe_load(text):
        match = tuple(row.pop("match"))
        rows.append((match, DeviceFacts(**row)))
    return tuple(rows)


def find_facts(reported_name: str) -> DeviceFacts | None:
    """Return the facts of the device PyTorch calls `reported_name`; None where the table has no row, as a guess
    would lie."""
    lower = reported_name.lower()
    for match, facts in known_devices():
        if any(part in lower for part in match):
            return facts
    return None


def device_kind(reported_name: str) -> str:
    """Return the name that machine descriptions use for the device the driver calls `reported_name`.

    That is its name in `devices.yaml`, "CPU", or the driver's own name where the table has no row.
    """
    if reported_name == "cpu":
        return "CPU"
    facts = find_facts(reported_name)
    return reported_name if facts is None else facts.name


def device_facts(name: str) -> DeviceFacts:
    """Return the facts of the device that machine descriptions call `name`. Raises ConfigError for an unknown name."""
    rows = {facts.name: facts for _, facts in known_devices()}
    if name not in rows:
        raise ConfigError(f"device {name} is not in devices.yaml; it knows {', '.join(rows)}")
    return rows[name]
