"""The energy counter of the device that is here."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.hardware.device import measure_matmul_tflops, synchronize
from phalanx.hardware.energy import open_energy_meter
from phalanx.torch_compat.common import is_rocm

pytestmark = pytest.mark.gpu


def test_work_takes_more_power_than_idling() -> None:
    pytest.importorskip("amdsmi" if is_rocm() else "pynvml", reason="what reads the counter is not installed")
    device = torch.device("cuda", 0)
    meter = open_energy_meter(device, 1)
    assert meter is not None
    time.sleep(1.0)
    idle = meter.step_joules(1.0)
    start = time.perf_counter()
    while time.perf_counter() - start < 1.0:
        measure_matmul_tflops(device, torch.bfloat16)
    synchronize(device)
    busy = meter.step_joules(1.0)
    assert 5.0 < idle < busy < 2000.0
