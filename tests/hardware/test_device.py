from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.hardware import device as devices
from phalanx.hardware.device import (
    HostCopy,
    Moment,
    choose_device,
    device_name,
    measure_matmul_tflops,
    require_cpu_format,
    survives_products,
)
from phalanx.hardware.device_facts import device_facts, find_facts, known_devices

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("reported", "name", "bf16"),
    [
        ("NVIDIA H200", "H200", 989),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.5),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 312),
        ("AMD Instinct MI250X", "MI250X GCD", 191.5),
        ("AMD Instinct MI250X / MI250", "MI250X GCD", 191.5),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
    ],
)
def test_names_that_drivers_report_find_their_device(reported: str, name: str, bf16: float) -> None:
    facts = find_facts(reported)
    assert facts is not None
    assert (facts.name, facts.peak_tflops["bf16"]) == (name, bf16)


def test_an_unknown_device_gets_no_guess() -> None:
    assert find_facts("Some Future Accelerator") is None
    assert find_facts("cpu") is None


def test_no_entry_is_hidden_by_one_before_it() -> None:
    for match, facts in known_devices():
        for part in match:
            assert find_facts(part) == facts, part


PLANNED = (
    "MI250X GCD",
    "MI250 GCD",
    "MI300X",
    "MI325X",
    "MI355X",
    "A100-40GB",
    "A100-80GB",
    "H100 SXM",
    "H200",
    "B200",
)


@pytest.mark.parametrize("name", PLANNED)
def test_devices_to_plan_for_have_every_figure_and_its_source(name: str) -> None:
    facts = device_facts(name)
    assert {"bf16", "fp16", "fp32", "fp64"} <= facts.peak_tflops.keys() and facts.source
    assert facts.memory_bytes is not None and facts.bandwidth_gb_s is not None and facts.power_w is not None
    # 0.3 to 1 PFLOP/s need 1.5 to 8 TB/s; a wrong unit would be out of this range.
    assert 100 < facts.peak_tflops["bf16"] / (facts.bandwidth_gb_s / 1e3) < 350
    for precision, rate in facts.matmul_tflops.items():
        assert 0.4 < rate / facts.peak_tflops[precision] < 0.9


def test_a_gcd_is_half_of_a_module() -> None:
    gcd, mi250 = device_facts("MI250X GCD"), device_facts("MI250 GCD")
    assert 2 * gcd.peak_tflops["bf16"] == 383 and 2 * mi250.peak_tflops["bf16"] == 362
    assert gcd.memory_bytes == mi250.memory_bytes == 64 * 2**30


def test_names_of_the_table() -> None:
    assert device_facts("V100").peak_tflops["fp16"] == 125
    assert device_facts("CPU").peak_tflops == {} and device_facts("CPU").memory_bytes is None
    with pytest.raises(ConfigError, match=r"device H900 is not in devices\.yaml; it knows MI355X"):
        device_facts("H900")


def test_cpu_can_always_be_asked_for() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator to fall back to")
def test_without_an_accelerator_auto_is_the_cpu_and_others_are_refused() -> None:
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match=r"cluster\.device=cuda cannot be used.*allowed here: auto, cpu"):
        choose_device("cuda")


def test_a_slow_processor_multiplies_smaller_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def product_seconds(_: torch.device, dtype: torch.dtype, size: int, count: int) -> list[float]:
        sizes.append(size)
        # As by an AVX2 processor: two seconds for 1024 x 1024.
        return [2.0 * (size / 1024) ** 3 if dtype == torch.bfloat16 else 1e-3] * count

    monkeypatch.setattr(devices, "time_products", product_seconds)
    assert measure_matmul_tflops(torch.device("cpu"), torch.bfloat16) == pytest.approx(2 * 1024**3 / 2.0 / 1e12)
    assert sizes == [1024, 512, 256, 256]
    sizes.clear()
    measure_matmul_tflops(torch.device("cpu"), torch.float32)
    assert sizes == [1024, 1024]


def test_a_measurement_draws_none_of_the_run_s_numbers() -> None:
    state = torch.get_rng_state()
    measure_matmul_tflops(torch.device("cpu"), torch.float32, size=64)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_matmul_measurement_counts_real_work() -> None:
    rate = measure_matmul_tflops(torch.device("cpu"), torch.float32, size=256)
    assert 1e-4 < rate < 1e3


def test_moments_lie_as_far_apart_as_the_clock_says() -> None:
    began, start = time.perf_counter(), Moment(CPU)
    time.sleep(0.02)
    end, ended = Moment(CPU), time.perf_counter()
    end.wait()
    assert 0.02 <= end.seconds_since(start) <= ended - began


def test_a_host_copy_gives_the_numbers() -> None:
    copy = HostCopy(torch.tensor([1.5, 2.0], dtype=torch.float64))
    assert copy.read() == [1.5, 2.0] and copy.made.seconds_since(copy.made) == 0.0


class LaterDevice:
    """An accelerator that has done nothing yet of what it was given: it does so when an event is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def Event(self, enable_timing: bool) -> LaterDevice:  # noqa: N802
        assert enable_timing
        return self

    def record(self) -> None:
        self.length = len(self.queue)

    def synchronize(self) -> None:
        for work in self.queue[: self.length]:
            work()


class LaterTensor:
    """What a host copy asks of a tensor on that device."""

    device = torch.device("cuda")
    shape, dtype = (1,), torch.float64

    def __init__(self, value: float) -> None:
        self.value = value


def test_a_host_copy_waits_for_what_was_launched_before_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    later, done = LaterDevice(), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: later)
    plain = torch.empty

    def pinned(shape: Any, dtype: torch.dtype, pin_memory: bool) -> Any:
        assert pin_memory
        host = plain(shape, dtype=dtype)

        class Host:
            def copy_(self, source: LaterTensor, non_blocking: bool) -> None:
                assert non_blocking
                later.queue.append(lambda: host.fill_(source.value))

            tolist = staticmethod(host.tolist)

        return Host()

    monkeypatch.setattr(torch, "empty", pinned)
    copy = HostCopy(LaterTensor(3.0))  # type: ignore[arg-type]
    later.queue.append(lambda: done.append("launched since"))
    assert copy.read() == [3.0] and not done


@pytest.fixture
def illegal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are illegal instructions."""

    def multiply(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGILL)

    survives_products.cache_clear()
    monkeypatch.setattr(devices.torch, "mm", multiply)
    yield
    survives_products.cache_clear()


@pytest.mark.usefixtures("illegal")
def test_an_instruction_that_is_not_executed_is_said_before_it_ends_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"layout.precision=bf16 cannot be computed here.*\nset layout.precision=fp32"
    ):
        require_cpu_format(torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="set --precision=fp32"):
        require_cpu_format(torch.bfloat16, CPU, "--precision")
    require_cpu_format(torch.float32, CPU)
    require_cpu_format(torch.bfloat16, torch.device("cuda", 0))


def test_other_failures_of_the_copy_say_nothing_against_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    survives_products.cache_clear()
    monkeypatch.setattr(devices.torch, "mm", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert survives_products(torch.bfloat16)
    survives_products.cache_clear()
