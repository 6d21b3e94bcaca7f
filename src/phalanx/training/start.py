"""From a run file to a training loop: joins the ranks, builds the parts of the run on this rank, and trains."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint import CheckpointStore, MemoryCopies, RankGroup, RunLock, UploadAddress
from phalanx.checkpoint.folders import list_published
from phalanx.config.families import sizes_of
from phalanx.config.schema import Run
from phalanx.errors import Interrupted
from phalanx.families.registry import bind
from phalanx.hardware.device import choose_device, device_name, memory_bytes, require_cpu_format
from phalanx.hardware.device_facts import device_kind
from phalanx.hardware.energy import open_energy_meter
from phalanx.launch.collectives import RECORDER_VARIABLES
from phalanx.launch.faults import Limits
from phalanx.launch.heartbeat import Heartbeat, heartbeat_of
from phalanx.launch.watch import make_node_folder, start_watch, started_by_launcher
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice, check_attention
from phalanx.layout.mesh import Ranks, build_mesh, join_process_group, leave_process_group, ranks_from_environment
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.precision import require_products
from phalanx.node_memory import claim_identity, node_memory_folder
from phalanx.object_store import StoreUnavailable
from phalanx.optimizers import find_optimizer
from phalanx.planner.rank.cost_models import memory_fits
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.printable import write_stderr
from phalanx.report.run_log import LESS_MEMORY_EVENT
from phalanx.torch_compat.common import is_rocm
from phalanx.torch_compat.flight import last_collectives
from phalanx.training.callbacks import Callback, CallbackList, build_callbacks, build_recorders
from phalanx.training.checkpointing import Restored, require_checkpoint, restore_run
from phalanx.training.inputs import Inputs, TrainableModel
from phalanx.training.logs import RunLog, check_trackers, open_sinks
from phalanx.training.metrics import Peaks, StepMeter, find_peaks
from phalanx.training.run_dir import RunDirectory, describe_machine
from phalanx.training.safeguards.memory_limit import (
    advise_remedies,
    heed_memory_limit,
    less_memory,
    lighter_layout,
    note_out_of_memory,
)
from phalanx.training.safeguards.memory_probe import MemoryProbe, recall_microbatch
from phalanx.training.step import build_step
from phalanx.training.stopping import explain_failures, report_failure
from phalanx.training.trainer import Placement, RunParts, Trainer
from phalanx.training.transfer import describe_transfer


def train(run: Run, run_dir: Path, *, until: int | None = None) -> None:
    """Train `run` in `run_dir`, from wherever `training.resume` says, to its last step.

    until: a step to end at before the last one, with an evaluation and a checkpoint as at the last. It changes nothing else
    (the learning rate falls towards `training.steps`), so that the run can resume from there to what it would have been.

    Raises ConfigError before anything is allocated when the run cannot be laid out on the ranks that were started, or names
    an optimizer or a callback that is not there, DataError and CheckpointError when what is on disk is not usable,
    PhalanxError when a callback fails, Interrupted when asked to stop.
    """
    model = bind(run, TrainableModel)
    ranks = ranks_from_environment()
    heartbeat = _begin_heartbeat(run, ranks, run_dir)
    with report_failure(heartbeat):
        _train_on_ranks(run, model, ranks, heartbeat, run_dir, until)


def _begin_heartbeat(run: Run, ranks: Ranks, run_dir: Path) -> Heartbeat:
    """Return the heartbeat of this rank; where torchrun or srun started it, the first of a node has its ranks watched."""
    heartbeat = heartbeat_of(ranks.rank)
    on_node = ranks.ranks_per_node
    if heartbeat.folder is not None or ranks.world_size == 1 or on_node is None or not started_by_launcher():
        return heartbeat
    folder = make_node_folder()
    if folder is None:
        return heartbeat
    if ranks.local_rank == 0:
        limits = Limits(run.restart.heartbeat_s, run.restart.slow_s)
        start_watch(folder, run_dir, range(ranks.rank, ranks.rank + on_node), limits)
    return Heartbeat(folder, ranks.rank)


def _train_on_ranks(
    run: Run, model: TrainableModel, ranks: Ranks, heartbeat: Heartbeat, run_dir: Path, until: int | None
) -> None:
    """Join the ranks, open what the run reads and writes, and train."""
    layout = resolve_layout(model, ranks.world_size, ranks.ranks_per_node)
    device = choose_device(run.cluster.device, ranks.local_rank)
    require_cpu_format(model.precision.compute_dtype, device)
    require_products(model.precision, device)
    check_attention(run.training.attention, device)
    check_trackers(run)
    find_optimizer(run.optimizer)
    callbacks = build_callbacks(run.training.callbacks)
    if run.training.deterministic:
        torch.use_deterministic_algorithms(True)
    # Our launcher has set them; other launchers have not.
    for name, value in RECORDER_VARIABLES.items():
        os.environ.setdefault(name, value)
    join_process_group(ranks, device, timeout_s=run.training.timeout_s)
    heartbeat.answer(last_collectives)
    try:
        capacity, recalled, probe = memory_bytes(device), None, None
        # What batches of other families take depends on their samples.
        bounded = run.layout.microbatch == "auto" and isinstance(model, TracedModel)
        if bounded and capacity is not None:
            layout = _fit_microbatch(model, layout, ranks, capacity)
            recalled = recall_microbatch(run_dir, layout, capacity)
        chosen = recalled or layout
        layout = heed_memory_limit(run_dir, chosen)
        if bounded and capacity is not None and recalled is None and layout == chosen:
            probe = MemoryProbe(model, ranks, device, capacity, run_dir)
        place = Placement(ranks, layout, build_mesh(layout, device), device, stated=chosen)
        model = model.settle(run_dir)
        # Before the run directory is made: missing data then leaves nothing behind.
        inputs = model.open_inputs(layout, place.mesh, device, first=ranks.first)
        with closing(inputs.stream):
            require_checkpoint(model, run_dir)
            upload = _open_upload(run, run_dir)
            directory = RunDirectory(run_dir)
            directory.create()
            with RunLock(run_dir):
                _train_in_directory(model, place, directory, inputs, callbacks, heartbeat, until, probe, upload)
                heartbeat.enter("end")
    except Interrupted:
        heartbeat.enter("end")
        # All ranks stop together here; after another failure the group may hang, and the process ends without it.
        leave_process_group()
        raise
    leave_process_group()


def _fit_microbatch(model: TrainableModel, layout: ResolvedLayout, ranks: Ranks, capacity: int) -> ResolvedLayout:
    """Return `layout` with the largest micro-batch that fits devices of `capacity` bytes by the planner's model."""
    # One rank traces the model for all, so that all have the same.
    chosen = [layout]
    if ranks.first:
        fits = memory_fits(model, capacity, rocm=is_rocm())
        chosen = [resolve_layout(model, ranks.world_size, ranks.ranks_per_node, fits)]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _train_in_directory(
    model: TrainableModel,
    place: Placement,
    directory: RunDirectory,
    inputs: Inputs,
    callbacks: dict[str, Callback],
    heartbeat: Heartbeat,
    until: int | None,
    probe: MemoryProbe | None,
    upload: UploadAddress | None,
) -> None:
    """Build the parts of the run, load what it resumes from, and train, in a run directory that no other process has.

    probe: chooses the micro-batch before the first step. upload: where checkpoints are copied to.
    """
    trainer: Trainer | None = None

    def name_moment() -> str:
        return "building the model" if trainer is None else f"step {trainer.step + 1}"

    def save_memory() -> str:
        layout = place.layout if trainer is None else trainer.parts.step.applied.layout
        advise = partial(advise_remedies, model, layout, device_kind(device_name(place.device)))
        lighter = lighter_layout(model, layout, model.run.safeguards.on_out_of_memory, place.ranks.ranks_per_node)
        return note_out_of_memory(directory.path, layout, place.stated, lighter, advise)

    # Closed in the reverse order: the store may still write events while it finishes its last save.
    explained = explain_failures(place.ranks, place.stage_words, directory.path, name_moment, save_memory)
    with explained, ExitStack() as opened:
        opened.callback(directory.close)
        parts, restored = _build_parts(model, place, directory, inputs, callbacks, heartbeat, opened, upload)
        parts = replace(parts, probe=probe)
        parts.step.report_to(heartbeat)
        heartbeat.begin(restored.step)
        trainer = Trainer(parts, restored, until)
        # Here as well: before anything is closed, which may take long where other ranks wait for this one.
        with report_failure(heartbeat):
            trainer.train()


