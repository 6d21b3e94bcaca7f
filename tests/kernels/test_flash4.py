"""FlashAttention-4 as an operation: what the compiler is told of it, and what a user hears where it cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.errors import ConfigError
from phalanx.kernels.flash4 import FLASH4_FORWARD, flash4_attention, import_flash4
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice, check_attention
from phalanx.nn.attention import attend, attention_context
from small_models import FAMILIES

B, S, H, K, E = 2, 64, 8, 2, 16


@pytest.fixture
def without_elements() -> Iterator[None]:
    """Tensors have no elements: only what operations promise of their results is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def inputs() -> list[Tensor]:
    """Query, key and value [B, heads, S, E] as attention passes them: views of [B, S, heads, E], value of a wider row."""
    query, key = (torch.empty(B, S, heads, E, dtype=torch.bfloat16) for heads in (H, K))
    value = torch.empty(B, S, K, H // K + 2, E, dtype=torch.bfloat16)[..., -1, :]
    return [x.transpose(1, 2).requires_grad_() for x in (query, key, value)]


def lies_in_rows(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


def test_shapes_and_strides_forward_and_backward(without_elements: None) -> None:
    query, key, value = inputs()
    out = flash4_attention(query, key, value)
    assert out.shape == query.shape and out.dtype == query.dtype and lies_in_rows(out)
    grads = torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    for x, grad in zip((query, key, value), grads, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and lies_in_rows(grad)


def test_log_partitions_are_wide_and_have_no_gradient(without_elements: None) -> None:
    out, log_z = FLASH4_FORWARD(*inputs(), True)
    assert log_z.shape == (B, H, S) and log_z.dtype == torch.float32 and log_z.is_contiguous()
    assert out.requires_grad and not log_z.requires_grad


def test_the_compiler_sees_one_operation_each_way(without_elements: None) -> None:
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(str(graph.graph))
        return make_boxed_func(graph)

    context = attention_context(FAMILIES["llama"].layer(0).attention, torch.arange(S), torch.bfloat16, kernel="flash4")
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, context) * 2.0, backend=aot_autograd(fw_compiler=keep), fullgraph=True
    )
    compiled(*inputs()).sum().backward()
    forward, backward = graphs
    assert forward.count("phalanx.flash4_forward.default") == 1
    assert backward.count("phalanx.flash4_backward.default") == 1
    assert "clone" not in forward + backward, "nothing is copied on the way in or out"


def test_the_choice_leads_to_the_kernel() -> None:
    assert AttentionChoice("flash4").kernel == "flash4"
    llama = attention_context(FAMILIES["llama"].layer(0).attention, torch.arange(S), torch.bfloat16, kernel="flash4")
    assert llama.flash4 and llama.bias is None


def test_a_device_it_cannot_run_on_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        check_attention("flash4", torch.device("cpu"))
    assert str(error.value) == (
        "training.attention=flash4 cannot run on cpu: it needs an NVIDIA device of compute capability 9.0 or above\n"
        "nearest: training.attention=auto"
    )


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn-4 is installed")
def test_an_absent_package_is_noticed_and_named() -> None:
    found = import_flash4()
    assert found.forward is None and found.backward is None
    assert found.reason == "ModuleNotFoundError: No module named 'flash_attn'"
