"""Output head and cross-entropy in one pass over chunks of tokens, so that all logits never exist at once.

The gradient is formed chunk by chunk in the forward pass and only scaled in the backward pass: one matmul each for logits,
input gradient and weight gradient, no recomputation. Losses are sums, with the number of targets beside them, so that
uneven batches average right over micro-batches and ranks; the sum also keeps half-precision gradients away from underflow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.logits import log_partition, replace_by_gradient
from phalanx.nn.layers import soft_cap
from phalanx.torch_compat import common as compat

ChunkLoss = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""The signature of `chunk_loss`."""

TokenScores = Callable[[Tensor, Tensor], Tensor]
"""The signature of `token_scores`."""

IGNORED = -100
"""Target value that takes no part in the loss."""


class LossSum(NamedTuple):
    """Loss summed over targets, in at least float32, and how many targets there were (int64); both 0-dim."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
    kernel: ChunkLoss | None = None,
) -> LossSum:
    """Sum of cross-entropies (nats) of `targets_N` under softmax(hidden W^T), plus z_loss * log(Z)^2 for each target.

    hidden_ND: [N, D] activations. weight_VD: [V, D], cast to the activations' format. targets_N: int64, `IGNORED` is
    skipped. chunk_tokens: tokens whose logits are held at once. z-loss: PaLM (Chowdhery et al. 2022), section 5.
    softcap: bound of the logits, see `soft_cap`; None leaves them. kernel: `chunk_loss` (the default) or a compiled form
    of it.
    """
    kernel = kernel or chunk_loss
    if softcap is not None:
        kernel = partial(_capped_chunk_loss, kernel, softcap)
    # Beside the sum, not divided into it: means over uneven micro-batches would weigh tokens unequally.
    count = (targets_N != IGNORED).sum()
    with_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    total = _LinearCrossEntropy.apply(hidden_ND, weight_VD, targets_N, chunk_tokens, z_loss, with_grad, kernel)
    assert isinstance(total, Tensor)
    return LossSum(total, count)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk_tokens: int,
        z_loss: float,
        with_grad: bool,
        loss_and_gradient: ChunkLoss,
    ) -> Tensor:
        # Sums over many tokens lose low bits in half precision.
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        # Cast once for all chunks.
        weight = weight_VD.to(hidden_ND.dtype)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        # A frozen table has no gradient, which would be the largest of all; nothing is asked of frozen layers before it.
        moves_hidden, trains_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden_ND) if moves_hidden else None
        grad_weight: Tensor | None = None
        # Logits are the largest tensor of a step by far: only those of one chunk exist at a time.
        for start in range(0, len(hidden_ND), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden = hidden_ND[rows]
            loss, grad_logits = loss_and_gradient(hidden @ weight.T, targets_N[rows], z_loss, with_grad)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if trains_weight:
                grad_weight = compat.add_matmul(grad_weight, grad_logits.T, hidden, wide)
        # The gradients themselves: the backward pass needs neither logits nor activations again.
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * scale
        if grad_weight is not None:
            # Straight into the parameter's format: of a large table a second wide gradient may be the peak of a step.
            narrow = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight, scale, out=narrow)
        return grad_hidden, grad_weight, None, None, None, None, None


def token_scores(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return each target's loss in nats and the likeliest token under its logits, float64 [2, N]; every target counts."""
    # In float64: of many candidates some lie closer together than the rounding of a sum.
    wide = logits_NV.double()
    nats_N = torch.logsumexp(wide, dim=-1) - wide.gather(1, targets_N[:, None]).squeeze(1)
    return torch.stack((nats_N, wide.argmax(-1).double()))


def _capped_chunk_loss(
    kernel: ChunkLoss, softcap: float, logits_NV: Tensor, targets_N: Tensor, z_loss: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the results of `kernel` for capped logits, the gradient with respect to those before the cap."""
    capped_NV = soft_cap(logits_NV, softcap)
    # Before the kernel, which writes over what it is given.
    slope_NV = 1.0 - (capped_NV / softcap).square() if with_grad else None
    total, grad_NV = kernel(capped_NV, targets_N, z_loss, with_grad)
    return total, grad_NV if slope_NV is None else grad_NV * slope_NV


def chunk_loss(logits_NV: Tensor, targets_N: Tensor, z_loss: float, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return summed loss of one chunk and, if asked for, its gradient with respect to the logits, in their place."""
    kept_N = targets_N != IGNORED
    # gather refuses the negative mark of an ignored target; its loss is left out below.
    safe_N = targets_N.clamp(min=0)
    log_z_N = log_partition(logits_NV)
    picked_N = logits_NV.gather(1, safe_N[:, None]).squeeze(1).to(log_z_N.dtype)
    total = sum_losses(log_z_N, picked_N, kept_N, z_loss)
    if with_grad:
        replace_by_loss_gradient(logits_NV, log_z_N, safe_N, kept_N, z_loss)
    return total, logits_NV


def sum_losses(log_z_N: Tensor, picked_N: Tensor, kept_N: Tensor, z_loss: float) -> Tensor:
    """Return the summed loss of tokens, 0-dim, from the log-partition of each and its target's logit, where kept_N holds."""
    return torch.where(kept_N, log_z_N - picked_N + z_loss * log_z_N.square(), 0.0).sum()


def replace_by_loss_gradient(
    logits_NV: Tensor, log_z_N: Tensor, target_N: Tensor, kept_N: Tensor, z_loss: float
) -> None:
    """Write the gradient of `sum_losses` with respect to the logits over these. target_N: see `replace_by_gradient`."""
    # In place: two tensors of this size would be most of what a step with a large vocabulary takes at its peak.
    replace_by_gradient(logits_NV, log_z_N, target_N, torch.where(kept_N, 1.0 + 2.0 * z_loss * log_z_N, 0.0))