def _build_parts(
    model: TrainableModel,
    place: Placement,
    directory: RunDirectory,
    inputs: Inputs,
    callbacks: dict[str, Callback],
    heartbeat: Heartbeat,
    opened: ExitStack,
    upload: UploadAddress | None,
) -> tuple[RunParts, Restored]:
    """Return the parts of the run on this rank, filled from what it resumes from, and that state.

    opened: closes the store and the log when training ends.
    """
    run, ranks, device = model.run, place.ranks, place.device
    attention = _agree_on_attention(model, place)
    store = opened.enter_context(_open_store(run, directory, upload))
    applied = apply_layout(model, place.layout, place.mesh, device, attention)
    step = build_step(model, applied, device)
    copies = _open_copies(run, directory, opened)
    restored = restore_run(model, store, step, inputs, copies)
    # Loading filled the main parameters; what the model computes with follows them.
    applied.refresh()
    inputs.stream.seek(restored.step + restored.safeguards.skipped_batches)
    inputs.watch(applied)
    # Metrics are those of the first rank.
    peaks = find_peaks(model, device) if ranks.first else Peaks(None, None)
    energy = open_energy_meter(device, ranks.ranks_per_node or ranks.world_size) if ranks.first else None
    machine = describe_machine(device, ranks.world_size, peaks, run.training.flops)
    describe = partial(directory.describe_run, run, machine, inputs.write)
    changes: list[str] = []
    if ranks.first:
        for text in directory.rewind(restored.step):
            _warn_user(directory, text)
        changes = directory.changes_since(run, machine) if restored.step else []
        describe()
        started_s = time.monotonic() - heartbeat.began
        _record_start(run, directory, place, attention, restored, changes, started_s)
    # After the rewind, which cuts what an interrupted run wrote beyond the step that this one resumes from.
    log = _open_log(model, place, attention, inputs, directory, restored, changes)
    opened.callback(log.close)
    recorders = build_recorders(run.training, device, log.note)
    parts = RunParts(
        model=model,
        place=place,
        attention=attention,
        step=step,
        inputs=inputs,
        store=store,
        copies=copies,
        directory=directory,
        describe=describe,
        meter=StepMeter(model, place.layout, device, peaks, log.note, step.noise, energy),
        log=log,
        callbacks=CallbackList(recorders | callbacks, directory.path, ranks.rank),
        heartbeat=heartbeat,
    )
    return parts, restored


