"""From a run and its layout to a model on this rank's device, ready to train. The whole order, on one screen.

1. Build this rank's pipeline stages on meta: nothing is allocated, whatever the size of the model.
2. Split matrices over `tp`, and stream them if the layout says so: first, since everything after it must see the parts.
3. Join attention over `cp`, and tell it which heads are its own. (A family does 1 to 3 in `build`.)
4. Recompute: inside compilation, so that the compiler sees what is kept.
5. Compile: each block by itself; equal blocks share one compiled program. Offload activations: around it.
6. Shard over data ranks: outside compilation, so that gathers stay outside the compiled programs.
7. Allocate only this rank's shards, then fill them: every value is a function of seed, name and global index alone.
8. Join the stages into a pipeline: it runs what is by then a finished model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from phalanx.config.schema import Run
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.data_parallel.copy_engine import choose_copy_engine
from phalanx.layout.data_parallel.fully_sharded import FullySharded, ShardingOptions
from phalanx.layout.data_parallel.gradients import gradient_norm_over_ranks
from phalanx.layout.data_parallel.low_precision import LowPrecisionParameters
from phalanx.layout.data_parallel.task_heads import branch_groups
from phalanx.layout.expert_parallel.token_exchange import Stages
from phalanx.layout.gathered_matrices import GatheredMatrices
from phalanx.layout.initial_values import initialise_parameters
from phalanx.layout.layout_model import (
    BuildContext,
    LayoutModel,
    Stage,
    WholeParameters,
    named_parameters,
    saved_state,
    whole_name,
)
from phalanx.layout.mesh import Mesh
from phalanx.layout.offloaded_activations import OffloadedActivations, offload_blocks
from phalanx.layout.pipeline import Pipeline
from phalanx.layout.place import TensorSplits
from phalanx.layout.prepare_blocks import compile_stage, compiles_blocks, recompute_stage
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import model_chunks
from phalanx.layout.streamed_weights.streamed_sharding import StreamedSharding
from phalanx.layout.tensor_parallel.peer_exchange import SMALLEST_EXCHANGE, choose_exchange
from phalanx.layout.tensor_parallel.split_layers import overlap_exchanges
from phalanx.nn.adapters import Adapters, TrainedParameters
from phalanx.nn.experts import choose_expert_products
from phalanx.nn.layers import choose_products, separate_gradients
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import ModelChunk
from phalanx.optimizers import HeldParameters, WholeMatrices
from phalanx.torch_compat import common as compat


@dataclass(frozen=True)
class ParallelModel:
    """A model laid out on this rank."""

    layout: ResolvedLayout
    mesh: Mesh
    sharding: WholeParameters
    """How parameters are gathered and gradients reduced over data-parallel ranks."""
    stages: list[Stage]
    """Run forward and backward, in the order of the model."""
    parameters: dict[str, nn.Parameter]
    """Main parameters by their names in the whole model: what is initialised, updated and saved, with its gradients."""
    state: dict[str, Tensor]
    """What stages keep beside parameters and save with them, by name in the whole model; alike on all data ranks."""
    splits: TensorSplits
    """Which part of its parameter a rank's is, over `tp`; data-parallel shards are parts of that part."""
    pipeline: Pipeline | None
    compiled: bool
    """Whether blocks are compiled when they first run."""
    tied: frozenset[str] = frozenset()
    """Parameters of the tied embedding group: this rank shares them with the other end of the pipeline."""
    branch: frozenset[str] = frozenset()
    """Parameters of task heads, which the ranks of `mesh.branch` alone hold, alike."""
    experts: frozenset[str] = frozenset()
    """Parameters that are sharded over the ranks of `mesh.ep`; those of `mesh.expert_replicas` hold them alike."""

    @property
    def compute_parameters(self) -> dict[Tensor, Tensor]:
        """The low-precision parameter that computes in place of each main parameter, where there are any."""
        joined = [stage.low_precision.of_main for stage in self.stages if stage.low_precision is not None]
        return {main: compute for one in joined for main, compute in one.items()}

    @property
    def gradients_followed(self) -> bool:
        """Whether something follows each gradient as autograd forms it: a reduction, or a copy into a main parameter's."""
        return self.mesh.data is not None or any(stage.low_precision is not None for stage in self.stages)

    def hold_parameters(self, model: LayoutModel) -> HeldParameters:
        """Return what an optimizer may know of how this rank holds the parameters of `model`."""
        # Tables that families count among matrices (of elements, by degree) may have more dims.
        rows = {
            name: found
            for name, parameter in self.parameters.items()
            if parameter.dim() == 2 and parameter.requires_grad and (found := model.matrix_rows(name)) is not None
        }
        dtype = model.precision.compute_dtype
        if self.mesh.world is None:
            matrices = WholeMatrices({self.parameters[name]: found for name, found in rows.items()}, dtype)
        else:
            # The pipeline is the outermost axis: ranks of a stage follow each other.
            size = self.layout.world_size // self.mesh.pp.size
            alike = range(self.mesh.pp.rank * size, (self.mesh.pp.rank + 1) * size)
            matrices = GatheredMatrices(self.parameters, self.splits, rows, dtype, self.mesh.world, alike)
        return HeldParameters(self.compute_parameters, self.sharding.quantised_copies, matrices)

    def with_global_batch(self, samples: int) -> ParallelModel:
        """Return the same model run on global batches of `samples`, which suit its layout; all ranks call it together."""
        if samples == self.layout.global_batch:
            return self
        layout, pipeline = replace(self.layout, global_batch=samples), None
        if self.pipeline is not None:
            # A schedule is made for a number of micro-batches.
            pipeline = Pipeline(self.stages, layout, self.mesh.pp, self.pipeline.device)
        return replace(self, layout=layout, pipeline=pipeline)

    def begin_sums(self) -> None:
        """Let layers add gradients of their weights to sums over micro-batches, where the layout has such sums."""
        if self.layout.table.sums_in_products[0]:
            for stage in self.stages:
                self.sharding.begin_sums(stage)

    def end_sums(self) -> None:
        """Let layers give autograd the gradients of their weights again, and drop sums that nothing has taken."""
        if self.layout.accumulation > 1:
            for stage in self.stages:
                self.sharding.end_sums(stage)

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of the whole model, equal on every rank."""
        return gradient_norm_over_ranks(self.mesh, self.parameters, self.splits, self.tied, self.branch, self.experts)

    @property
    def saved(self) -> dict[str, Tensor]:
        """Parameters and state by name: what a checkpoint of the model holds."""
        return {**self.parameters, **self.state}

    def finish_step(self, skip: Tensor) -> Tensor | None:
        """Let the stages update what they keep beside parameters. skip: 1 where the step changed nothing, 0-dim.

        Returns what the mixtures of experts of the whole model did, on every rank (see `Stage.finish_step`).
        """
        parts = [stage.finish_step(skip, self._sum_over_copies) for stage in self.stages]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        total = torch.stack(found).sum(0)
        # Each pipeline rank knows its own layers; the first one writes the log.
        pp = self.mesh.pp
        return total if pp.size == 1 else compat.all_reduce(total, pp.group_name)

    def _sum_over_copies(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks that hold the same stages."""
        for axis in (self.mesh.tp, self.mesh.shards, self.mesh.replicas):
            if axis.size > 1:
                x = compat.all_reduce(x, axis.group_name)
        return x

    def refresh(self, written: Collection[Tensor] = ()) -> None:
        """Let the stages compute with the present main parameters; to be called whenever these have changed.

        written: copies of `hold_parameters` that the optimizer has written, and that hold their main parameter's value so.
        """
        for stage in self.stages:
            if stage.low_precision is not None:
                stage.low_precision.refresh(written)
        self.sharding.publish_parameters(written)


