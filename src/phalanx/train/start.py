"""From a run file to a training loop: joins the ranks, builds the parts of the run on this rank, and trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint import CheckpointStore, RunLock
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.errors import Interrupted
from phalanx.families.registry import bind
from phalanx.families.sizes import sizes_of
from phalanx.files import write_atomically
from phalanx.hardware.cpu_formats import require_cpu_format
from phalanx.hardware.device import choose_device, device_name, memory_bytes
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice, check_attention
from phalanx.layout.family import LayoutModel
from phalanx.layout.mesh import (
    Mesh,
    Ranks,
    build_mesh,
    join_process_group,
    leave_process_group,
    ranks_from_environment,
)
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.optimizers import find_optimizer
from phalanx.planner.layouts.microbatch import memory_fits
from phalanx.precision import PRECISIONS
from phalanx.printable import printable
from phalanx.torch_compat.common import is_rocm
from phalanx.train.callbacks import Callback, CallbackList, build_callbacks
from phalanx.train.inputs import Inputs, TrainableModel
from phalanx.train.logs import RunLog, check_trackers, open_sinks
from phalanx.train.metrics import StepMeter, find_peaks
from phalanx.train.profiling import MemoryHistory, ProfilerTrace
from phalanx.train.resume import require_checkpoint, restore_run
from phalanx.train.run_dir import RunDirectory, describe_machine
from phalanx.train.step import build_step
from phalanx.train.stopping import explain_failures
from phalanx.train.trainer import RunParts, Trainer


def train(run: Run, run_dir: Path, *, until: int | None = None) -> None:
    """Train `run` in `run_dir`, from wherever `training.resume` says, to its last step.

    until: a step to end at before the last one, with an evaluation and a checkpoint as at the last. It changes nothing else
    (the learning rate falls towards `training.steps`), so that the run can resume from there to what it would have been.

    Raises ConfigError before anything is allocated when the run cannot be laid out on the ranks that were started, or names
    an optimizer or a callback that is not there, DataError and CheckpointError when what is on disk is not usable,
    PhalanxError when a callback fails, Interrupted when asked to stop.
    """
    ranks = ranks_from_environment()
    layout = resolve_layout(run, ranks.world_size, ranks.ranks_per_node)
    device = choose_device(run.cluster.device, ranks.local_rank)
    require_cpu_format(PRECISIONS[run.layout.precision].compute_dtype, device)
    check_attention(run.training.attention, device)
    check_trackers(run)
    find_optimizer(run.optimizer)
    callbacks = build_callbacks(run.training.callbacks)
    if run.training.deterministic:
        torch.use_deterministic_algorithms(True)
    join_process_group(ranks, device, timeout_s=run.training.timeout_s)
    try:
        layout = _fit_microbatch(run, layout, ranks, device)
        mesh = build_mesh(layout, device)
        run = bind(run, TrainableModel).settle(run_dir)
        # Before the run directory is made: missing data then leaves nothing behind.
        inputs = bind(run, TrainableModel).open_inputs(layout, mesh, device, first=ranks.first)
        try:
            require_checkpoint(run, run_dir)
            directory = RunDirectory(run_dir)
            directory.create()
            with RunLock(run_dir):
                _train_locked(run, layout, mesh, ranks, device, directory, inputs, callbacks, until)
        finally:
            inputs.stream.close()
    except Interrupted:
        # All ranks stop together here; after another failure the group may hang, and the process ends without it.
        leave_process_group()
        raise
    leave_process_group()


def _fit_microbatch(run: Run, layout: ResolvedLayout, ranks: Ranks, device: torch.device) -> ResolvedLayout:
    """Return `layout` with a micro-batch that fits the device, where the run file leaves it to Phalanx."""
    capacity = memory_bytes(device)
    if run.layout.microbatch != "auto" or capacity is None:
        return layout
    # One rank traces the model for all, so that all have the same.
    chosen = [layout]
    if ranks.first:
        fits = memory_fits(run, capacity, rocm=is_rocm())
        chosen = [resolve_layout(run, ranks.world_size, ranks.ranks_per_node, fits)]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _train_locked(
    run: Run,
    layout: ResolvedLayout,
    mesh: Mesh,
    ranks: Ranks,
    device: torch.device,
    directory: RunDirectory,
    inputs: Inputs,
    callbacks: dict[str, Callback],
    until: int | None,
) -> None:
    """Build the parts of the run and train, in a run directory that no other process has."""
    trainer: Trainer | None = None
    stage = "" if mesh.pp.size == 1 else f" (pipeline rank {mesh.pp.rank} of {mesh.pp.size})"

    def moment() -> str:
        return "building the model" if trainer is None else f"step {trainer.step + 1}"

    with explain_failures(ranks, stage, directory.path, moment), ExitStack() as opened:
        opened.callback(directory.close)
        attention = _agree_on_attention(run, layout, device)
        store = opened.enter_context(_open_store(run, directory))
        applied = apply_layout(run, layout, mesh, device, attention)
        step = build_step(run, applied, device)
        first_step = restore_run(run, store, step, inputs, device)
        # Loading filled the main parameters; what the model computes with follows them.
        applied.refresh()
        peaks = find_peaks(run, device, PRECISIONS[run.layout.precision].compute_dtype)
        machine = describe_machine(device, ranks.world_size, peaks, run.training.flops)

        def describe() -> None:
            with directory.written():
                write_atomically(directory.run_file, dump_run(run))
                write_atomically(directory.path / "machine.json", json.dumps(machine, indent=1) + "\n")
                inputs.write(directory.path)

        if ranks.first:
            with directory.written():
                damages = directory.rewind(first_step)
            for text in damages:
                _warn(directory, text)
            describe()
            words = layout.in_words(run.layout.recompute, run.layout.gather_blocks)
            directory.event("resume" if first_step else "start", first_step, attention=attention.name, layout=words)
        inputs.stream.seek(first_step)
        inputs.watch(applied)
        log = RunLog(directory, open_sinks(run, directory.path, first_step) if ranks.first else [], first=ranks.first)
        opened.callback(log.close)
        if first_step < run.training.steps:
            for line in _opening_lines(run, layout, device, attention, inputs, first_step):
                log.note(line)
        meter = StepMeter(
            run,
            global_batch=layout.global_batch,
            world_size=ranks.world_size,
            device=device,
            peaks=peaks,
            note=log.note,
        )
        parts = RunParts(
            run=run,
            ranks=ranks,
            device=device,
            attention=attention,
            applied=applied,
            step=step,
            inputs=inputs,
            store=store,
            directory=directory,
            describe=describe,
            meter=meter,
            log=log,
            callbacks=CallbackList(_recorders(run, device, log) | callbacks, directory.path, ranks.rank),
        )
        trainer = Trainer(parts, first_step, until)
        trainer.train()


def _open_store(run: Run, directory: RunDirectory) -> CheckpointStore:
    return CheckpointStore(
        directory.checkpoints,
        keep_last=run.checkpoint.keep_last,
        keep_every=run.checkpoint.keep_every,
        on_failure="warn",
        timeout_s=run.training.timeout_s,
        warn=lambda text: _warn(directory, text),
    )


def _warn(directory: RunDirectory, text: str) -> None:
    """Tell the terminal and the event log; called on the first rank, perhaps from the thread that saves."""
    sys.stderr.write(f"warning: {printable(text)}\n")
    directory.event("warning", 0, text=text)


def _agree_on_attention(run: Run, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
    """Choose on the first rank and tell the others: all must run the same arithmetic."""
    choose = bind(run, LayoutModel).choose_attention
    if not dist.is_initialized():
        return choose(layout, device)
    choice = [choose(layout, device)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(choice, src=0)
    assert choice[0] is not None
    return choice[0]


def _recorders(run: Run, device: torch.device, log: RunLog) -> dict[str, Callback]:
    """Return the built-in callbacks that the run file asks for: recorders of a window of steps."""
    found: dict[str, Callback] = {}
    if run.training.profile is not None:
        found["training.profile"] = ProfilerTrace(run.training.profile, log.note)
    # Only accelerators have an allocator that keeps a history.
    if run.training.memory_snapshot is not None and device.type != "cpu":
        found["training.memory_snapshot"] = MemoryHistory(run.training.memory_snapshot, log.note)
    return found


def _opening_lines(
    run: Run, layout: ResolvedLayout, device: torch.device, attention: AttentionChoice, inputs: Inputs, first_step: int
) -> Iterator[str]:
    """Yield what is about to be trained, on what and how, for a person who waits for the first step."""
    model, sizes = bind(run), sizes_of(run.model)
    positions, unit = model.positions().count, model.position_unit
    yield f"model   {sizes.in_words(run.model)}; {sizes.parameter_count(run.model):,} parameters"
    words = layout.in_words(run.layout.recompute, run.layout.gather_blocks)
    yield f"layout  {words}; {run.layout.precision}, attention {attention.name}"
    yield f"device  {layout.world_size} x {device_name(device)}"
    batch = f"{layout.global_batch:,} samples"
    if positions > 1:
        batch += f" = {layout.global_batch * positions:,} {unit}"
    steps = f"steps {first_step + 1:,} to {run.training.steps:,}"
    yield f"data    {inputs.in_words}; {steps} of {batch} each"
