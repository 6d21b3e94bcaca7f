"""From a run file to a training loop: builds the parts on this rank and decides where the run begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from phalanx.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointStore,
    RunLock,
    materialise_optimizer_state,
    open_checkpoints,
    placed_tensors,
    set_rng_state,
)
from phalanx.config.document import Value, parse_document, show_value
from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.errors import CheckpointError, ConfigError, Interrupted
from phalanx.families.registry import bind
from phalanx.families.sizes import sizes_of
from phalanx.files import write_atomically
from phalanx.hardware.cpu_formats import require_cpu_format
from phalanx.hardware.device import choose_device, device_name, memory_bytes
from phalanx.layout.apply import ParallelModel, apply_layout
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
from phalanx.planner.layouts.microbatch import memory_fits
from phalanx.precision import PRECISIONS
from phalanx.printable import printable
from phalanx.torch_compat.common import is_rocm
from phalanx.train.failures import explain_failures
from phalanx.train.inputs import Inputs, TrainableModel
from phalanx.train.logs import check_trackers, open_sinks
from phalanx.train.metrics import StepMeter, find_peaks
from phalanx.train.nonfinite import all_finite
from phalanx.train.run_dir import RunDirectory, describe_machine
from phalanx.train.state import TrainingState, check_state
from phalanx.train.step import build_step
from phalanx.train.trainer import Parts, Trainer


def train(run: Run, run_dir: Path, *, until: int | None = None) -> None:
    """Train `run` in `run_dir`, from wherever `training.resume` says, to its last step.

    until: a step to end at before the last one, with an evaluation and a checkpoint as at the last. The run is no other one
    for it (the learning rate falls towards `training.steps`), so it can go on from there to what it would have been.

    Raises ConfigError before anything is allocated when the run cannot be laid out on the ranks that were started,
    DataError and CheckpointError when what is on disk is not usable, Interrupted when asked to stop.
    """
    ranks = ranks_from_environment()
    layout = resolve_layout(run, ranks.world_size, ranks.ranks_per_node)
    device = choose_device(run.cluster.device, ranks.local_rank)
    require_cpu_format(PRECISIONS[run.layout.precision].compute_dtype, device)
    check_attention(run.training.attention, device)
    check_trackers(run)
    if run.training.deterministic:
        torch.use_deterministic_algorithms(True)
    join_process_group(ranks, device, timeout_s=run.training.timeout_s)
    try:
        _train_in_group(run, _fit_microbatch(run, layout, ranks, device), ranks, device, run_dir, until)
    except Interrupted:
        leave_process_group()
        raise
    leave_process_group()


def _fit_microbatch(run: Run, layout: ResolvedLayout, ranks: Ranks, device: torch.device) -> ResolvedLayout:
    """Return `layout` with a micro-batch that fits the device, where the run file leaves it to us."""
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


def _train_in_group(
    run: Run, layout: ResolvedLayout, ranks: Ranks, device: torch.device, run_dir: Path, until: int | None
) -> None:
    mesh = build_mesh(layout, device)
    run = bind(run, TrainableModel).settle(run_dir)
    # Before the run directory is made: missing data then leaves nothing behind.
    inputs = bind(run, TrainableModel).open_inputs(layout, mesh, device, first=ranks.first)
    try:
        _require_checkpoint(run, run_dir)
        directory = RunDirectory(run_dir)
        directory.create()
        with RunLock(run_dir):
            _train(run, layout, mesh, ranks, device, directory, inputs, until)
    finally:
        inputs.stream.close()


def _require_checkpoint(run: Run, run_dir: Path) -> None:
    """Refuse a run that is to begin from a checkpoint that is not there, before its run directory is made."""
    training = run.training
    if training.resume in ("auto", "never") and training.init_from is None:
        return
    if open_checkpoints(run_dir).newest() is not None:
        return
    if training.resume not in ("auto", "must", "never"):
        if open_checkpoints(Path(training.resume)).newest() is None:
            raise _nothing_to_resume(run, training.resume, Path(training.resume))
    elif training.resume == "must":
        raise _nothing_to_resume(run, training.resume, RunDirectory(run_dir).checkpoints)
    elif training.init_from is not None and open_checkpoints(Path(training.init_from)).newest() is None:
        raise _no_weights(Path(training.init_from), bind(run, TrainableModel).how_to_import)


def _train(
    run: Run,
    layout: ResolvedLayout,
    mesh: Mesh,
    ranks: Ranks,
    device: torch.device,
    directory: RunDirectory,
    inputs: Inputs,
    until: int | None,
) -> None:
    trainer: Trainer | None = None
    stage = "" if mesh.pp.size == 1 else f" (pipeline rank {mesh.pp.rank} of {mesh.pp.size})"

    def moment() -> str:
        return "building the model" if trainer is None else f"step {trainer.step + 1}"

    with explain_failures(ranks, stage, directory.path, moment):
        attention = _agree_on_attention(run, layout, device)
        store = CheckpointStore(
            directory.checkpoints,
            keep_last=run.checkpoint.keep_last,
            keep_every=run.checkpoint.keep_every,
            on_failure="warn",
            timeout_s=run.training.timeout_s,
            warn=lambda text: _warn(directory, text),
        )
        applied = apply_layout(run, layout, mesh, device, attention)
        step = build_step(run, applied, device)
        first_step = _begin(run, store, applied, step.optimizer, step.scaler, inputs, device)
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
        parts = Parts(
            run=run,
            layout=layout,
            ranks=ranks,
            device=device,
            attention=attention,
            applied=applied,
            step=step,
            inputs=inputs,
            store=store,
            directory=directory,
            describe=describe,
            meter=StepMeter(
                run, global_batch=layout.global_batch, world_size=ranks.world_size, device=device, peaks=peaks
            ),
            sinks=open_sinks(run, directory.path, first_step) if ranks.first else [],
        )
        if first_step < run.training.steps:
            for line in _opening_lines(run, layout, device, attention, inputs, first_step):
                for sink in parts.sinks:
                    sink.note(line)
        try:
            trainer = Trainer(parts, first_step, until)
            trainer.train()
        finally:
            for sink in parts.sinks:
                sink.close()
            store.close()
            directory.close()


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


def _begin(
    run: Run,
    store: CheckpointStore,
    applied: ParallelModel,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    inputs: Inputs,
    device: torch.device,
) -> int:
    """Load the checkpoint the run goes on from, if any; returns the last step already done."""
    resume = run.training.resume
    present = store.newest() is not None
    if resume == "never" and present:
        raise CheckpointError(
            f"training.resume=never, but {store.root} holds checkpoints; choose another --run-dir or training.resume=auto"
        )
    elsewhere = resume not in ("auto", "must", "never") and not present
    source = open_checkpoints(Path(resume)) if elsewhere else store
    materialise_optimizer_state(optimizer)
    tensors = placed_tensors(applied.parameters, applied.splits, optimizer)
    if run.checkpoint.asynchronous and run.checkpoint.every is not None:
        store.reserve(tensors)

    def check(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        check_state(checkpoint, state)
        inputs.check(state, f"{checkpoint.path}/state.json")
        if not all_finite(tensors.values(), device):
            raise CheckpointDamaged(f"{checkpoint.path}: weights or optimizer state are not finite")

    loaded = source.load_newest_usable(tensors, check=check)
    if loaded is None:
        if elsewhere or resume == "must":
            raise _nothing_to_resume(run, resume, Path(resume) if elsewhere else store.root)
        if run.training.init_from is not None:
            load_weights(Path(run.training.init_from), applied, bind(run, TrainableModel).how_to_import)
        return 0
    checkpoint, fields = loaded
    state = check_state(checkpoint, fields)
    _check_same_run(run, state, inputs.stream.fingerprint, str(checkpoint.path))
    inputs.restore(fields)
    if scaler is not None and state.scaler is not None:
        scaler.load_state_dict(state.scaler.model_dump(by_alias=True))
    set_rng_state(fields["rng"])
    return state.step


def _nothing_to_resume(run: Run, resume: str, where: Path) -> CheckpointError:
    hint = bind(run, TrainableModel).how_to_import(where)
    return CheckpointError(
        f"training.resume={resume}, but {where} holds no whole checkpoint; use training.resume=auto{hint}"
    )


def _check_same_run(run: Run, state: TrainingState, data_fingerprint: str, where: str) -> None:
    """Refuse to go on with other samples than the run began with: the steps done would no longer mean anything."""
    if state.data_fingerprint != data_fingerprint:
        raise ConfigError(
            f"{where} was trained on other samples: {_differences(run, state.run)}; put that back, or start a new run with "
            f"training.init_from={where}"
        )
    if state.step > run.training.steps:
        raise ConfigError(
            f"{where} is at step {state.step}, past training.steps={run.training.steps}; raise training.steps"
        )


def _differences(run: Run, before: str) -> str:
    """The fields that choose samples and differ from those of a run file written `before`, with both values."""
    was, now = (_flat(parse_document(text, "run").value) for text in (before, dump_run(run)))
    changed = [
        f"{name} was {show_value(was.get(name))}, now {show_value(now.get(name))}"
        for name in {**was, **now}
        if was.get(name) != now.get(name) and _chooses_samples(name)
    ]
    paths = [str(value) for name, value in now.items() if _chooses_samples(name) and name.endswith("path")]
    return ", ".join(changed) or f"the run file asks for the same, but the data in {' and '.join(paths)} changed"


def _chooses_samples(name: str) -> bool:
    return name in _CHOOSE_SAMPLES or (name.startswith("data.") and name not in _CHOOSE_NONE)


_CHOOSE_SAMPLES = ("training.seed", "layout.global_batch")
"""Fields outside of `data` that decide which samples a step reads."""
_CHOOSE_NONE = ("data.prefetch", "data.verify", "data.cache_mb", "data.fit_cost_every")
"""Fields of `data` that do not."""


def _flat(value: Value, name: str = "") -> dict[str, Value]:
    """Every scalar of a document by its dotted name."""
    if isinstance(value, dict):
        parts = [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        parts = [(f"{name}.{number}", item) for number, item in enumerate(value)]
    else:
        return {name: value}
    return {path: scalar for part, item in parts for path, scalar in _flat(item, part).items()}


def load_weights(path: Path, applied: ParallelModel, how_to_import: Callable[[Path], str] = lambda _: "") -> None:
    """Fill the model's parameters with those of the newest checkpoint at `path`, whatever else it holds.

    how_to_import: see `TrainableModel`. Raises CheckpointError where there is none.
    """
    store = open_checkpoints(path)
    newest = store.newest()
    if newest is None:
        raise _no_weights(path, how_to_import)
    store.load(newest, placed_tensors(applied.parameters, applied.splits), prefix="model.")


def _no_weights(path: Path, how_to_import: Callable[[Path], str]) -> CheckpointError:
    return CheckpointError(f"training.init_from={path}: no whole checkpoint there{how_to_import(path)}")
