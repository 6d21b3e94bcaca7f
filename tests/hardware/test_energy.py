"""Counters of energy: what they give for steps, and files of processors that wrap, are missing or may not be read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.hardware import energy
from phalanx.hardware.energy import EnergyMeter, open_energy_meter, open_rapl


def write_zone(folder: Path, name: str, microjoules: int) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text("1000000000\n")


def test_packages_of_processors_add_up_and_begin_anew_at_their_range(tmp_path: Path) -> None:
    for name, start in (("intel-rapl:0", 999_000_000), ("intel-rapl:1", 5_000_000), ("intel-rapl:0:0", 7)):
        write_zone(tmp_path, name, start)
    counter = open_rapl(tmp_path)
    assert counter is not None and counter() == 0.0
    # The first one wraps after 1 J; cores (intel-rapl:0:0) are a part of their package.
    write_zone(tmp_path, "intel-rapl:0", 2_000_000)
    write_zone(tmp_path, "intel-rapl:1", 9_500_000)
    write_zone(tmp_path, "intel-rapl:0:0", 900_000)
    assert counter() == pytest.approx(3.0 + 4.5)


def test_processors_without_a_readable_counter_have_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_rapl(tmp_path) is None
    write_zone(tmp_path, "intel-rapl:0", 5)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert open_rapl(tmp_path) is None
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    assert open_energy_meter(torch.device("cpu"), 1) is None


def test_a_step_has_the_power_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    joules, clock = iter([100.0, 300.0, 1300.0]), iter([0.0, 2.0, 12.0])
    monkeypatch.setattr(energy.time, "perf_counter", lambda: next(clock))
    meter = EnergyMeter(lambda: next(joules), "NVML")
    # 100 W throughout, though the second step of 4 s came after an evaluation of 6 s.
    assert meter.step_joules(2.0) == pytest.approx(200.0)
    assert meter.step_joules(4.0) == pytest.approx(400.0)


class Refused(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "found", "ranks"),
    [
        ("AMD Instinct MI300X", {"energy_accumulator": 2_000_000, "counter_resolution": 15.5, "timestamp": 1}, 1),
        ("AMD Instinct MI250X", {"power": 2_000_000, "counter_resolution": 15.5, "timestamp": 1}, 2),
        # The second die of a module, and a device without a counter.
        ("AMD Instinct MI250X", {"energy_accumulator": 0, "counter_resolution": 15.5, "timestamp": 1}, None),
        ("AMD Instinct MI300X", {"energy_accumulator": "N/A", "counter_resolution": "N/A", "timestamp": 1}, None),
        ("AMD Instinct MI300X", Refused(), None),
    ],
)
def test_an_amd_device_counts_for_all_dies_of_its_module(
    name: str, found: dict[str, object] | Exception, ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(handle: str) -> dict[str, object]:
        assert handle == "handle of cuda:3"
        if isinstance(found, Exception):
            raise found
        return found

    smi = SimpleNamespace(AmdSmiException=Refused, amdsmi_get_energy_count=count)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    monkeypatch.setattr(energy, "is_rocm", lambda: True)
    monkeypatch.setattr(energy, "amd_smi_handle", lambda device: f"handle of {device}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name))
    meter = open_energy_meter(torch.device("cuda", 3), 8)
    assert (meter is None) == (ranks is None)
    assert meter is None or (meter.source, meter.ranks, meter.counter()) == ("AMD SMI", ranks, pytest.approx(31.0))


def test_without_amd_smi_there_is_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "is_rocm", lambda: True)
    monkeypatch.setitem(sys.modules, "amdsmi", SimpleNamespace())
    # PyTorch itself says that AMD SMI is missing here.
    assert open_energy_meter(torch.device("cuda", 0), 1) is None


@pytest.mark.parametrize("counts", [True, False])
def test_an_nvidia_device_is_found_by_its_identity(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def consumption(handle: str) -> int:
        assert handle == "handle of GPU-77"
        if not counts:
            raise Refused
        return 12_500

    nvml = SimpleNamespace(
        NVMLError=Refused,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetTotalEnergyConsumption=consumption,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(energy, "is_rocm", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="77"))
    meter = open_energy_meter(torch.device("cuda", 0), 8)
    assert (meter is not None) == counts
    assert meter is None or (meter.source, meter.ranks, meter.counter()) == ("NVML", 1, 12.5)