def apply_layout(
    model: LayoutModel,
    layout: ResolvedLayout,
    mesh: Mesh,
    device: torch.device,
    attention: AttentionChoice,
    *,
    fill: bool = True,
) -> ParallelModel:
    """Build the stages of `model` that belong on this rank, over `mesh`, with their initial values.

    fill: whether parameters get their initial values, for which a dry run has no memory. All ranks of `mesh` call it
    together. Raises ConfigError where layout.peer_copies=true and ranks cannot read each other's memory.
    """
    sharding = choose_sharding(model.run, layout, mesh, device)
    context = make_context(layout, mesh, device, attention, sharding, Adapters.of(model.run.training.lora))
    builder = StageBuilder(model, layout, context, whole=mesh.data is None, fill=fill)
    chunks = model_chunks(layout, mesh.pp.rank, model.run.model.n_layers, model.block_costs())
    built = [builder.build_stage(chunk, index) for index, chunk in chunks.items()]
    stages = [one.stage for one in built]
    parameters = {name: parameter for one in built for name, parameter in one.parameters.items()}
    # By identity, after sharding, which leaves these parameters as they were.
    apart = {parameter for stage in stages for parameter in stage.branch_parameters()}
    applied = ParallelModel(
        layout,
        mesh,
        sharding,
        stages,
        parameters,
        state={name: kept for one in built for name, kept in one.state.items()},
        splits={name: split for one in built for name, split in one.splits.items()},
        pipeline=Pipeline(stages, layout, mesh.pp, device) if layout.pp > 1 else None,
        compiled=builder.compiled,
        tied=frozenset(builder.names.values() if mesh.tie.size > 1 else ()),
        branch=frozenset(name for name, parameter in parameters.items() if parameter in apart),
        experts=frozenset(name for one in built for name in one.experts if mesh.ep.size > 1),
    )
    # Copies in a narrower format were allocated before the main parameters had their values.
    applied.refresh()
    return applied


