"""Cross-entropy over rows of logits in two operations: their log-partitions, and the gradient in place of the logits.

Logits are the largest tensor of a step. Each operation reads them once; what stands between the two is a few numbers a row,
so that ranks which share out the vocabulary can exchange them there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels import kernels_for


def log_partition(logits_NV: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) of each row, [N], in at least float32."""
    # Compilers fuse the plain form elsewhere; on a device they read the logits twice.
    return log_partition_kernel(logits_NV) if logits_NV.is_cuda else log_partition_reference(logits_NV)


def replace_by_gradient(logits_NV: Tensor, log_z_N: Tensor, target_N: Tensor, factor_N: Tensor) -> None:
    """Write softmax(logits) * factor minus one at the target over each row of `logits_NV`.

    log_z_N: of the softmax, [N]. target_N: column of the target, int64; one that is none of the columns is in no row.
    factor_N: like log_z_N; 0 where a row has no target: its gradient is 0.
    """
    if logits_NV.is_cuda:
        replace_by_gradient_kernel(logits_NV, log_z_N, target_N, factor_N)
    else:
        replace_by_gradient_reference(logits_NV, log_z_N, target_N, factor_N)


def log_partition_reference(logits_NV: Tensor) -> Tensor:
    """Do as `log_partition` in plain PyTorch, for every device and format."""
    return torch.logsumexp(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), dim=-1)


def replace_by_gradient_reference(logits_NV: Tensor, log_z_N: Tensor, target_N: Tensor, factor_N: Tensor) -> None:
    """Do as `replace_by_gradient` in plain PyTorch, for every device and format."""
    probability_NV = (logits_NV.to(log_z_N.dtype) - log_z_N[:, None]).exp() * factor_N[:, None]
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    grad_NV = probability_NV - (column_V == target_N[:, None]).to(probability_NV.dtype)
    logits_NV.copy_(torch.where(factor_N[:, None] == 0.0, 0.0, grad_NV))


@torch.library.custom_op("phalanx::log_partition", mutates_args=())
def log_partition_kernel(logits_NV: Tensor) -> Tensor:
    """Do as `log_partition`, by our own kernel where there is one."""
    kernel = kernels_for(logits_NV, "logits_triton")
    if kernel is None or not _covers(logits_NV):
        return log_partition_reference(logits_NV)
    result: Tensor = kernel.run_log_partition(logits_NV)
    return result


@log_partition_kernel.register_fake
def _(logits_NV: Tensor) -> Tensor:
    return logits_NV.new_empty(len(logits_NV), dtype=torch.promote_types(logits_NV.dtype, torch.float32))


@torch.library.custom_op("phalanx::replace_by_gradient", mutates_args=("logits_NV",))
def replace_by_gradient_kernel(logits_NV: Tensor, log_z_N: Tensor, target_N: Tensor, factor_N: Tensor) -> None:
    """Do as `replace_by_gradient`, by our own kernel where there is one."""
    kernel = kernels_for(logits_NV, "logits_triton")
    if kernel is None or not _covers(logits_NV):
        replace_by_gradient_reference(logits_NV, log_z_N, target_N, factor_N)
    else:
        kernel.run_replace_by_gradient(logits_NV, log_z_N.contiguous(), target_N.contiguous(), factor_N.contiguous())


@replace_by_gradient_kernel.register_fake
def _(logits_NV: Tensor, log_z_N: Tensor, target_N: Tensor, factor_N: Tensor) -> None:
    return None


def _covers(logits_NV: Tensor) -> bool:
    known = logits_NV.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and logits_NV.is_contiguous() and logits_NV.numel() > 0
