"""Operations as accelerators run them, for parts that are traced on meta tensors: there PyTorch would take them apart.

Fused attention kernels, the fused RMSNorm of uncompiled runs, and ring attention step by step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.layout.context_parallel.ring_attention import (
    RING_ATTENTION,
    RING_GRADIENTS,
    Ring,
    attend_along,
    gradients_along,
)
from phalanx.nn.attention import attend_plainly, join_sinks, repeat_heads
from phalanx.planner.schedule.timeline import Step
from phalanx.planner.trace.operations import Collective
from phalanx.planner.trace.recorder import Opaque, Recorder

AttentionCore = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@cache
def core_attention(kernel: str) -> AttentionCore:
    """Return attention of whole samples as `kernel` computes it; see `traced_model.Kernel`."""
    cores: dict[str, AttentionCore] = {
        "flash": _flash_attention,
        "flex": _flash_attention,
        "cudnn": _cudnn_attention,
        "efficient": _efficient_attention,
        "math": _math_attention,
        "cpu": _cpu_attention,
    }
    return cores[kernel]


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    # FlexAttention keeps and computes the same, whatever its bias.
    if context.bias is not None:
        return _efficient_attention(query, key, value, context)
    out: Tensor
    out, log_z, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
    # The kernel's derivatives leave its logarithms out; what follows them is little.
    return out if context.sinks_H is None else join_sinks(out, log_z.detach(), context.sinks_H)


def _cudnn_attention(query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    bias = _whole_bias(query, context)
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True, 0.0, bias is None)[
        0
    ]
    return out


def _efficient_attention(query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    bias = _whole_bias(query, context)
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    operation = torch.ops.aten._scaled_dot_product_efficient_attention
    out: Tensor = operation(query, key, value, bias, True, 0.0, bias is None)[0]
    return out


def _whole_bias(query: Tensor, context: Any) -> Tensor | None:
    bias: Tensor | None = context.bias
    return None if bias is None else bias.expand(*query.shape[:3], bias.shape[-1])


def _math_attention(query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    if context.softcap is not None or context.sinks_H is not None:
        return attend_plainly(query, key, value, context)
    grouped = query.shape[1] != key.shape[1]
    causal = context.bias is None
    return F.scaled_dot_product_attention(query, key, value, context.bias, is_causal=causal, enable_gqa=grouped)


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, context: Any) -> Tensor:
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = operation(query, key, value, 0.0, context.bias is None, attn_mask=context.bias)[0]
    return out


def fused_rms_norm(x: Tensor, weight: Tensor, recorder: Recorder | None = None) -> Tensor:
    """Compute RMSNorm as uncompiled runs on accelerators do: one kernel each way, which `recorder` is told of."""
    result = _FusedRmsNorm.apply(x, weight, recorder)
    assert isinstance(result, Tensor)
    return result


class _FusedRmsNorm(torch.autograd.Function):
    """Only the memory traffic; one number a row is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recorder: Recorder | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y, scale = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=wide)
        _record_kernel(recorder, "_fused_rms_norm", [x, weight], [y, scale])
        ctx.save_for_backward(x, weight, scale)
        ctx.recorder = recorder
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        _record_kernel(ctx.recorder, "_fused_rms_norm_backward", [grads[0], x, weight, scale], [grad_x, grad_weight])
        return grad_x, grad_weight, None


def _record_kernel(recorder: Recorder | None, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
    if recorder is None:
        return
    step = Step(name, "reduction", recorder.phase, writes[0].dtype, work=[writes[0].numel()])
    recorder.add(step, reads, writes)


def ring_operations() -> dict[Any, Opaque]:
    """Return the functions that a recorder runs in place of each operation of ring attention."""

    def recorded(along: Callable[..., Any]) -> Opaque:
        def run(recorder: Recorder, *arguments: Any) -> Any:
            *tensors, _group, rank, size = arguments
            return along(_RecordedRing(rank, size, recorder), *tensors)

        return run

    return {RING_ATTENTION: recorded(attend_along), RING_GRADIENTS: recorded(gradients_along)}


class _RecordedRing(Ring):
    """Writes down what it would send."""

    def __init__(self, rank: int, size: int, recorder: Recorder) -> None:
        super().__init__(rank, size)
        self.recorder = recorder

    def start(self, x: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Send nothing, record the message and return an empty tensor in place of what would be received."""
        # Memory for the message is what counts; what is in it does not.
        received = torch.empty_like(x)
        step = Step("send", "collective", self.recorder.phase, x.dtype)
        step.collective = Collective("send", "cp", self.size, x.nbytes)
        self.recorder.add(step, [x], [received])
        return [], received


@contextlib.contextmanager
def fused_norms() -> Iterator[None]:
    """Let RMSNorm on tensors without elements make and keep what the single kernel does, and compute nothing.

    The function itself is replaced: a mode of PyTorch's would be off where it matters, in a backward pass that computes
    blocks again.
    """

    def norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        assert weight is not None
        return fused_rms_norm(input, weight)

    with patch.object(F, "rms_norm", norm):
        yield
