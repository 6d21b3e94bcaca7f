"""Data parallelism: parameters, gradients and optimizer state sharded over ranks, replicated over others.

Built on FSDP2 (`fully_shard`) at every ZeRO level (Rajbhandari et al. 2020); a shard degree of 1 is plain replication.

    zero=3  parameters are gathered for each block, gradients reduced after each micro-batch
    zero=2  parameters are gathered once a step, gradients reduced after each micro-batch
    zero=1  parameters are gathered once a step, gradients reduced after the last micro-batch
    zero=0  nothing is sharded: gradients are summed over all data-parallel ranks after the last micro-batch

Gradients are summed over ranks in at least float32, not averaged: the loss is already divided by the targets of the whole
global batch.

Conservative forces are derivatives of the energy, formed by a backward pass inside the stage's forward pass, which the
training step then differentiates once more. Sharded block by block that goes wrong: the inner pass runs the blocks' backward
hooks, which free the parameters; what differentiates the inner pass runs before any hook that gathers them again, and finds
empty memory. And it would save nothing, since all blocks are needed again in each of the four passes (forward, inner
backward, and both of these backward). Such a stage is one unit (`Stage.one_unit`): the inner pass lies between the gather
before the stage's forward and the hook on its loss, so no hook runs in it; hooks run in the outer pass alone, once.
Gradients, main parameters and optimizer state are sharded as ever; what every rank holds besides is one gathered copy of the
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.kernels.float8 import QuantisedCopy
from phalanx.kernels.parts_sum import add_gradient
from phalanx.layout.data_parallel.copy_engine import CopyEngine
from phalanx.layout.data_parallel.quantised_shards import QuantisedShards
from phalanx.layout.layout_model import Stage, WholeParameters
from phalanx.layout.mesh import Mesh
from phalanx.nn.layers import Linear
from phalanx.nn.precision import Precision
from phalanx.torch_compat import fsdp as compat_fsdp


@dataclass(frozen=True)
class ShardingOptions:
    """FSDP2 as a layout wants it."""

    precision: Precision
    """Formats in which parameters are gathered and used, and gradients reduced."""
    zero: int = 3
    """ZeRO level, as above."""
    reshard_after_forward: bool = True
    """Whether blocks are freed between their forward and their backward pass."""
    blocks_per_unit: int = 1
    """FSDP wrapping granularity: neighbouring blocks that are gathered together."""
    prefetch_depth: int = 1
    """Units that are gathered while one computes."""
    cast_inputs: bool = False
    """Whether inputs of units are cast to the format of parameters; layers of this package do so themselves."""


class FullySharded(WholeParameters):
    """FSDP2 over [replicas, shards]. See `WholeParameters` for what each method is for."""

    def __init__(self, mesh: Mesh, options: ShardingOptions, copy_engine: CopyEngine | None = None) -> None:
        """Shard over `mesh.data`. copy_engine: makes the exchanges among the shards; None leaves them to collectives."""
        assert mesh.data is not None
        super().__init__()
        self.mesh = mesh
        self.data = mesh.data
        self.options = options
        self.copy_engine = copy_engine
        self.quantised = QuantisedShards(mesh.shards)

    def parameters_apart(self, stage: Stage) -> set[nn.Parameter]:
        """Return the parameters that FSDP2 leaves as they are: those of task heads have sub-groups of their own."""
        apart = stage.branch_parameters()
        if self.mesh.ep.size > 1 and self.mesh.expert_data is None:
            # No other rank has these experts: there is nothing to gather and nobody to sum gradients with.
            apart |= {parameter for one in stage.expert_networks() for parameter in one.parameters()}
        return apart

    def shard_stage(self, stage: Stage) -> None:
        """Shard blocks, the embedding, the head and then what is left; or all as one unit where the stage asks for that."""
        part = stage.part
        # A shared table stays with the root, which both ends of the model can reach.
        ends_apart = not (stage.shares_table or stage.one_unit)
        self.shard_module(
            stage,
            blocks=[] if stage.one_unit else list(part.blocks),
            first=[part.embedding] if ends_apart and part.part.first else [],
            last=[part.head] if ends_apart and part.part.last else [],
            apart=self.parameters_apart(stage),
            experts=stage.expert_networks() if self.mesh.ep.size > 1 else [],
        )

    def shard_module(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        first: Sequence[nn.Module] = (),
        last: Sequence[nn.Module] = (),
        apart: Collection[nn.Parameter] = (),
        experts: Sequence[nn.Module] = (),
    ) -> None:
        """Shard `blocks`, `first`, `last` and then what is left of `root`, in place.

        blocks: in the order of use. first, last: at most one module each, before and behind the blocks. apart: parameters
        that stay as they are. experts: modules in blocks whose parameters other ranks share than those of the rest.
        """
        options, size = self.options, self.options.blocks_per_unit
        if self.mesh.expert_data is not None:
            compat_fsdp.allow_units_in_checkpoints()
            # Before the blocks around them, which then leave them alone.
            for one in experts:
                self._shard([one], (), self.mesh.expert_data, reshard_after_forward=options.reshard_after_forward)
        units = [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]
        for unit in (*units, *([one] for one in first)):
            self._shard(unit, apart, self.data, reshard_after_forward=options.reshard_after_forward)
        for one in last:
            # Used last in forward and first in backward: freeing it between is waste.
            self._shard([one], apart, self.data, reshard_after_forward=False)
        # The backward pass of the root follows at once too: freeing it between would cost a gather and save nothing.
        self._shard([root], apart, self.data, reshard_after_forward=False)
        sharded = _sharded_modules(root)
        spread = {id(one) for one in experts}
        compat_fsdp.accumulate_by(sharded, add_gradient)
        self.quantised.add(sharded, [module for module in root.modules() if isinstance(module, Linear)])
        choose_exchanges([module for module in sharded if id(module) not in spread], self.copy_engine)
        # Copy engines know the ranks of the data mesh alone.
        choose_exchanges([module for module in sharded if id(module) in spread], None)
        _set_prefetching(_as_fsdp(first), _as_fsdp([unit[0] for unit in units]), _as_fsdp(last), options.prefetch_depth)

    def _shard(
        self,
        modules: list[nn.Module],
        apart: Collection[nn.Parameter],
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool,
    ) -> None:
        """Make `modules` one unit of FSDP2 over `mesh`, except their parameters in `apart`."""
        precision = self.options.precision
        # Sums lose more digits than products: gradients are reduced in float32 even if they were computed in bfloat16.
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype,
            reduce_dtype=precision.reduce_dtype,
            cast_forward_inputs=self.options.cast_inputs,
        )
        own = {parameter for module in modules for parameter in module.parameters()}
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=own & set(apart),
        )

    def prepare_microbatch(self, stage: nn.Module, *, last: bool) -> None:
        """Reduce gradients and free parameters after this micro-batch, or not, as the ZeRO level says."""
        assert isinstance(stage, FSDPModule)
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or self.options.zero >= 2)
        # After the call above, which sets this too: replicas add up once a step, not after every micro-batch.
        stage.set_requires_all_reduce(last)
        if self.options.zero < 3:
            stage.set_reshard_after_backward(last)

    def begin_sums(self, stage: Stage) -> None:
        """See `WholeParameters`."""
        assert isinstance(stage, FSDPModule)
        compat_fsdp.begin_sums(_sharded_modules(stage), stage.summing_layers)
        # Until whoever runs the passes says which is the last.
        stage.set_requires_gradient_sync(False)

    def end_sums(self, stage: Stage) -> None:
        """See `WholeParameters`."""
        compat_fsdp.begin_sums(_sharded_modules(stage), [])

    def publish_parameters(self, written: Collection[Tensor] = ()) -> None:
        """See `WholeParameters`."""
        self.quantised.publish(written)
        if self.copy_engine is not None:
            self.copy_engine.renew()

    @property
    def quantised_copies(self) -> dict[Tensor, QuantisedCopy]:
        """See `WholeParameters`."""
        return self.quantised.copies

    @property
    def buffer_bytes(self) -> int:
        """See `WholeParameters`."""
        return 0 if self.copy_engine is None else self.copy_engine.bytes


def choose_exchanges(modules: Sequence[FSDPModule], copy_engine: CopyEngine | None) -> None:
    """Let `modules` sum their gradients without dividing, and exchange through `copy_engine` where there is one."""
    for module in modules:
        # The loss is divided by the targets of the global batch already.
        module.set_gradient_divide_factor(1.0)
        # Plain sums: the pre-multiplied sum that FSDP2 would use instead does not exist in gloo.
        module.set_force_sum_reduction_for_comms(True)
    if copy_engine is not None:
        copy_engine.attach(modules)


def _set_prefetching(
    first: Sequence[FSDPModule], blocks: Sequence[FSDPModule], last: Sequence[FSDPModule], depth: int
) -> None:
    """Gather `depth` units while the one before them computes, forward and backward; beside embedding and head one.

    By default FSDP2 prefetches in reverse order of all recorded forward passes, which for the first module is the last
    module of the previous micro-batch: too early, and after the last micro-batch in vain. So the first module names itself:
    it is gathered already, prefetching it is a no-op, and naming it suppresses the default.
    """
    forward = [*first, *blocks, *last]
    for place, unit in enumerate(forward[:-1]):
        ahead = 1 if unit in first else depth
        unit.set_modules_to_forward_prefetch(forward[place + 1 : place + 1 + ahead])
    for place, unit in enumerate(blocks):
        before = blocks[max(0, place - depth) : place] or first or [unit]
        unit.set_modules_to_backward_prefetch(list(reversed(before)))
    for unit in first:
        unit.set_modules_to_backward_prefetch([unit])
    for unit in last:
        unit.set_modules_to_backward_prefetch(list(blocks[-1:] or first or [unit]))


def _sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _as_fsdp(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    """Return `modules`, which `fully_shard` has made FSDP modules, as what they are now."""
    # `fully_shard` changes a module's class in place, which no type says.
    found: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    assert len(found) == len(modules)
    return found
