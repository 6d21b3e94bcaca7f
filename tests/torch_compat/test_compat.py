from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.torch_compat import common as compat


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_summed_in_the_wider_format(narrow: torch.dtype) -> None:
    wide = torch.promote_types(narrow, torch.float32)
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(8, 5, generator=generator).to(narrow), torch.randn(5, 6, generator=generator).to(narrow))
        for _ in range(3)
    ]
    total = None
    for a, b in parts:
        total = compat.add_matmul(total, a, b, wide)
    assert total is not None
    assert total.dtype == wide
    expected = sum(a.double() @ b.double() for a, b in parts)
    tolerance = 1e-2 if narrow == torch.bfloat16 else 1e-5
    torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert compat.full_name("blocks.0._orig_mod._checkpoint_wrapped_module.mlp.up.weight") == "blocks.0.mlp.up.weight"


def test_the_cpu_keeps_no_memory_count() -> None:
    assert compat.memory_statistics(torch.device("cpu")) == {}


def test_an_accelerator_counts_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    # As PyTorch itself finds them; it knows none before the device is used.
    allocated = {"allocated_bytes": {"all": {"current": 5, "peak": 7}}}
    for statistics, retries in ((allocated | {"num_alloc_retries": 3}, 3), (allocated, 0)):
        monkeypatch.setattr(
            torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None, found=statistics: found
        )
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", torch.cuda.memory.memory_stats_as_nested_dict)
        assert torch.cuda.memory_allocated(device) == 5 and torch.cuda.max_memory_allocated(device) == 7
        assert compat.memory_statistics(device) == {"now": 5, "peak": 7, "retries": retries}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    assert compat.memory_statistics(device) == {"now": 0, "peak": 0, "retries": 0}


def test_only_computations_in_64_bits_are_compiled_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"triton.mix_order_reduction": False}
    # PyTorch takes no option that it does not know.
    known = torch.nn.Linear(1, 1)
    assert compat.compile_options(torch.float64) == off
    known.compile(options=compat.compile_options(torch.float64))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert compat.compile_options(dtype) is None
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["triton.cudagraphs"])
    assert compat.compile_options(torch.float64) is None


COMES_FIRST = ("cudnn", "flash4", "efficient")
"""Choices with which SDPA tries cuDNN before flash attention."""


@pytest.mark.parametrize("chosen", ["cudnn", "flash", "efficient", "flash4", "sdpa"])
def test_parts_of_attention_go_to_cudnn_where_it_was_chosen_and_can(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 4, 8, 16))
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *arguments: arguments)
    for can in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _, can=can: can)
        with AttentionChoice(chosen).active(torch.device("cpu")):
            assert compat.prefers_cudnn(query, query, query, True) is (can and chosen in COMES_FIRST)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
    with AttentionChoice("cudnn").active(torch.device("cpu")):
        monkeypatch.setattr(compat, "is_rocm", lambda: True)
        assert not compat.prefers_cudnn(query, query, query, True)
        on_cpu = torch.zeros(1, 4, 8, 16)
        assert not compat.prefers_cudnn(on_cpu, on_cpu, on_cpu, True)
