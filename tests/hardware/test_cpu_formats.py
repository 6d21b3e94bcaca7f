"""A CPU that cannot do what it says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.hardware import cpu_formats
from phalanx.hardware.cpu_formats import require_cpu_format, survives_products

CPU = torch.device("cpu")


@pytest.fixture
def illegal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are illegal instructions."""

    def multiply(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGILL)

    survives_products.cache_clear()
    monkeypatch.setattr(cpu_formats.torch, "mm", multiply)
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
    monkeypatch.setattr(cpu_formats.torch, "mm", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert survives_products(torch.bfloat16)
    survives_products.cache_clear()
