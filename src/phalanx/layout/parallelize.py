"""Layouts for people who keep their own training loop: a plain module becomes one that trains over many ranks.

The steps are those of `layout.apply`, in the same order: split over `tp`, recompute, compile, shard, allocate, fill. What
`apply` knows from a model family is said here by arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.config.schema import Layout
from phalanx.errors import PhalanxError
from phalanx.hardware.device import choose_device
from phalanx.layout.data_parallel.copy_engine import choose_copy_engine
from phalanx.layout.data_parallel.fully_sharded import FullySharded, ShardingOptions
from phalanx.layout.data_parallel.gradients import gradient_norm_over_ranks, scale_gradients
from phalanx.layout.initial_values import initialise_parameters
from phalanx.layout.mesh import (
    Groups,
    Mesh,
    build_mesh,
    join_process_group,
    leave_process_group,
    ranks_from_environment,
)
from phalanx.layout.place import Place, TensorSplits, place_of
from phalanx.layout.prepare_blocks import compile_blocks, recompute_block
from phalanx.layout.spec import DEGREES, ResolvedLayout
from phalanx.layout.tensor_parallel.split_plain import PlainSplit, split_plain_modules
from phalanx.nn.parameters import InitRules
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import Split


@dataclass(frozen=True)
class ParallelModule:
    """A module that `parallelize` has made ready to train on this rank."""

    module: nn.Module
    """The module itself: call it, and give its parameters to an optimizer."""
    device: torch.device
    mesh: Mesh
    splits: TensorSplits
    """Which part of its parameter a rank's is, over `tp`; data-parallel shards are parts of that part."""
    sharding: FullySharded | None

    @property
    def data_rank(self) -> int:
        """Number of the share, of `data_ranks`, of each global batch that this rank reads; ranks of `tp` read the same."""
        return self.mesh.data_rank

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different samples."""
        return self.mesh.dp_replicate.size * self.mesh.dp_shard.size

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once, such as printing."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def sum_over_data_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of `value`, such as a summed loss, over the ranks that read different samples."""
        total = value.detach().clone()
        for axis in (self.mesh.dp_shard, self.mesh.dp_replicate):
            if axis.group is not None:
                dist.all_reduce(total, group=axis.group)
        return total

    def close(self) -> None:
        """Leave the process group with the other ranks; to be called once training has ended."""
        leave_process_group()

    def prepare_microbatch(self, *, last: bool) -> None:
        """Say before each micro-batch whether it is the last of its optimizer step; not needed where each step has one."""
        if self.sharding is not None:
            self.sharding.prepare_microbatch(self.module, last=last)

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale the gradients such that their norm over all ranks is at most `limit`; returns the norm before (0-dim)."""
        parameters = dict(self.module.named_parameters())
        norm = gradient_norm_over_ranks(self.mesh, parameters, self.splits)
        scale_gradients(parameters.values(), (limit / norm).clamp(max=1.0))
        return norm

    def placed_parameters(self) -> dict[str, Place]:
        """Return this rank's elements of each parameter, with their place in the whole one."""
        return {name: place_of(p, self.splits.get(name)) for name, p in self.module.named_parameters()}


def parallelize(
    module: nn.Module,
    splits: Mapping[str, PlainSplit | Split],
    blocks: Sequence[nn.Module],
    layout: Layout,
    *,
    initial: InitRules | None = None,
    seed: int = 0,
    compile_each_block: bool = False,
    device: torch.device | None = None,
) -> ParallelModule:
    """Make `module` train over all ranks of the run in `layout`. Every rank calls it with the same arguments.

    Gradients are those of one device with the whole batch: they are summed over the data-parallel ranks, not averaged, so
    divide the loss by what the whole global batch has. Dropout needs the same random state on all ranks of `tp`.

    module: on the CPU or a device with its weights, the same on every rank; or on meta, which allocates nothing but this
    rank's shards. splits: how modules (names as in fnmatch) are split over `layout.tp`; others are computed alike on its
    ranks. blocks: what repeats inside, such as its transformer layers, in the order of use: each is gathered (FSDP),
    recomputed and compiled by itself. layout: dp_replicate, dp_shard, tp, zero, recompute, precision, and the fields about
    gathering are heeded. initial: initial values by parameter name, for a module on meta; equal in every layout. seed: of
    these. compile_each_block: whether blocks are compiled. device: where to train; None takes this rank's accelerator, else
    the CPU. The process group is joined unless it has been.

    Raises PhalanxError, with what to change, where the module or the layout cannot be trained so.
    """
    ranks = ranks_from_environment()
    device = choose_device("auto", ranks.local_rank) if device is None else device
    join_process_group(ranks, device)
    precision = PRECISIONS[layout.precision]
    world = dist.group.WORLD
    mesh = build_mesh(
        _resolve_layout(layout, dist.get_world_size() if dist.is_initialized() else 1),
        device,
        None if world is None else _GROUPS.setdefault(world, {}),
    )
    if mesh.data is None and precision.copies_parameters:
        raise PhalanxError(
            f"layout.precision={layout.precision} casts parameters as they are gathered over data-parallel ranks, of which "
            "there is one; take precision=fp32 with torch.autocast in your loop, or more ranks"
        )
    given = _take_values(module, initial)
    # Emptied before it is split: parts are cut from shapes alone, and values are copied once their places are known.
    kept = split_plain_modules(module.to("meta"), splits, mesh.tp)
    for block in blocks:
        recompute_block(block, layout.recompute)
    # Around recompute, so that the compiler sees what is kept.
    if compile_each_block:
        compile_blocks(blocks, precision.compute_dtype)
    # FSDP2 keeps shards in the format of what it is given, and casts as it gathers.
    module.to(precision.main_dtype)
    sharding = None if mesh.data is None else _shard_module(module, blocks, layout, mesh, device)
    module.to_empty(device=device)
    if initial is not None:
        initialise_parameters(dict(module.named_parameters()), initial, seed, kept)
    _fill_given(module, given, kept)
    return ParallelModule(module, device, mesh, kept, sharding)


