"""From a run and its layout to a model on this rank's device, ready to train. The whole order, on one screen.

1. Build this rank's pipeline stages on meta: nothing is allocated, whatever the size of the model.
2. Split matrices over `tp`: first of all, since everything after it must see the parts (`layout.<family>`).
3. Join attention over `cp`, and tell it which heads are its own (there too).
4. Recompute: inside compilation, so that the compiler sees what is kept.
5. Compile: each block by itself; equal blocks share one compiled program.
6. Shard over data ranks: outside compilation, so that gathers stay outside the compiled programs.
7. Allocate only this rank's shards, then fill them: every value is a function of seed, name and global index alone.
8. On a rank whose parameters are shared with nobody, compute in a low-precision copy of the float32 masters.
9. Join the stages into a pipeline: it runs what is by then a finished model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.layout.attention import AttentionChoice
from phalanx.layout.family import Building, LayoutModel
from phalanx.layout.hybrid_stop.copies import CopyRing
from phalanx.layout.hybrid_stop.ring_transport import Ring
from phalanx.layout.hybrid_stop.streamed_weights import Stream
from phalanx.layout.init import initialise_parameters
from phalanx.layout.mesh import Mesh
from phalanx.layout.multitask import branch_groups
from phalanx.layout.peer.copies import PeerCopies
from phalanx.layout.pipeline import Pipeline
from phalanx.layout.place import TensorSplits
from phalanx.layout.recompute import recompute_block
from phalanx.layout.shard import shard_stage
from phalanx.layout.share import SequenceShare
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage, named_parameters, whole_name
from phalanx.layout.stages import model_parts
from phalanx.layout.working_copy import WorkingCopy
from phalanx.nn.layers import separate_gradients
from phalanx.nn.splits import ModelPart
from phalanx.precision import PRECISIONS
from phalanx.torch_compat import common as compat


@dataclass(frozen=True)
class Applied:
    """A model laid out on this rank."""

    layout: ResolvedLayout
    mesh: Mesh
    stages: list[Stage]
    """Run forward and backward, in the order of the model."""
    parameters: dict[str, nn.Parameter]
    """By their names in the whole model: what is initialised, updated and saved, with its gradients."""
    splits: TensorSplits
    """Which part of its parameter a rank's is, over `tp`; data-parallel shards are parts of that part."""
    pipeline: Pipeline | None
    compiled: bool
    """Whether blocks are compiled when they first run."""
    tied: frozenset[str] = frozenset()
    """Parameters that this rank shares with the other end of the pipeline."""
    branch: frozenset[str] = frozenset()
    """Parameters that the ranks of `mesh.branch` alone hold, alike."""
    stream: Stream | None = None
    """What streams the matrices of blocks, where the layout asks for it."""
    copies: PeerCopies | None = None
    """What gathers parameters, where collectives do not."""

    @property
    def working(self) -> dict[Tensor, Tensor]:
        """What computes in place of each parameter that is a master."""
        copies = [stage.working.of_masters for stage in self.stages if stage.working is not None]
        return {master: copy for some in copies for master, copy in some.items()}

    def refresh(self, written: Collection[Tensor] = ()) -> None:
        """Let the stages see the present masters. written: those of `working` that hold their master's value already."""
        for stage in self.stages:
            if stage.working is not None:
                stage.working.refresh(written)
        if self.copies is not None:
            self.copies.renew()


def apply_layout(
    run: Run,
    layout: ResolvedLayout,
    mesh: Mesh,
    device: torch.device,
    attention: AttentionChoice,
    copies: PeerCopies | None = None,
    *,
    fill: bool = True,
) -> Applied:
    """The stages of `run`'s model that belong on this rank, over `mesh`, initialised. copies: see `shard_stage`.

    fill: whether parameters get their initial values, for which a dry run has no memory.
    """
    precision = PRECISIONS[run.layout.precision]
    dtype, master_dtype = precision.compute_dtype, precision.main_dtype
    copied = mesh.data is None and precision.copies_parameters
    bound = bind(run, LayoutModel)
    stream = None
    if layout.gather == "stream":
        ring = Ring(mesh.shards) if copies is None else CopyRing(mesh.shards, device)
        stream = Stream(mesh.shards, mesh.replicas, mesh.cp, ring)
    groups = branch_groups(layout)
    branches = None if groups is None else groups.of_rank(mesh.data_rank).branches
    share = SequenceShare(mesh.cp, mesh.tp, layout.context)
    gathered = layout.zero == 3 and mesh.shards.size > 1
    building = Building(device, attention, share, branches, stream, gathered)
    build = _Builder(bound, building, bound.tied())
    compiled = compiles(run, layout, device)
    stages: list[Stage] = []
    parameters: dict[str, nn.Parameter] = {}
    branch: set[str] = set()
    for index, part in model_parts(layout, mesh.pp.rank, run.model.n_layers, bound.block_costs()).items():
        model = build.part(part, dtype if copied else master_dtype)
        stage = bound.stage(building, model, index)
        for block in () if stage.recomputes else model.blocks:
            recompute_block(block, run.layout.recompute)
        if layout.splits_backward:
            separate_gradients(model)
        if compiled:
            _compile(stage)
        if mesh.data is not None:
            shard_stage(
                stage,
                mesh.data,
                precision,
                reshard_after_forward=layout.reshard_after_forward,
                copies=copies,
                gather_blocks=run.layout.gather_blocks,
                gathers_ahead=run.layout.gathers_ahead,
            )
        masters = build.part(part, master_dtype) if copied else model
        masters.to_empty(device=device)
        named = named_parameters(masters, build.tied)
        if fill:
            initialise_parameters(named, bound.initial_rules(), run.training.seed, build.splits)
        if copied:
            stage.working = WorkingCopy(masters, model.to_empty(device=device))
        stages.append(stage)
        parameters.update(named)
        apart = stage.branch_parameters()
        branch.update(name for name, parameter in named.items() if parameter in apart)
    pipeline = Pipeline(stages, layout, mesh.pp, device) if layout.pp > 1 else None
    tied = build.tied.values() if mesh.tie.size > 1 else ()
    applied = Applied(
        layout,
        mesh,
        stages,
        parameters,
        build.splits,
        pipeline,
        compiled,
        frozenset(tied),
        frozenset(branch),
        stream,
        copies,
    )
    applied.refresh()
    return applied


@dataclass
class _Builder:
    """Builds parts of a run's model on meta, split over `tp` and `cp`."""

    bound: LayoutModel
    building: Building
    tied: dict[str, str]
    splits: TensorSplits = field(default_factory=dict)
    """Of all parts built so far."""

    def part(self, part: ModelPart, parameter_dtype: torch.dtype) -> Any:
        model, splits = self.bound.build(self.building, part)
        self.splits.update({whole_name(name, self.tied): split for name, split in splits.items()})
        return model.to(parameter_dtype)


def _compile(stage: Stage) -> None:
    compat.keep_float32_products()
    for block in stage.part.blocks:
        block.compile(options=compat.compile_options(stage.part.dtype))
    if stage.part.part.last:
        stage.compile_loss()


def compiles(run: Run, layout: ResolvedLayout, device: torch.device) -> bool:
    """Whether blocks are compiled: as the run file says, and for `auto` on accelerators wherever the schedule allows it."""
    if not bind(run, LayoutModel).compiles_blocks:
        return False
    if run.training.compile == "auto":
        whole = layout.gather == "layer" and not layout.splits_backward
        return device.type != "cpu" and whole
    return run.training.compile
