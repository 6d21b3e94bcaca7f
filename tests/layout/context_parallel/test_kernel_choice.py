"""Which kernels are tried, in which formats, and what a user sees of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.layout.context_parallel import kernel_choice
from phalanx.layout.context_parallel.kernel_choice import (
    AttentionChoice,
    AttentionShape,
    choose_attention,
    choose_whole_attention,
)
from small_models import LLAMA, MPT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = AttentionShape(2, 16, torch.float32, documents=False)


def test_kernels_that_refuse_say_so_to_nobody(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def refuse(*_: Any) -> None:
        warnings.warn("Memory efficient kernel not used because:", UserWarning, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(kernel_choice, "attend", refuse)
    monkeypatch.setattr(kernel_choice, "attend_whole", refuse)
    assert kernel_choice._measure_all(LLAMA, SHAPE, CPU) == {"math": 0.0}
    assert kernel_choice._measure_whole((2, 16, 4, 8), torch.float32, CPU) == {"math": 0.0}
    assert not recwarn.list
    with pytest.raises(RuntimeError):
        refuse()
    assert len(recwarn.list) == 1, "in training it is a warning as any other"


def test_the_efficient_kernel_is_tried_with_keys_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: dict[str, int] = {}

    def record(name: str, run: Any, _grad: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda _q, key, *_, **__: key)
            heads[name] = run().shape[1]
        return 1.0

    monkeypatch.setattr(kernel_choice, "milliseconds_of", record)
    assert LLAMA.kv_heads < LLAMA.n_heads
    kernel_choice._measure_all(LLAMA, SHAPE, CPU)
    assert heads == {"cudnn": LLAMA.kv_heads, "flash": LLAMA.kv_heads, "efficient": LLAMA.n_heads}
    assert AttentionChoice("efficient").kernel == "efficient"
    assert AttentionChoice("cudnn").kernel == AttentionChoice("math").kernel == "sdpa"


def test_64_bit_numbers_are_for_the_math_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "choose_fastest", lambda *_: pytest.fail("measured"))
    shape = AttentionShape(2, 16, torch.float64, documents=True)
    assert choose_attention("auto", MPT, shape, CUDA).name == "math"
    assert choose_whole_attention((2, 16, 4, 8), torch.float64, CUDA).name == "math"


def test_measurements_of_older_versions_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say that only the math kernel runs where heads share keys in 32 bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_measure_all", lambda *_: {"efficient": 1.0})
    monkeypatch.setattr(kernel_choice, "device_name", lambda _: "a device")
    older = f"a device | {torch.__version__} | B2 S16 H{LLAMA.n_heads} K{LLAMA.kv_heads} E{LLAMA.head_size}"
    kernel_choice._write_cache(f"{older} | torch.float32 rope", {"math": 0.0})
    assert choose_attention("auto", LLAMA, SHAPE, CUDA).name == "efficient"


def test_a_deterministic_run_takes_the_first_kernel_that_runs_however_fast_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs on the same device were unlike: its other work had made another kernel the fastest in one of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = iter([{"flash": 1.0, "efficient": 2.0}, {"flash": 3.0, "efficient": 2.0}, {"flash": 3.0, "efficient": 2.0}])
    monkeypatch.setattr(kernel_choice, "_measure_all", lambda *_: next(times))
    monkeypatch.setattr(kernel_choice, "device_name", lambda _: "a device")
    torch.use_deterministic_algorithms(True)
    try:
        chosen = [choose_attention("auto", LLAMA, SHAPE, CUDA).name for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen == ["flash", "flash"]
    assert choose_attention("auto", LLAMA, SHAPE, CUDA).name == "efficient", (
        "what was measured then is not believed later"
    )