def _record_start(
    run: Run,
    directory: RunDirectory,
    place: Placement,
    attention: AttentionChoice,
    restored: Restored,
    changes: list[str],
    started_s: float,
) -> None:
    """Write the event that the run starts or resumes, after that of a layout that takes less memory where it has one.

    changes: what is another than at the last start. started_s: seconds until now since this process took part.
    """
    first_step, layout = restored.step, place.layout
    if layout != place.stated:
        directory.event(LESS_MEMORY_EVENT, first_step, **less_memory(layout, place.stated))
    directory.event(
        "resume" if first_step else "start",
        first_step,
        attention=attention.name,
        layout=layout.in_words(run.layout),
        redone_seconds=round(directory.redone_seconds, 3),
        start_seconds=round(started_s, 3),
        **({"from_memory": restored.from_memory} if restored.from_memory else {}),
        **({"changes": changes} if changes else {}),
    )


def _agree_on_attention(model: TrainableModel, place: Placement) -> AttentionChoice:
    """Choose on the first rank and tell the others: all must run the same arithmetic."""
    # Chosen by measuring, which may end differently on each rank.
    chosen = [model.choose_attention(place.layout, place.device) if place.ranks.first else AttentionChoice("sdpa")]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _open_upload(run: Run, run_dir: Path) -> UploadAddress | None:
    """Return where checkpoints are copied to. Raises PhalanxError, on all ranks, where the first cannot write there."""
    address = run.checkpoint.upload
    if address is None:
        return None
    upload = UploadAddress(address, run.remote.timeout_s)

    def check() -> None:
        try:
            upload.refuse_unwritable()
        except StoreUnavailable:
            # A run that goes on is not kept from it by a store that is down for a while.
            if not list_published(run_dir / "checkpoints"):
                raise

    RankGroup.default().on_first(check)
    return upload


