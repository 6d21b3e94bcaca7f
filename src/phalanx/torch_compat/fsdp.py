"""FSDP2's exchanges without the copies before and behind them, and its sums over micro-batches by other means.

FSDP2 gathers into a buffer and copies parameters out of it, and copies gradients into a buffer that it reduces from: both on
the stream that computes. An exchange that can put each parameter where it belongs, and take each gradient from where it is,
saves these copies. Private names are used in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import SAC_IGNORED_OPS


class ShardSize(NamedTuple):
    """What a rank gives of a parameter that is gathered."""

    elements: int
    """Padding counts."""
    dtype: torch.dtype


class Gather(Protocol):
    """Gathers the parameters of one module."""

    def __call__(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Fill `wholes`, each [ranks * n] in the format it is gathered in, from `shards`, each [n], of all ranks.

        Runs on the current stream, which has waited for whatever wrote the shards and last used the memory of `wholes`.
        The tensors are the same at every call.
        """


class Reduce(Protocol):
    """Reduces the gradients of one module."""

    def __call__(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        """Fill `total` with the sum over all ranks of this rank's part of each gradient, one after another: its share of the
        rows, as many as the first rank has; what is beyond the last row is not looked at.

        Runs on the current stream, which has waited for the gradients. They are kept until the work is done.
        """


class AddUp(Protocol):
    """Adds up gradients that are not reduced after each micro-batch."""

    def __call__(self, gradient: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return `gradient` added to `total`, which may be used up; `gradient` in `dtype` where there is none yet."""


class SumHolder(Protocol):
    """A module whose backward passes add the gradient of `weight` to a sum where there is one."""

    gradient_sum: Tensor | None


def accumulate_by(modules: Iterable[FSDPModule], add_up: AddUp) -> None:
    """Let `modules` sum up gradients over micro-batches by `add_up`, wherever FSDP2 sums them in a wider format."""
    for group in _parameter_groups(modules):
        for parameter in group.fsdp_params:
            parameter.__class__ = _Accumulated
            cast(_Accumulated, parameter).add_up = add_up


def begin_sums(modules: Iterable[FSDPModule], holders: Collection[SumHolder]) -> None:
    """Let sums of gradients over micro-batches begin anew: with zeros for the weights of `holders`, which add to them by
    themselves, where FSDP2 sums in a wider format; with the first gradient for all others.

    To be called after `accumulate_by`, before a step whose gradients are reduced after its last micro-batch alone.
    """
    # By identity: modules and parameters are compared so.
    summing = {id(holder) for holder in holders}
    for group in _parameter_groups(modules):
        for parameter in group.fsdp_params:
            assert isinstance(parameter, _Accumulated)
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            info, dtype = parameter._module_info, parameter.mp_policy.reduce_dtype
            sums = id(info.module) in summing and info.param_name == "weight"
            if sums and dtype not in (None, _compute_dtype(parameter)):
                parameter.holder = cast(SumHolder, info.module)
                parameter.unsharded_accumulated_grad = torch.zeros(
                    parameter._orig_size, dtype=dtype, device=group.device
                )


def gather_as_bytes(modules: Iterable[FSDPModule], owners: Iterable[nn.Module]) -> list[ByteShard]:
    """Let `modules` gather the parameter `weight` of each of `owners` that they have as bytes; see `ByteShard`.

    To be called after `accumulate_by` and before `exchange_in_place`.
    """
    wanted = {id(owner): owner for owner in owners}
    found = []
    for group in _parameter_groups(modules):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            if info.param_name == "weight" and id(info.module) in wanted:
                assert isinstance(parameter, _Accumulated) and not info.shared_modules
                # FSDP2 holds references to the object: its class changes, and its state stays.
                parameter.__class__ = _GatheredAsBytes
                cast(_GatheredAsBytes, parameter).bytes_of = ByteShard(parameter, info.module)
                found.append(cast(_GatheredAsBytes, parameter).bytes_of)
    return found


class ByteShard:
    """A rank's shard of a parameter of which other bytes are gathered, one an element, than those of its numbers.

    The module that has the parameter finds a tensor of its shape and no memory in its place, for autograd's sake: nobody
    may compute with its values, which are NaN.
    """

    def __init__(self, parameter: FSDPParam, owner: nn.Module) -> None:
        self.owner = owner
        """The module that has the parameter."""
        self.shape = parameter._orig_size
        """Of the whole parameter."""
        self.rows = parameter.padded_sharded_param_size[0]
        """Of each rank's shard; those beyond the last row count."""
        self.first_row = parameter.mesh_info.shard_mesh_rank * self.rows
        """Number in the whole parameter of the shard's first row."""
        self.bytes: Tensor | None = None
        """What is gathered, uint8 [rows * elements of a row]; set before the first gather, and written before others."""
        self.receive: Callable[[Tensor], None] | None = None
        """Called with what all ranks gave, uint8 [elements of the parameter], before it is first used. Its memory is filled
        anew by each gather, and empty where the parameter is not there."""
        self._parameter = parameter

    @property
    def parameter(self) -> Tensor:
        """The main parameter, of which this rank holds a shard."""
        return self._parameter.sharded_param

    @property
    def main(self) -> Tensor:
        """This rank's rows of the main parameter, without padding."""
        return cast(DTensor, self._parameter.sharded_param).to_local()


def exchange_in_place(
    modules: Iterable[FSDPModule], gathers: Callable[[list[list[ShardSize]]], Sequence[Gather]], reduce: Reduce
) -> None:
    """Let `modules` gather by what `gathers` gives and reduce by `reduce`.

    gathers: called with the sizes of shards, the same on every rank, for each parameter of each unit that is gathered
    together. Gives what gathers each of these units.
    """
    groups = _parameter_groups(modules)
    sizes = [[_shard_size(parameter) for parameter in group.fsdp_params] for group in groups]
    for group, gather in zip(groups, gathers(sizes), strict=True):
        # What these exchanges are not written for must not pass through them unnoticed.
        assert all(p.fsdp_placement.dim == 0 and not p.offload_to_cpu for p in group.fsdp_params)
        assert not group._use_post_forward_mesh
        # FSDP2 has a hook for neither: the class of the group and its communicator are replaced.
        group.__class__ = _GatheredInPlace
        cast(_GatheredInPlace, group).gather = gather
        group._reduce_scatter_comm = cast(Any, _ReducedFromPlace(reduce))


def _shard_size(parameter: FSDPParam) -> ShardSize:
    as_bytes = isinstance(parameter, _GatheredAsBytes)
    dtype = torch.uint8 if as_bytes else _compute_dtype(parameter)
    return ShardSize(parameter.padded_sharded_param_size.numel(), dtype)


def _compute_dtype(parameter: FSDPParam) -> torch.dtype:
    return parameter.mp_policy.param_dtype or parameter.sharded_param.dtype


def _parameter_groups(modules: Iterable[FSDPModule]) -> list[FSDPParamGroup]:
    """Return the parameter groups of `modules`: those sharded together have one, a root without parameters has none."""
    found = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    return [group for group in dict.fromkeys(found) if group is not None]


class _Accumulated(FSDPParam):
    """A parameter with its gradients of the micro-batches so far, in `reduce_dtype`."""

    add_up: AddUp
    holder: SumHolder | None = None
    """The module that adds to the sum by itself."""
    _sum: Tensor | None = None

    @property
    def unsharded_accumulated_grad(self) -> Tensor | None:
        """The sum so far, if it has begun; FSDP2 takes it away to reduce it."""
        return self._sum

    @unsharded_accumulated_grad.setter
    def unsharded_accumulated_grad(self, total: Tensor | None) -> None:
        self._sum = total
        if self.holder is not None:
            self.holder.gradient_sum = total

    def to_accumulated_grad_if_needed(self) -> None:
        """Begin a sum with the gradient at hand; one in the format of sums stays where autograd adds to it."""
        gradient = self._unsharded_param.grad
        if gradient is None or self.reduce_dtype in (None, gradient.dtype):
            return
        self._unsharded_param.grad = None
        self.unsharded_accumulated_grad = self.add_up(gradient, None, self.reduce_dtype)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add the gradient at hand to a sum that has begun."""
        gradient = self.unsharded_param.grad
        if self.unsharded_accumulated_grad is None or gradient is None:
            return
        total = self.unsharded_accumulated_grad
        self.unsharded_accumulated_grad = self.add_up(gradient, total, total.dtype)
        self._unsharded_param.grad = None


class _GatheredAsBytes(_Accumulated):
    """A parameter whose module computes with gathered bytes; see `ByteShard`."""

    bytes_of: ByteShard

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Note formats. The main parameter is not cast to be gathered, which FSDP2 would do past `all_gather_inputs`."""
        super().init_dtype_attrs(mp_policy)
        self._compute_dtype = self.param_dtype or self.orig_dtype
        self.param_dtype = None

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What this rank gives."""
        assert self.bytes_of.bytes is not None
        return [self.bytes_of.bytes]

    def init_unsharded_param(self) -> None:
        """Hand on the bytes, and make what stands for the parameter."""
        if hasattr(self, "_unsharded_param"):
            return
        (whole,) = self.all_gather_outputs
        assert self.bytes_of.receive is not None
        # `data` is no view to autograd, which would follow what gathers write.
        self.bytes_of.receive(whole[: self._orig_size.numel()].data)
        nothing = torch.full((), torch.nan, dtype=self._compute_dtype, device=whole.device).expand(self._orig_size)
        self._unsharded_param = nn.Parameter(nothing, requires_grad=self.sharded_param.requires_grad)


class _ReducedFromPlace:
    """Stands where FSDP2 has its reduce-scatter, which it hands a tensor that all gradients were copied to."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._inputs_asked = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Give FSDP2 a tensor: it asks for the input, then for the output."""
        self._inputs_asked ^= 1
        return _Gradients() if self._inputs_asked else torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce the gradients that were noted in place of `input_tensor`; see `Reduce`."""
        assert op == dist.ReduceOp.SUM and not async_op
        self._reduce(cast(_Gradients, input_tensor).found, output_tensor)


class _Gradients(Tensor):
    """In place of a tensor that gradients were copied to: FSDP2 holds it until they are reduced."""

    found: list[Tensor]


def _note_gradients(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
    """Note the gradients, where FSDP2 looks for its copy of them, which other tensors still get."""
    if isinstance(reduce_scatter_input, _Gradients):
        reduce_scatter_input.found = list(unsharded_grads)
    else:
        _copy_in(unsharded_grads, reduce_scatter_input, world_size)


_copy_in = _fsdp_collectives.foreach_reduce_scatter_copy_in
_fsdp_collectives.foreach_reduce_scatter_copy_in = _note_gradients


class _GatheredInPlace(FSDPParamGroup):
    """Parameters that are gathered together."""

    gather: Gather

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather."""
        backward = self._training_state == TrainingState.PRE_BACKWARD
        if self._all_gather_result is not None or self.is_unsharded or (backward and not self.unshard_in_backward):
            return
        ranks = self._all_gather_process_group.size()
        for p in self.fsdp_params:
            size = _shard_size(p)
            p.init_all_gather_outputs([size.elements], [size.dtype], ranks, self.device)
            p.alloc_all_gather_outputs()
        wholes = [p.all_gather_outputs[0] for p in self.fsdp_params]
        _, stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        # The allocator hands out memory that the present stream may still be using.
        stream.wait_stream(self.device_handle.current_stream())
        with (
            self.device_handle.stream(stream),
            torch.no_grad(),
            torch.autograd._unsafe_preserve_version_counter(tuple(wholes)),
        ):
            self.gather(
                [
                    p.all_gather_inputs[0] if isinstance(p, _GatheredAsBytes) else p._sharded_param_data
                    for p in self.fsdp_params
                ],
                wholes,
            )
            event = stream.record_event()
        self._all_gather_result = AllGatherResult(wholes[0], event, None, [], [], [])

    def wait_for_unshard(self) -> None:
        """Let the present stream wait for it, and the modules have their parameters."""
        if self._all_gather_result is None:
            return
        self.device_handle.current_stream().wait_event(self._all_gather_result.all_gather_event)
        for p in self.fsdp_params:
            p.init_unsharded_param()
        self._to_unsharded()
        self._all_gather_result = None


def allow_units_in_checkpoints() -> None:
    """Let selective recompute run regions that hold units of FSDP2, whose hooks are not the same in a second forward pass.

    The hooks tell the profiler where they are, as operations that recompute would compare one by one.
    """
    profiler = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
    )
