"""Data parallelism: parameters, gradients and optimizer state shared out over ranks, replicated over others.

Built on FSDP2 (`fully_shard`) at every ZeRO level (Rajbhandari et al. 2020); a shard degree of 1 is plain replication.

    zero=3  parameters are gathered for each block, gradients reduced after each micro-batch
    zero=2  parameters are gathered once a step, gradients reduced after each micro-batch
    zero=1  parameters are gathered once a step, gradients reduced after the last micro-batch
    zero=0  nothing is shared out: gradients are summed over all data-parallel ranks after the last micro-batch

Gradients are summed over ranks in at least float32, not averaged: the loss is already divided by the targets of the whole
global batch.

Conservative forces are derivatives of the energy, formed by a backward pass inside the stage's forward pass, which the
training step then differentiates once more. Sharded block by block that goes wrong: the inner pass runs the blocks' backward
hooks, which free the parameters; what differentiates the inner pass runs before any hook that gathers them again, and finds
empty memory. And it would save nothing, since all blocks are needed again in each of the four passes (forward, inner
backward, and both of these backward). Such a stage is one unit (`Stage.one_unit`): the inner pass lies between the gather
before the stage's forward and the hook on its loss, so no hook runs in it; hooks run in the outer pass alone, once.
Gradients, masters and optimizer state are shared out as ever; what every rank holds besides is one gathered copy of the
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.kernels.parts_sum import added_up
from phalanx.layout.hybrid_stop.streamed_weights import streamed_parameters
from phalanx.layout.peer.copies import PeerCopies
from phalanx.layout.stage import Stage
from phalanx.precision import Precision
from phalanx.torch_compat import fsdp as compat_fsdp


def shard_stage(
    stage: Stage,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool,
    copies: PeerCopies | None = None,
    gather_blocks: int = 1,
    gathers_ahead: int = 1,
) -> None:
    """Shard blocks, the embedding, the head and then what is left of `stage`, in place, over [replicas, shards]; or all of
    it as one unit where the stage asks for that.

    Streamed matrices (`layout.hybrid_stop.streamed_weights`) are shared out already, and heads of branches
    (`layout.multitask`) have places of their own: both stay as they are.

    precision: formats in which parameters are gathered and used, and gradients reduced. copies: exchanges
    among the shards, where collectives do not do them. gather_blocks: neighbouring blocks that make one unit. gathers_ahead:
    units that are gathered while one computes.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )
    part = stage.part
    blocks: list[nn.Module] = [] if stage.one_unit else list(part.blocks)
    units = [blocks[start : start + gather_blocks] for start in range(0, len(blocks), gather_blocks)]
    apart = streamed_parameters(stage) | stage.branch_parameters()
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params={parameter for block in unit for parameter in block.parameters()} & apart,
        )
    # A shared table stays with the root, which both ends of the model can reach.
    apart_from_root = not (stage.shares_table or stage.one_unit)
    first = [part.embedding] if apart_from_root and part.part.first else []
    last = [part.head] if apart_from_root and part.part.last else []
    for embedding in first:
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for head in last:
        # Used last in forward and first in backward: freeing it between is waste.
        fully_shard(
            head,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=False,
            ignored_params=apart & set(head.parameters()),
        )
    # Of one unit too: its backward pass follows at once, so that freeing it between would cost a gather and save nothing.
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=apart)
    sharded = list(_sharded(stage))
    choose_exchanges(sharded, copies)
    compat_fsdp.accumulate_by(sharded, added_up)
    _gather_ahead(_fsdp(first), _fsdp([unit[0] for unit in units]), _fsdp(last), gathers_ahead)


def choose_exchanges(modules: Sequence[FSDPModule], copies: PeerCopies | None) -> None:
    """Let `modules` sum their gradients as they are, and exchange by `copies` where there are any."""
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        # Plain sums: the pre-multiplied sum that FSDP2 would use instead does not exist in gloo.
        module.set_force_sum_reduction_for_comms(True)
    if copies is not None:
        copies.attach(modules)


def _gather_ahead(
    first: Sequence[FSDPModule], blocks: Sequence[FSDPModule], last: Sequence[FSDPModule], count: int
) -> None:
    """Gather `count` units while the one before them computes, forward and backward; beside the ends one.

    Left to itself FSDP2 gathers backward what came before in all forward passes so far. For the first module of a stage that
    is the last one of the micro-batch before: too early, and after the last micro-batch in vain. So it names itself, which
    is there already.
    """
    forward = [*first, *blocks, *last]
    for place, unit in enumerate(forward[:-1]):
        ahead = 1 if unit in first else count
        unit.set_modules_to_forward_prefetch(forward[place + 1 : place + 1 + ahead])
    for place, unit in enumerate(blocks):
        before = blocks[max(0, place - count) : place] or first or [unit]
        unit.set_modules_to_backward_prefetch(list(reversed(before)))
    for unit in first:
        unit.set_modules_to_backward_prefetch([unit])
    for unit in last:
        unit.set_modules_to_backward_prefetch(list(blocks[-1:] or first or [unit]))


def _fsdp(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    found: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    assert len(found) == len(modules)
    return found


def prepare_microbatch(stage: Stage, zero: int, *, last: bool) -> None:
    """Tell a sharded `stage` what to communicate in the next micro-batch; `last`: of this optimizer step."""
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(last)
    stage.set_requires_gradient_sync(last or zero >= 2)
    # After the call above, which sets this too: replicas add up once a step, not after every micro-batch.
    stage.set_requires_all_reduce(last)
    if zero < 3:
        stage.set_reshard_after_backward(last)


def _sharded(stage: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))