def _open_store(run: Run, directory: RunDirectory, upload: UploadAddress | None) -> CheckpointStore:
    return CheckpointStore(
        directory.checkpoints,
        keep_last=run.checkpoint.keep_last,
        keep_every=run.checkpoint.keep_every,
        # Hours of training are worth more than one checkpoint: a failed one is reported, and the next is tried.
        on_failure="warn",
        timeout_s=run.training.timeout_s,
        warn=partial(_warn_user, directory),
        upload=upload,
        on_upload=lambda step, seconds: directory.event("upload", step, seconds=round(seconds, 3)),
    )


def _open_copies(run: Run, directory: RunDirectory, opened: ExitStack) -> MemoryCopies | None:
    """Return the copies of the run's state in memory, where it makes some; `opened` closes them."""
    if run.checkpoint.memory_every is None:
        return None
    identity = RankGroup.default().from_first(lambda: claim_identity(directory.path))
    copies = MemoryCopies(
        node_memory_folder(identity), timeout_s=run.training.timeout_s, warn=partial(_warn_user, directory)
    )
    opened.callback(copies.close)
    return copies


def _warn_user(directory: RunDirectory, text: str) -> None:
    """Tell the terminal and the event log; called on the first rank, perhaps from the thread that saves."""
    write_stderr(f"warning: {text}")
    directory.event("warning", 0, text=text)


def _open_log(
    model: TrainableModel,
    place: Placement,
    attention: AttentionChoice,
    inputs: Inputs,
    directory: RunDirectory,
    restored: Restored,
    changes: Sequence[str],
) -> RunLog:
    """Open the log of this part of the run, and note in it what is trained and from where."""
    log = RunLog(directory, open_sinks(model, directory.path, restored.step) if place.ranks.first else [])
    if restored.from_memory:
        log.note(f"resumes after step {restored.step} from {restored.from_memory}")
    if restored.step < model.run.training.steps:
        opening = _opening_lines(model, place, attention, inputs, restored.step)
        for line in (*opening, *describe_transfer(model, restored.transfer), *(f"changed {text}" for text in changes)):
            log.note(line)
    return log


def _opening_lines(
    model: TrainableModel, place: Placement, attention: AttentionChoice, inputs: Inputs, first_step: int
) -> Iterator[str]:
    """Yield what is about to be trained, on what and how, for a person who waits for the first step."""
    run, sizes, layout = model.run, sizes_of(model.run.model), place.layout
    positions, unit = model.positions().count, model.position_unit
    yield f"model   {sizes.in_words(run.model)}; {sizes.parameter_count(run.model):,} parameters"
    words = layout.in_words(run.layout)
    yield f"layout  {words}; {run.layout.precision}, attention {attention.name}"
    yield f"device  {layout.world_size} x {device_name(place.device)}"
    yield from model.notes_of_kernels(place.device)
    batch = f"{layout.global_batch:,} samples"
    if positions > 1:
        batch += f" = {layout.global_batch * positions:,} {unit}"
    steps = f"steps {first_step + 1:,} to {run.training.steps:,}"
    yield f"data    {inputs.in_words}; {steps} of {batch} each"
