"""FlashAttention-4 (Zadouri et al. 2026) as operations the compiler does not look into.

The package `flash-attn-4` is optional, and runs on NVIDIA devices of compute capability 9.0 and above. Its own layout is
[B, S, H, E], which is how our projections lie in memory: seen as [B, H, S, E] nothing is copied either way. Keys and values
are not repeated for the query heads that share them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

INSTALL = "pip install phalanx-train[flash4]"


class Flash4(NamedTuple):
    """The two functions of the package that are used, or why there are none."""

    forward: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    reason: str = ""


@cache
def import_flash4() -> Flash4:
    """Import the package's kernels."""
    try:
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # noqa: PLC0415
    # A compiler library that does not fit the driver or the package fails in ways of its own while it is imported.
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as error:
        return Flash4(None, None, f"{type(error).__name__}: {error}")
    return Flash4(_flash_attn_fwd, _flash_attn_bwd)


def why_not_flash4(device: torch.device) -> str | None:
    """Return why FlashAttention-4 cannot run on `device`, with the fix where there is one; None where it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it needs an NVIDIA device of compute capability 9.0 or above"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return f"it needs compute capability 9.0 or above, and this device has {capability[0]}.{capability[1]}"
    reason = import_flash4().reason
    return f"flash-attn-4 cannot be imported ({reason}); {INSTALL}" if reason else None


def flash4_attention(query_BHSE: Tensor, key_BKSE: Tensor, value_BKSE: Tensor) -> Tensor:
    """Compute causal softmax(q k^T / sqrt(E)) v in bfloat16 or float16, with gradients.

    Returns [B, H, S, E], in memory as [B, S, H, E].
    """
    out: Tensor = flash4_forward(query_BHSE, key_BKSE, value_BKSE, True)[0]
    return out


@torch.library.custom_op("phalanx::flash4_forward", mutates_args=(), device_types="cuda")
def flash4_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, S, E] (in memory [B, S, H, E]) and its log-partitions, float32 [B, H, S].

    query: [B, H, S, E]; key, value: [B, K, S, E] with K dividing H; bfloat16 or float16. causal: no key behind its query.
    """
    forward = import_flash4().forward
    assert forward is not None, import_flash4().reason
    # Detached: the package's functions would record a graph of their own.
    query, key, value = (x.detach().transpose(1, 2) for x in (query, key, value))
    out, log_z = forward(query, key, value, causal=causal, return_lse=True)[:2]
    return out.transpose(1, 2), log_z


FLASH4_FORWARD = torch.ops.phalanx.flash4_forward.default
"""The operation itself, as recompute policies see it."""


@flash4_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return _rows_first(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("phalanx::flash4_backward", mutates_args=(), device_types="cuda")
def flash4_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_z: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value, each of its shape and in memory [B, S, heads, E].

    grad: of `out`, the result of `flash4_forward` whose inputs and log-partitions are given with it.
    """
    backward = import_flash4().backward
    assert backward is not None, import_flash4().reason
    grads = _rows_first(query), _rows_first(key), _rows_first(value)
    inputs = (x.detach().transpose(1, 2) for x in (query, key, value, out))
    grad_query, grad_key, grad_value = (x.transpose(1, 2) for x in grads)
    backward(
        *inputs,
        # A gradient may come in any order of dims, expanded even; the kernel reads rows.
        grad.transpose(1, 2).contiguous(),
        log_z,
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=grad_query,
        dk=grad_key,
        dv=grad_value,
    )
    return grads


@flash4_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_z: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows_first(query), _rows_first(key), _rows_first(value)


def _rows_first(x: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape of x [B, H, S, E] that lies in memory as [B, S, H, E]."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])
    # Nobody asks for gradients of log-partitions: zeros in their place would be memory for nothing.
    ctx.set_materialize_grads(False)


def _run_backward(ctx: Any, grad: Tensor, _grad_log_z: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*flash4_backward(grad, *ctx.saved_tensors, ctx.causal), None)


flash4_forward.register_autograd(_run_backward, setup_context=_save_tensors)
