"""PyTorch's pipeline stage without its memory for micro-batches that are not in flight.

`PipelineStage` makes a buffer to receive activations, and one for gradients, for every micro-batch of a step, and keeps
them for the whole run: with 1,600 micro-batches most of a device's memory. Here a buffer is made when its receive is posted
and dropped once the micro-batch has gone backward. Messages may go over several groups. Private names are used in this file
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from phalanx.torch_compat.split_backward import input_gradients

Received = dict[int, tuple[Any, ...]]
"""PyTorch's notes of the tensors that a stage receives, their buffers among them, by micro-batch."""


class LeanStage(PipelineStage):
    """A stage whose receive buffers live as long as their micro-batch."""

    collect: Callable[[Sequence[Tensor]], None] | None = None
    """Called with parameters whose gradients a split backward pass has set; sharded ones go another way."""
    link_of: Callable[[int, str], dist.ProcessGroup] | None = None
    """The group over which a stage sends its activations or gradients; None sends everything over the stage's own."""

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(1, *args, **kwargs)
        _repeat_notes(self.args_recv_info, num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        if self.grad_recv_info:
            _repeat_notes(self.grad_recv_info, num_microbatches)
        return result

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Up to PyTorch 2.11 neighbours greet each other first, so that all ranks of a group are there when it is connected.
        # Links are connected already; and where a schedule turns round a neighbour is the rank itself.
        return [] if self.link_of is not None else super()._get_init_p2p_neighbors_ops()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's activations, into fresh buffers."""
        _renew_buffers(self.args_recv_info, fwd_chunk_id)
        return self._over_link(super().get_fwd_recv_ops(fwd_chunk_id), self.stage_index - 1, "activations")

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return sends of a micro-batch's activations."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        for operation in operations:
            # A transport may hold what it sent for long. Up to PyTorch 2.11 that had a graph, which keeps the stage's input.
            operation.tensor = operation.tensor.detach()
        return self._over_link(operations, self.stage_index, "activations")

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return receives of a micro-batch's gradients, into fresh buffers."""
        if self.has_backward and not self.is_last:
            _renew_buffers(self.grad_recv_info, bwd_chunk_id)
        return self._over_link(super().get_bwd_recv_ops(bwd_chunk_id), self.stage_index + 1, "gradients")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return sends of a micro-batch's gradients."""
        return self._over_link(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index, "gradients")

    def _over_link(self, operations: list[dist.P2POp], sender: int, kind: str) -> list[dist.P2POp]:
        if self.link_of is not None and operations:
            link = self.link_of(sender, kind)
            for operation in operations:
                operation.group = link
        return operations

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a micro-batch; drop what it received, and what its loss was computed from."""
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for received in (self.args_recv_info, self.grad_recv_info):
            _drop_buffers(received, bwd_chunk_id)
        loss = kwargs.get("loss")
        if loss is not None and kwargs.get("full_backward", True):
            # The schedule keeps the losses of all micro-batches to the end of a step, and they their graphs.
            loss.detach_()
        return result

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a whole backward pass as PyTorch does it, or one of its two parts, by `torch_compat.split_backward`."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):
            # As in every pass of a pipeline: gradients are reduced when the schedule says so.
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            return input_gradients(outputs, gradients, bwd_kwargs["input_values"], list(self.submod.parameters()))
        bwd_kwargs["param_groups"].run(self._takes_gradients)
        return (), None

    @cached_property
    def _takes_gradients(self) -> Callable[[Sequence[Tensor]], None]:
        """Return what is done with gradients that are set without hooks; asked once parameters have been gathered."""
        return _adding_up(self.submod) if isinstance(self.submod, FSDPModule) else self.collect or _leave_gradients


def run_microbatches(schedule: PipelineScheduleSingle, count: int) -> None:
    """Let `schedule` run `count` micro-batches, which may be fewer than its stages: PyTorch 2.10 makes none for so few."""
    schedule._n_microbatches = count


def gather_stages_once(schedule: PipelineScheduleMulti) -> None:
    """Gather the parameters of each stage of a rank once a step, before it first computes, and free them after it last does.

    PyTorch keeps those of the next three stages of a rank, and gathers the others again in every round of micro-batches.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", {})
    for rank, actions in orders.items():
        orders[rank] = keep_gathered(actions)


def keep_gathered(actions: Sequence[Any]) -> list[Any]:
    """Return a rank's actions with the first gather and the last freeing of each stage alone."""
    kinds = [action.computation_type.name for action in actions]
    stages = [action.stage_index for action in actions]
    last = {stages[place]: place for place, kind in enumerate(kinds) if kind == "RESHARD"}
    first = {stages[place]: place for place, kind in reversed(list(enumerate(kinds))) if kind == "UNSHARD"}
    wanted = {"UNSHARD": first, "RESHARD": last}
    return [
        action
        for place, action in enumerate(actions)
        if kinds[place] not in wanted or wanted[kinds[place]][stages[place]] == place
    ]


def _leave_gradients(_parameters: Sequence[Tensor]) -> None:
    """Leave gradients where they are: they are in the right format."""


def _adding_up(module: nn.Module) -> Callable[[Sequence[Tensor]], None]:
    """Return what adds gradients of parameters of a sharded `module` to their sums in the wider format.

    FSDP2 does so in hooks of a backward pass. Without one they would wait for the next in the format they are computed in,
    and those of further micro-batches would be added to them in that.
    """
    groups = [part._get_fsdp_state()._fsdp_param_group for part in module.modules() if isinstance(part, FSDPModule)]
    sharded = {id(each._unsharded_param): each for group in groups if group is not None for each in group.fsdp_params}

    def add_up(parameters: Sequence[Tensor]) -> None:
        for found in filter(None, (sharded.get(id(parameter)) for parameter in parameters)):
            found.accumulate_unsharded_grad_if_needed()
            found.to_accumulated_grad_if_needed()

    return add_up


def _repeat_notes(received: Received, microbatches: int) -> None:
    """Copy the notes of the first micro-batch for all of them, which share its buffers until they get their own."""
    for info in received[0]:
        info.buffer_template = getattr(info, "buffer", None)
    for microbatch in range(1, microbatches):
        received[microbatch] = tuple(copy.copy(info) for info in received[0])


def _renew_buffers(received: Received, microbatch: int) -> None:
    for info in received[microbatch]:
        if info.buffer_template is not None:
            template = info.buffer_template
            info.buffer = torch.empty_like(template).requires_grad_(template.requires_grad)


def _drop_buffers(received: Received, microbatch: int) -> None:
    for info in received.get(microbatch, ()):
        if info.buffer_template is not None:
            info.buffer = info.buffer_template
