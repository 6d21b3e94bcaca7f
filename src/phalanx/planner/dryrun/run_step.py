"""Runs the training step of one rank of any layout without its devices: peak memory over time, and every collective.

The code that trains runs as it is: the model is laid out, micro-batches go forward and backward through the pipeline's
schedule, gradients are reduced, their norm is taken and the optimizer updates. Only tensors have no memory and the process
group has no other ranks. The optimizer's step belongs to training, of which cost models know nothing: it is handed in.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

from phalanx.data.batch_stream import Batch
from phalanx.host_memory import HostMemory
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.expert_parallel.token_exchange import BalancedExchange, TokenExchange
from phalanx.layout.layout_model import LayoutModel, Stage
from phalanx.layout.mesh import Axis, Mesh, build_mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import from_other_ranks
from phalanx.nn.attention import causal_block_mask
from phalanx.planner.dryrun.memory_trace import Moment, StepTrace
from phalanx.planner.dryrun.rank_report import Measured, RankReport, rank_report
from phalanx.planner.trace.accelerator_kernels import fused_norms
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.torch_compat import common as compat
from phalanx.torch_compat import fake as compat_fake


class Step(Protocol):
    """A training step, as `training.step` has it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the step, with all state it will ever have."""

    def enqueue(self, step: int, batch: Batch) -> Tensor:
        """Run one optimizer step on this rank's samples without waiting for the device."""

    def relaid(self, executor: Executor) -> Step:
        """Return the same optimizer's steps, run by `executor`."""


StepBuilder = Callable[[LayoutModel, ParallelModel, torch.device], Step]
Tell = Callable[[Moment], None]
"""Is told each moment of a step as it begins."""


def _say_nothing(_moment: Moment) -> None:
    """Tell nobody."""


def dry_run(
    model: TracedModel,
    layout: ResolvedLayout,
    rank: int,
    build: StepBuilder,
    *,
    accelerator: bool,
    devices_per_node: int | None,
    tell: Tell = _say_nothing,
) -> RankReport:
    """Return what one optimizer step of `model` in `layout` takes on `rank`.

    A step of many micro-batches is run with fewer, of two numbers: past the number that fills the pipeline each further one
    adds the same. A step of few runs once, as it is. build: makes the training step. accelerator: whether kernels are an
    accelerator's or the CPU's. tell: for who waits, since a large model whose weights are streamed takes minutes: each chunk
    of a matrix is some operations.
    """
    start = time.perf_counter()
    load = model.expert_load(layout)
    run, target = model.run, torch.device("meta" if accelerator else "cpu")
    # Uncompiled: every operation then passes by the trace that counts them.
    decided: dict[str, Any] = {"compile": False, **model.dry_run_fields(target, layout.tp)}
    # The other ranks of a dry run have no memory to copy from.
    plain = run.layout.model_copy(update={"peer_copies": False})
    attention = model.dry_run_attention() if accelerator else AttentionChoice("sdpa")
    training = run.training.model_copy(update=decided)
    model = model.rebind(run.model_copy(update={"training": training, "layout": plain}))
    wanted = layout.accumulation
    few, more = representative_microbatches(layout)
    with (
        fake_rank(layout, rank, accelerator=accelerator) as (mesh, trace),
        expected_exchanges(layout, load),
        attention.active(DEVICE),
    ):
        short = _with_microbatches(layout, few)
        applied = apply_layout(model, short, mesh, DEVICE, attention, fill=False)
        step = build(model, applied, DEVICE).relaid(WatchedExecutor(applied, trace))
        # A step of few micro-batches runs as it is: there is nothing to carry on.
        first = second = measured_step(model, applied, step, trace, tell)
        if more > few:
            # The receive buffers of one number of micro-batches must be gone before those of another are made.
            applied = applied.with_global_batch(_with_microbatches(layout, more).global_batch)
            step = step.relaid(WatchedExecutor(applied, trace))
            second = measured_step(model, applied, step, trace, tell)
        return rank_report(
            layout,
            mesh,
            rank,
            [stage.index for stage in applied.stages],
            (first, second),
            wanted,
            devices_per_node,
            time.perf_counter() - start,
        )


def representative_microbatches(layout: ResolvedLayout) -> tuple[int, int]:
    """Return two numbers of micro-batches between which a step grows as it does beyond; all of `layout` twice if few.

    Without a pipeline the first, the last and one in between may all differ. A pipeline holds its most activations after
    2 pp micro-batches in every schedule, with 1F1B after pp. Interleaved schedules take micro-batches in rounds, of pp
    where pp divides their number, and transports may hold another round of messages.
    """
    wanted, pp = layout.accumulation, layout.pp
    if pp == 1:
        few, more = 3, 4
    elif layout.schedule.startswith("interleaved"):
        few, more = (3 * pp, 4 * pp) if wanted % pp == 0 else (wanted, wanted)
    elif layout.schedule == "zbv":
        few, more = 3 * pp, 3 * pp + 1
    else:
        few, more = pp + 1, pp + 2
    return (few, more) if more < wanted else (wanted, wanted)


def _with_microbatches(layout: ResolvedLayout, count: int) -> ResolvedLayout:
    return replace(layout, global_batch=count * layout.microbatch * layout.data_ranks)


def _label_state(trace: StepTrace, applied: ParallelModel, step: Step) -> None:
    for stage in applied.stages:
        trace.label([*stage.parameters(), *stage.buffers()], "parameters")
    trace.label(list(applied.parameters.values()), "parameters")
    for state in step.optimizer.state.values():
        trace.label(list(state.values()), "optimizer")


