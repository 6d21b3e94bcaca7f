"""State of a run in its checkpoints: what is saved beside tensors, and where a run begins.

A run begins at step 0, with other weights, or from a checkpoint that is sound and its own. A state that no run can have
written is refused as damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from phalanx import __version__
from phalanx.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointReader,
    CheckpointStore,
    MemoryCopies,
    RngState,
    TensorReader,
    materialise_optimizer_state,
    open_checkpoints,
    placed_tensors,
    read_state,
    read_tensors,
    rng_state,
    set_rng_state,
)
from phalanx.config.document import flatten_fields, parse_document, show_value
from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import LoRA, Run
from phalanx.errors import CheckpointError, ConfigError
from phalanx.layout.apply import ParallelModel
from phalanx.nn.adapters import Adapters, adapter_names, merged_weight
from phalanx.remote_files import weights_path
from phalanx.training.gradient_noise import NoiseState
from phalanx.training.inputs import Inputs, TrainableModel
from phalanx.training.safeguards.divergence import all_finite
from phalanx.training.safeguards.wrong_numbers import SafeguardState
from phalanx.training.step import TrainStep
from phalanx.training.transfer import MODEL, TransferPlan, check_patterns, load_transfer, plan_transfer
from phalanx.training.weight_average import AVERAGES

CHOOSE_SAMPLES = ("training.seed", "layout.global_batch", "layout.batch_warmup")
"""Fields outside of `data` that decide which samples a step reads."""
CHOOSE_NO_SAMPLES = (
    "data.prefetch",
    "data.verify",
    "data.cache_mb",
    "data.fit_cost_every",
    "data.store",
    "data.store_ranks",
)
"""Fields of `data` that do not: they may change when a run resumes."""

_Number = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class ScalerState(BaseModel):
    """State of `torch.amp.GradScaler`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    scale: _Number
    growth_factor: _Number
    backoff_factor: _Number
    growth_interval: Annotated[int, Field(ge=1)]
    growth_tracker: Annotated[_Count, Field(alias="_growth_tracker")]