def _shard_module(
    module: nn.Module, blocks: Sequence[nn.Module], layout: Layout, mesh: Mesh, device: torch.device
) -> FullySharded:
    """Shard `module` over the data-parallel ranks of `mesh`, each of `blocks` by itself; returns what holds the shards."""
    assert mesh.data is not None
    precision = PRECISIONS[layout.precision]
    options = ShardingOptions(
        precision,
        layout.zero,
        reshard_after_forward=layout.zero == 3 and layout.reshard_after_forward is not False,
        blocks_per_unit=layout.gather_blocks,
        prefetch_depth=layout.gathers_ahead,
        cast_inputs=True,
    )
    copy_engine = choose_copy_engine(layout.peer_copies, mesh.shards.group, device)
    sharding = FullySharded(mesh, options, copy_engine)
    sharding.shard_module(module, blocks)
    if copy_engine is not None:
        # Nobody here sees when an optimizer has changed the parameters, so they are published before every pass; first
        # of all hooks, since FSDP2's begin to gather.
        module.register_forward_pre_hook(lambda *_: copy_engine.renew(), prepend=True)
    return sharding


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, Groups] = WeakKeyDictionary()
"""Groups made so far among the ranks of each default process group, for modules that are parallelized later: PyTorch cannot
make the same group twice."""


def _resolve_layout(layout: Layout, world_size: int) -> ResolvedLayout:
    """Return `layout` with its degrees decided for so many ranks. Raises PhalanxError where it cannot be."""
    for name, reason in _REFUSED.items():
        if getattr(layout, name) not in ("auto", Layout.model_fields[name].default):
            raise PhalanxError(f"layout.{name}={getattr(layout, name)} is not for a loop of your own: {reason}")
    degrees = {name: getattr(layout, name) for name in DEGREES}
    degrees = {name: 1 if degree == "auto" and name != "dp_shard" else degree for name, degree in degrees.items()}
    stated = degrees["dp_replicate"] * degrees["tp"]
    if degrees["dp_shard"] == "auto":
        degrees["dp_shard"] = max(1, world_size // stated)
    if stated * degrees["dp_shard"] != world_size:
        product = " * ".join(f"{name}={degrees[name]}" for name in ("dp_replicate", "dp_shard", "tp"))
        raise PhalanxError(
            f"layout: {product} is {stated * degrees['dp_shard']} ranks, but there are {world_size}; change a degree, "
            "or start as many ranks"
        )
    return ResolvedLayout(global_batch=degrees["dp_replicate"] * degrees["dp_shard"], zero=layout.zero, **degrees)


_REFUSED = {
    "pp": "a pipeline must know which layers make a stage and what travels between them; register a Family",
    "cp": "attention must know which positions a rank holds; register a Family",
    "gather": "streamed weights need the projection pairs that a Family declares",
    "offload_optimizer": "the optimizer is yours, and so is where its state lies",
    "offload_activations": "where a pass through the blocks begins and ends only a Family says",
    "branch_groups": "heads of several data sets are a Family's",
}
"""Fields of the run file that need to know more of a model than a plain module says."""


def _take_values(module: nn.Module, initial: InitRules | None) -> dict[str, Tensor]:
    """Return the values that a module has before it is emptied: parameters, unless `initial` gives them, and buffers."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and names.setdefault(id(tensor), name) != name:
            # Moving a module, or sharding one end of it, would make two parameters of one.
            raise PhalanxError(
                f"{names[id(tensor)]} and {name} are one parameter, which cannot be split or sharded in two places; let one "
                "of the modules be given the other's weight when it is called"
            )
    if initial is not None:
        tensors = dict(module.named_buffers())
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise PhalanxError(
            f"{', '.join(empty[:3])} of the module {'have' if len(empty) > 1 else 'has'} no values: build the module on a "
            "device, or give initial values of its parameters (buffers are computed by their module alone)"
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}


@torch.no_grad()
def _fill_given(module: nn.Module, given: Mapping[str, Tensor], splits: TensorSplits) -> None:
    """Copy this rank's elements of the values `given` by name into `module`."""
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        if name in given:
            place = place_of(tensor, splits.get(name))
            whole = given[name]
            for dim, (start, length) in enumerate(zip(place.offsets, place.local.shape, strict=True)):
                whole = whole.narrow(dim, start, length)
            place.local.copy_(whole)