def measured_step(
    model: TracedModel, applied: ParallelModel, step: Step, trace: StepTrace, tell: Tell = _say_nothing
) -> Measured:
    """Run one optimizer step on samples without content, under a trace that has seen all that was made before."""
    _label_state(trace, applied, step)
    handles = [handle for stage in applied.stages for handle in _watch_modules(stage, trace, tell)]
    # Cycles of an earlier step would be freed somewhere in this one, and lower its peak by chance.
    gc.collect()
    trace.go_to(Moment("start"))
    trace.begin()
    samples = applied.layout.samples_per_rank
    step.enqueue(1, model.example_batch(samples, DEVICE))
    trace.go_to(Moment("end"))
    # FSDP2 gives some parameters memory of another size when they are first used.
    _label_state(trace, applied, step)
    for handle in handles:
        handle.remove()
    return Measured(
        microbatches=applied.layout.accumulation,
        peak=trace.peak,
        moment=trace.peak_moment,
        categories=dict(trace.at_peak()),
        host=trace.host,
        points=list(trace.points),
        calls=dict(trace.calls),
    )


class WatchedExecutor(Executor):
    """Tells the trace when gradients are complete."""

    def __init__(self, applied: ParallelModel, trace: StepTrace) -> None:
        super().__init__(applied)
        self.trace = trace

    def forward_backward(self, step: int, batch: Batch, scale: Tensor | float) -> Tensor:
        """See `Executor`."""
        total = super().forward_backward(step, batch, scale)
        self.trace.label([parameter.grad for parameter in self.applied.parameters.values()], "gradients")
        self.trace.go_to(Moment("update"))
        return total


def _watch_modules(stage: Stage, trace: StepTrace, tell: Tell) -> list[Any]:
    """Let the trace know which module runs, forward and backward."""
    part = stage.part
    named: dict[str, nn.Module] = {"stage": stage}
    named |= {f"block {number}": part.blocks[number] for number in part.blocks.numbers}
    if part.part.first:
        named["embedding"] = part.embedding
    if part.part.last:
        named["head"] = part.head
    count = [0]
    handles: list[Any] = []
    for name, module in named.items():
        watch = _Watch(name, stage.index, count, trace, tell)
        handles.append(module.register_forward_pre_hook(partial(watch.enter)))
        handles.append(module.register_forward_hook(partial(watch.leave)))
    return handles


class _Watch:
    """Hooks of one module."""

    def __init__(self, name: str, stage: int, count: list[int], trace: StepTrace, tell: Tell) -> None:
        self.name = name
        self.stage = stage
        self.count = count
        self.trace = trace
        self.tell = tell

    def enter(self, _module: nn.Module, _inputs: Any) -> None:
        if self.name == "stage":
            self.count[0] += 1
        self.trace.enter_unit()
        moment = Moment("forward", self.name, self.stage, self.count[0])
        self.trace.go_to(moment)
        self.tell(moment)

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.trace.leave_unit()
        if isinstance(output, Tensor) and output.requires_grad:
            moment = Moment("backward", self.name, self.stage, self.count[0])
            # The gradient of a module's output arrives just before its backward pass begins.
            output.register_hook(partial(self._backward, moment))

    def _backward(self, moment: Moment, _grad: Tensor) -> None:
        self.trace.go_to(moment)
        self.tell(moment)


DEVICE = torch.device("cpu")
"""Where fake tensors say they are. PyTorch built without CUDA cannot differentiate tensors that say they are elsewhere."""


@contextlib.contextmanager
def fake_rank(layout: ResolvedLayout, rank: int, *, accelerator: bool) -> Iterator[tuple[Mesh, StepTrace]]:
    """Be `rank` of `layout.world_size` ranks: its mesh, and the account of all that is made in here, which is fake.

    accelerator: whether tensors are kept as by an accelerator's kernels rather than the CPU's. Nothing is left behind.
    """
    with contextlib.ExitStack() as stack:
        if layout.world_size > 1:
            stack.enter_context(compat_fake.fake_process_group(rank, layout.world_size))
        mesh = build_mesh(layout, DEVICE)
        # A mask that is kept for the next caller must not be fake then, nor real now.
        causal_block_mask.cache_clear()
        stack.callback(causal_block_mask.cache_clear)
        # NCCL and RCCL hold messages between stages for a round of micro-batches each way of a stage.
        ways = sum(sum(from_other_ranks(layout, mesh.pp.rank, way)) for way in (-1, 1))
        stack.enter_context(compat_fake.fake_tensors_everywhere(layout.pp * ways if accelerator else None))
        if accelerator:
            stack.enter_context(compat.cpu_stands_in())
            stack.enter_context(fused_norms())
        trace = stack.enter_context(StepTrace().watching())
        give = HostMemory.allocate_like

        def allocate_like(memory: HostMemory, tensor: Tensor) -> Tensor:
            return trace.give_host_memory(give, memory, tensor)

        stack.enter_context(patch.object(HostMemory, "allocate_like", allocate_like))
        yield mesh, trace


@contextlib.contextmanager
def expected_exchanges(layout: ResolvedLayout, load: Fraction) -> Iterator[None]:
    """Let as many rows arrive at experts as plans expect: fake counts of a router have no values to read.

    load: rows that arrive over those that leave.
    """
    expected = BalancedExchange(Axis("ep", size=layout.ep * layout.expert_tp), load, layout.expert_tp)
    # The exchange is made by the code that trains, which asks this method for all that it cannot know here.
    with patch.object(TokenExchange, "read_sizes", staticmethod(expected.read_sizes)):
        yield