@dataclass(frozen=True)
class BuiltStage:
    """A stage, and what it holds by name in the whole model: see the fields of `ParallelModel`."""

    stage: Stage
    parameters: dict[str, nn.Parameter]
    state: dict[str, Tensor]
    splits: TensorSplits
    experts: list[str]
    """Parameters of its networks of experts."""


class StageBuilder:
    """Builds the stages of a rank one after the other: steps 1 to 7 of this module."""

    def __init__(
        self, model: LayoutModel, layout: ResolvedLayout, context: BuildContext, *, whole: bool, fill: bool
    ) -> None:
        """whole: data-parallel ranks hold whole parameters. fill: give parameters their initial values."""
        self.model, self.layout, self.context, self.fill = model, layout, context, fill
        self.names = model.tied()
        self.trained = TrainedParameters.of(model.run.training)
        self.compiled = compiles_blocks(model, layout, context.device)
        # Sharded parameters are cast as they are gathered; whole ones have a copy in the format of the arithmetic, or large
        # ones in 8 bits: the others are then cast where they are used.
        self.low_precision = whole and model.precision.copies_parameters and model.precision.products is None
        self.activations = OffloadedActivations(context.device) if layout.offload_activations else None
        # Ranks that reach each other's memory are found together, once.
        self.overlaps = bool(layout.table.overlaps_products[0]) and choose_exchange(
            model.run.layout.peer_copies, context.share.tp, context.device
        )

    def build_stage(self, chunk: ModelChunk, index: int) -> BuiltStage:
        """Return the stage of the blocks of `chunk`, the `index`th of the model, with this rank's shards alone."""
        model, device, precision = self.model, self.context.device, self.model.precision
        stage, kept = model.build_stage(self.context, chunk, index)
        module = stage.part
        splits = {whole_name(name, self.names): split for name, split in kept.items()}
        # Still on meta: a cast costs nothing here, and FSDP2 takes its sharded format from what it is given.
        cast_parameters(module, precision.compute_dtype if self.low_precision else precision.main_dtype)
        self.trained.apply(named_parameters(module, self.names))
        recompute_stage(stage, self.layout.recompute)
        # Blocks at either end may keep products of 16 bits.
        first, last = model.run.layout.fp8_keep_ends, model.run.model.n_layers - model.run.layout.fp8_keep_ends
        for number, block in zip(chunk.blocks, module.blocks, strict=True):
            if self.overlaps:
                overlap_exchanges(block, 0 if model.run.layout.peer_copies is True else SMALLEST_EXCHANGE)
            if first <= number < last:
                choose_products(block, precision, device)
                choose_expert_products(block, precision, device)
        # A matmul whose two gradients are one node could not give that of its input alone.
        if self.layout.splits_backward:
            separate_gradients(module)
        if self.compiled:
            compile_stage(stage)
        if self.activations is not None:
            # A pipeline keeps what it receives until the stage has gone backward.
            offload_blocks(list(module.blocks), self.activations, held_input=not chunk.first)
        self.context.sharding.shard_stage(stage)
        main = module
        if self.low_precision:
            # A second module, on meta, has the same names and shapes: its parameters become the main ones.
            main = cast_parameters(model.build(self.context, chunk)[0], precision.main_dtype)
        self.trained.apply(named_parameters(main, self.names))
        # Memory for this rank's shards alone: the whole model never exists anywhere.
        parameters = named_parameters(main.to_empty(device=device), self.names)
        if self.low_precision:
            stage.low_precision = LowPrecisionParameters(main, module.to_empty(device=device))
        # Memory of `to_empty` is fresh: buffers begin at 0.
        for buffer in module.buffers():
            buffer.zero_()
        state = saved_state(module)
        if self.fill:
            initialise_parameters({**parameters, **state}, model.initial_rules(), model.run.training.seed, splits)
        spread = {parameter for one in stage.expert_networks() for parameter in one.parameters()}
        experts = [name for name, p in named_parameters(module, self.names).items() if p in spread]
        return BuiltStage(stage, parameters, state, splits, experts)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Bring the parameters of `module` into `dtype`, and leave its buffers in the formats that it counts in."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def make_context(
    layout: ResolvedLayout,
    mesh: Mesh,
    device: torch.device,
    attention: AttentionChoice,
    sharding: WholeParameters,
    adapters: Adapters | None,
) -> BuildContext:
    """Return what every chunk of the model is built with on this rank."""
    # None: every rank has all task heads.
    groups = branch_groups(layout)
    return BuildContext(
        device,
        attention,
        SequenceShare(mesh.cp, mesh.tp, layout.context),
        ep=mesh.ep,
        expert_tp=layout.expert_tp,
        ep_chunks=layout.ep_chunks,
        ep_stages=Stages(mesh.ep_across, mesh.ep_within) if layout.ep_node > 1 else None,
        branches=None if groups is None else groups.of_rank(mesh.data_rank).branches,
        sharding=sharding,
        gathered=layout.zero == 3 and mesh.shards.size > 1,
        adapters=adapters,
    )


def choose_sharding(run: Run, layout: ResolvedLayout, mesh: Mesh, device: torch.device) -> WholeParameters:
    """Return how the data-parallel ranks of `mesh` hold the parameters of `run`; all of them call it together.

    Raises ConfigError where layout.peer_copies=true and the ranks cannot read each other's memory.
    """
    if mesh.data is None:
        return WholeParameters()
    copy_engine = choose_copy_engine(run.layout.peer_copies, mesh.shards.group, device)
    options = ShardingOptions(
        PRECISIONS[run.layout.precision],
        zero=layout.zero,
        reshard_after_forward=layout.reshard_after_forward,
        blocks_per_unit=run.layout.gather_blocks,
        prefetch_depth=run.layout.gathers_ahead,
    )
    # Streams the matrices of blocks, and shards all else as the other does.
    if layout.gather == "stream":
        return StreamedSharding(mesh, device, options, copy_engine)
    return FullySharded(mesh, options, copy_engine)
