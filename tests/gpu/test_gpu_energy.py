"""The energy counter of the device that is here."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.hardware.device import measure_matmul_tflops, synchronize
from phalanx.hardware.energy import open_energy_meter

pytestmark = pytest.mark.gpu


def test_counted_energy_is_that_of_the_power_sensor() -> None:
    """The sensor gives the mean of its last second; other tests may keep the device busy too, so that no power is known."""
    nvml = pytest.importorskip("pynvml", reason="what reads the counter is not installed")
    device = torch.device("cuda", 0)
    meter = open_energy_meter(device, 1)
    assert meter is not None
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    start = time.perf_counter()
    sensed = []
    while time.perf_counter() - start < 3.0:
        measure_matmul_tflops(device, torch.bfloat16)
        sensed.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
    synchronize(device)
    watts = meter.step_joules(1.0)
    assert 5.0 < watts < 2000.0
    # The first readings are of the second before.
    assert watts == pytest.approx(sum(sensed) / len(sensed), rel=0.35)
