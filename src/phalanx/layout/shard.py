"""Data parallelism: parameters, gradients and optimizer state sharded over `dp_shard`, replicated over `dp_replicate`.

Built on FSDP2 (`fully_shard`); a shard degree of 1 is plain replication. Gradients are summed over ranks in float32, not
averaged: the loss is already divided by the targets of the whole global batch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Shard each block and then the rest of `model` in place over `mesh` ([dp_replicate, dp_shard]).

    dtype: format in which parameters are gathered and used; gradients are reduced in at least float32.
    """
    used = mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32), cast_forward_inputs=False
    )
    for block in blocks:
        fully_shard(block, mesh=used, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # What the root holds (embedding, head) is used last in forward and first in backward: freeing it between is waste.
    fully_shard(model, mesh=used, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums: the pre-multiplied sum that FSDP2 would use instead does not exist in gloo.
            module.set_force_sum_reduction_for_comms(True)