class TrainingState(BaseModel):
    """Fields of state.json that every run writes; its family may add more."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    step: _Count
    """Optimizer steps done."""
    data_fingerprint: Annotated[str, Field(min_length=1)]
    """Text that is equal for runs that read the same samples in the same order."""
    scaler: ScalerState | None
    """The loss scale of a run in fp16."""
    rng: RngState
    run: Annotated[str, Field(min_length=1)]
    """The resolved run file."""
    safeguards: SafeguardState = SafeguardState()
    """Absent in checkpoints of runs before there were safeguards."""
    gradient_noise: NoiseState | None = None
    """State of the estimate of the gradient noise scale, where the run makes one."""


def collect_state(
    model: TrainableModel, number: int, step: TrainStep, inputs: Inputs, safeguards: SafeguardState
) -> dict[str, Any]:
    """Return all that a checkpoint after step `number` holds beside tensors, as JSON values; see `TrainingState`."""
    return {
        "step": number,
        "data_fingerprint": inputs.stream.fingerprint,
        "scaler": None if step.scaler is None else step.scaler.state_dict(),
        "rng": rng_state(),
        "run": dump_run(model.run),
        "safeguards": safeguards.model_dump(),
        "gradient_noise": None if step.noise is None else step.noise.state.model_dump(),
        **inputs.saved,
        **inputs.state(),
        "phalanx": __version__,
        "torch": str(torch.__version__),
    }


def require_checkpoint(model: TrainableModel, run_dir: Path) -> None:
    """Refuse a run that is to begin from a checkpoint that is not there or fits not, before its run directory is made."""
    check_patterns(model)
    training = model.run.training
    if training.resume in ("auto", "never") and training.init_from is None:
        return
    # A run that has a checkpoint of its own needs no other, whatever it once began from.
    if open_checkpoints(run_dir).newest() is not None:
        return
    if training.resume_path is not None:
        if open_checkpoints(weights_path(training.resume)).newest() is None:
            raise _nothing_to_resume(model, training.resume_path)
    elif training.resume == "must" and model.run.checkpoint.upload is None:
        raise _nothing_to_resume(model, run_dir / "checkpoints")
    elif training.init_from is not None:
        plan_transfer(model)


@dataclass(frozen=True)
class Restored:
    """Where a run begins."""

    step: int
    """The last step already done."""
    safeguards: SafeguardState
    transfer: TransferPlan | None = None
    """What it began with of the weights in `training.init_from`, where it begins now."""
    from_memory: str = ""
    """Where the state was found, in words, if not on storage."""


def restore_run(
    model: TrainableModel,
    store: CheckpointStore,
    step: TrainStep,
    inputs: Inputs,
    copies: MemoryCopies | None = None,
) -> Restored:
    """Load the checkpoint, or the copies in memory, that the run resumes from, if any; return where it begins.

    Raises CheckpointError where there is none but `training.resume` asks for one, or where none is usable, and ConfigError
    where the checkpoint's run read other samples.
    """
    run, applied = model.run, step.applied
    resume = run.training.resume
    if resume != "never":
        store.fetch_newer()
    elif (holder := store.find_any()) is not None:
        other = "--run-dir" if holder == str(store.root) else "checkpoint.upload"
        raise CheckpointError(
            f"training.resume=never, but {holder} holds checkpoints; choose another {other} or training.resume=auto"
        )
    newest = store.newest()
    present = newest is not None
    # A run that was begun from another folder's checkpoint resumes from its own, as soon as it has one.
    elsewhere = None if present or run.training.resume_path is None else weights_path(resume)
    source = store if elsewhere is None else open_checkpoints(elsewhere)
    # Most optimizers make their state in the first step; a checkpoint needs a place to load it into.
    materialise_optimizer_state(step.optimizer)
    tensors = step.saved_tensors()
    if run.checkpoint.asynchronous and run.checkpoint.every is not None:
        # Pages of fresh memory cost several times the copy: they are touched while the model loads and compiles.
        store.reserve(tensors)

    restored = None
    if copies is not None and source is store and resume != "never":
        restored = load_copies(model, copies, step, inputs, stored=0 if newest is None else newest.step)
    restored = restored or load_newest(model, source, step, inputs)
    if restored is not None:
        return restored
    if elsewhere is not None or resume == "must":
        raise _nothing_to_resume(model, elsewhere or store.root)
    plan = plan_transfer(model)
    if plan is not None:
        load_transfer(plan, model, applied)
    _begin_average(step)
    return Restored(0, SafeguardState(), plan)


def load_newest(model: TrainableModel, source: CheckpointReader, step: TrainStep, inputs: Inputs) -> Restored | None:
    """Load the newest sound checkpoint of `source`; return where the run continues, None where there is no checkpoint.

    Raises CheckpointError where none is usable, and ConfigError where the checkpoint's run read other samples.
    """
    tensors = step.saved_tensors()

    # Called for each checkpoint in turn, newest first, until one is sound: a damaged one is passed over with a warning.
    def check(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        check_state(checkpoint, state)
        inputs.check(state, f"{checkpoint.path}/state.json")
        if not all_finite(tensors.values(), step.device):
            raise CheckpointDamaged(f"{checkpoint.path}: weights or optimizer state are not finite")

    # A run file may begin or end to ask for an average in mid-run.
    loaded = source.load_newest_usable(tensors, optional=AVERAGES, check=check)
    if loaded is None:
        return None
    return _take_up(model, step, inputs, *loaded)


def load_copies(
    model: TrainableModel, copies: MemoryCopies, step: TrainStep, inputs: Inputs, *, stored: int
) -> Restored | None:
    """Load the newest copies in memory after the checkpoint of step `stored`; None where there are none of use.

    Raises ConfigError where their run read other samples.
    """

    def check(copy: Checkpoint, state: dict[str, Any]) -> None:
        check_state(copy, state)
        inputs.check(state, f"{copy.path}/state.json")

    loaded = copies.load_newest(step.saved_tensors(), stored=stored, optional=AVERAGES, check=check)
    if loaded is None:
        return None
    restored = _take_up(model, step, inputs, loaded.checkpoint, loaded.state)
    sent = ", ".join(map(str, loaded.sent))
    peers = f", sent to rank{'s' * (len(loaded.sent) > 1)} {sent} by {'their peers' if loaded.sent[1:] else 'its peer'}"
    return replace(restored, from_memory=f"copies in memory{peers if loaded.sent else ''}")


def _take_up(
    model: TrainableModel, step: TrainStep, inputs: Inputs, checkpoint: Checkpoint, fields: dict[str, Any]
) -> Restored:
    """Take up all that is not a tensor of a checkpoint whose tensors are loaded; return where the run continues."""
    if step.average is not None and not has_average(checkpoint.path):
        _begin_average(step)
    # Only now: a checkpoint of other samples is sound, so an older one must not be tried in its place.
    state = check_state(checkpoint, fields)
    _check_same_run(model.run, state, inputs.stream.fingerprint, str(checkpoint.path))
    inputs.restore(fields)
    if step.scaler is not None and state.scaler is not None:
        step.scaler.load_state_dict(state.scaler.model_dump(by_alias=True))
    if step.noise is not None and state.gradient_noise is not None:
        step.noise.state = state.gradient_noise
    # Last: building the model and loading may have drawn from the global generators.
    set_rng_state(fields["rng"])
    return Restored(state.step, state.safeguards)


def _begin_average(step: TrainStep) -> None:
    if step.average is not None:
        step.average.restart()


def has_average(path: Path) -> bool:
    """Return whether the checkpoint at `path` holds moving averages of its weights."""
    with TensorReader(path) as reader:
        return any(name.startswith(AVERAGES) for name in reader.records)


def load_weights(path: Path, applied: ParallelModel) -> None:
    """Fill the model's parameters with those of the newest checkpoint at `path`, whatever else it holds.

    Raises CheckpointError where there is none, and where it is of another model.
    """
    store = open_checkpoints(path)
    newest = store.newest()
    if newest is None:
        raise CheckpointError(f"{path}: no whole checkpoint there")
    store.load(newest, placed_tensors(applied.saved, applied.splits), prefix=MODEL)


def load_module(checkpoint: Path, module: nn.Module, lora: LoRA | None) -> None:
    """Fill the parameters of a whole module, which may be on any device, whatever layout wrote the checkpoint.

    lora: adapters of the run that wrote it, which are merged into their weights. Raises CheckpointError for a parameter that
    is missing or of another shape.
    """
    stored, adapters = read_tensors(checkpoint, MODEL), Adapters.of(lora)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            tensor = stored.get(MODEL + name)
            if tensor is None or tensor.shape != parameter.shape:
                found = "is missing" if tensor is None else f"is {list(tensor.shape)}"
                raise CheckpointError(f"{checkpoint}: {name} {found}, but should be {list(parameter.shape)}")
            down, up = (stored.get(MODEL + each) for each in adapter_names(name))
            if adapters is not None and down is not None and up is not None:
                tensor = merged_weight(tensor, down, up, adapters.scale)
            parameter.copy_(tensor)


def find_trained_run(path: Path, overrides: Sequence[str] = (), *, trains: bool = True) -> tuple[Checkpoint, Run]:
    """Return the newest whole checkpoint of a run directory, or one checkpoint, and the run that wrote it.

    overrides: fields of the run file to change, as "section.field=value". trains: see `load_run`. Raises CheckpointError
    where there is none.
    """
    newest = open_checkpoints(path).newest()
    if newest is None:
        raise CheckpointError(f"{path} holds no whole checkpoint; name the folder of a run that phalanx train wrote")
    text = str(read_state(newest.path).get("run"))
    return newest, parse_run(text, f"{newest.path}/state.json: run", overrides, trains=trains)


def check_state(checkpoint: Checkpoint, state: dict[str, Any]) -> TrainingState:
    """Return the state of `checkpoint`, checked. Raises CheckpointDamaged naming the first field that is wrong."""
    where = f"{checkpoint.path}/state.json"
    try:
        found = TrainingState.model_validate(state)
    except ValidationError as error:
        raise damaged_field(where, error) from error
    if found.step != checkpoint.step:
        raise CheckpointDamaged(f"{where}: step={found.step} in the checkpoint of step {checkpoint.step}")
    return found


def damaged_field(where: str, error: ValidationError) -> CheckpointDamaged:
    """Return the error that says which field of a state is wrong, and how."""
    problem = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return CheckpointDamaged(f"{where}: {name} is missing")
    return CheckpointDamaged(f"{where}: {name}={str(problem['input'])[:80]!r}: {problem['msg']}")


def _check_same_run(run: Run, state: TrainingState, data_fingerprint: str, where: str) -> None:
    """Refuse to resume with other samples than the run began with: the steps done would no longer mean anything."""
    if state.data_fingerprint != data_fingerprint:
        changed = _describe_differences(run, state.run)
        raise ConfigError(
            f"{where} was trained on other samples: {changed}; put that back, or start a new run with "
            f"training.init_from={where}"
        )
    # Such a run would end at once, and its learning rates would have been those of a longer one.
    if state.step > run.training.steps:
        raise ConfigError(
            f"{where} is at step {state.step}, past training.steps={run.training.steps}; raise training.steps"
        )


def _describe_differences(run: Run, before: str) -> str:
    """Return the fields that choose samples and differ from the run file `before`, with both values, for a message."""
    was, now = (flatten_fields(parse_document(text, "run").value) for text in (before, dump_run(run)))
    changed = [
        f"{name} was {show_value(was.get(name))}, now {show_value(now.get(name))}"
        for name in {**was, **now}
        if was.get(name) != now.get(name) and _chooses_samples(name)
    ]
    paths = [str(value) for name, value in now.items() if _chooses_samples(name) and name.endswith("path")]
    return ", ".join(changed) or f"the run file asks for the same, but the data in {' and '.join(paths)} changed"


def _chooses_samples(name: str) -> bool:
    chosen = name.startswith(CHOOSE_SAMPLES)
    return chosen or (name.startswith("data.") and name not in CHOOSE_NO_SAMPLES)


def _nothing_to_resume(model: TrainableModel, where: Path) -> CheckpointError:
    return CheckpointError(
        f"training.resume={model.run.training.resume}, but {where} holds no whole checkpoint; use training.resume=auto"
        f"{model.how_to_import(where)}"
    )
