"""What of a checkpoint's weights a new run begins with: a plan of every parameter, checked before anything is loaded.

A parameter is taken, resized, or new; a tensor of the checkpoint is used or dropped. Nothing is lost in silence: what the
run file does not name and does not fit is refused (`training.transfer`). The plan depends on names and shapes of the whole
model alone, so that every rank of every layout comes to the same one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from phalanx.checkpoint import Checkpoint, RankGroup, TensorReader, open_checkpoints, read_state
from phalanx.config.document import parse_document
from phalanx.config.families import find_family
from phalanx.config.fields import nearest_names
from phalanx.config.model import Model
from phalanx.config.schema import LoRA, Run, Transfer
from phalanx.errors import CheckpointError, ConfigError
from phalanx.layout.apply import ParallelModel
from phalanx.layout.initial_values import initialise_parameters
from phalanx.layout.place import place_of
from phalanx.nn.adapters import Adapters, TrainedParameters, adapter_names, is_adapter, merged_weight
from phalanx.nn.parameters import matches_any
from phalanx.nn.resizing import Resize
from phalanx.optimizers import learning_rate_ratio
from phalanx.remote_files import weights_path
from phalanx.report.table import Column, write_text_table
from phalanx.training.inputs import TrainableModel

MODEL = "model."
"""Beginning of the names of model parameters in a checkpoint."""
_MOST_NAMED = 4
"""Names that one message lists before it only counts."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fate:
    """What becomes of one tensor of the model."""

    name: str
    shape: tuple[int, ...]
    source: str | None
    """The tensor of the checkpoint that it is filled from; None for a new one."""
    resize: Resize | None = None
    """How it is made of its source; None takes it as it is."""
    merges: Adapters | None = None
    """Adapters of the checkpoint, of which the source's is added to it first."""

    @property
    def whole(self) -> bool:
        """Whether the whole of its source is needed to make any part of it."""
        return self.resize is not None or self.merges is not None

    @property
    def in_words(self) -> str:
        """Return what becomes of it, for a table."""
        if self.source is None:
            return "new"
        renamed = "" if self.source == self.name else f" from {self.source}"
        renamed += "" if self.merges is None else ", its adapter merged"
        return f"taken{renamed}" if self.resize is None else f"resized{renamed}: {self.resize.in_words}"


@dataclass(frozen=True)
class TransferPlan:
    """What becomes of every tensor of a model and of a checkpoint."""

    checkpoint: Checkpoint
    fates: Sequence[Fate]
    dropped: Sequence[str]
    """Tensors of the checkpoint that nothing is filled from, by their names there."""


def plan_transfer(model: TrainableModel) -> TransferPlan | None:
    """Return what a new run of `model` begins with; None where it begins with initial values alone.

    Every rank calls it. Raises ConfigError naming parameters that are neither taken nor declared, and CheckpointError where
    `training.init_from` holds no checkpoint.
    """
    training = model.run.training
    check_patterns(model)
    if training.init_from is None:
        return None
    path = weights_path(training.init_from)
    # One rank reads the table of contents for all.
    found = RankGroup.own(training.timeout_s).from_first(lambda: _read_contents(path))
    if found is None:
        raise CheckpointError(f"training.init_from={path}: no whole checkpoint there{model.how_to_import(path)}")
    newest, before, adapters, stored = found
    whole = model.whole_shapes
    wanted = {**whole.parameters, **whole.state}
    # Adapters that the model has none for are merged into the weights that they adapt.
    apart = {name for name in stored if is_adapter(name) and name not in wanted}
    merged = {name for name in stored if apart.issuperset(adapter_names(name))}
    stored = {name: shape for name, shape in stored.items() if name not in apart}
    resizes = [] if before is None else model.resizes(path, before)
    known = {name: next((resize for pattern, resize in resizes if fnmatchcase(name, pattern)), None) for name in wanted}
    fates, dropped, problems = match_tensors(wanted, stored, training.transfer, known)
    if problems:
        raise ConfigError("\n".join((f"training.init_from={training.init_from} is of another model", *problems)))
    if adapters is not None:
        fates = [replace(fate, merges=adapters) if fate.source in merged else fate for fate in fates]
    return TransferPlan(newest, fates, dropped)


def match_tensors(
    wanted: Shapes, stored: Shapes, transfer: Transfer, resizes: Mapping[str, Resize | None]
) -> tuple[list[Fate], list[str], list[str]]:
    """Return what becomes of `wanted`, which of `stored` are dropped, and what is wrong, a sentence each.

    resizes: how tensors are made of stored ones that mean or are something else, by name.
    """
    fates: list[Fate] = []
    wrong: dict[str, list[str]] = {}
    for name, shape in wanted.items():
        source = transfer.source_of(name)
        resize = resizes.get(name)
        # Adapters of a model that had none begin at nothing: there is no doubt that they are new.
        if matches_any(name, transfer.new) or (is_adapter(name) and source not in stored):
            fates.append(Fate(name, shape, None))
        elif source not in stored:
            asked = name if source == name else f"{name} (there {source})"
            wrong.setdefault("not in the weights; training.transfer.new or training.transfer.rename", []).append(asked)
        elif resize is None and shape == stored[source]:
            fates.append(Fate(name, shape, source))
        elif resize is None:
            asked = f"{name} (there {list(stored[source])}, here {list(shape)})"
            wrong.setdefault("of another shape, which nothing resizes; training.transfer.new", []).append(asked)
        elif not matches_any(name, transfer.resize):
            asked = f"{name} ({resize.in_words})"
            wrong.setdefault(
                "of another shape or meaning; training.transfer.resize or training.transfer.new", []
            ).append(asked)
        else:
            fates.append(Fate(name, shape, source, resize))
    used = {fate.source for fate in fates} | {name for name in wanted if name in stored}
    unused = [name for name in stored if name not in used]
    lost = [name for name in unused if not matches_any(name, transfer.drop)]
    if lost:
        wrong["only in the weights; training.transfer.drop"] = lost
    problems = [_name_some(names, *what.split("; ")) for what, names in wrong.items()]
    problems += _idle_patterns(wanted, stored, transfer)
    taken = {fate.source for fate in fates}
    return fates, [name for name in stored if name not in taken], problems


def _name_some(names: Sequence[str], what: str, fields: str) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return f"{what}: {', '.join(names[:_MOST_NAMED])}{more}; declare in {fields}"


def _idle_patterns(wanted: Shapes, stored: Shapes, transfer: Transfer) -> Iterator[str]:
    """Yield a sentence for each pattern that names nothing: it is mistyped, and what it was for goes another way."""
    here = {"new": transfer.new, "resize": transfer.resize, "rename": list(transfer.rename)}
    for field, patterns in here.items():
        for pattern in patterns:
            yield from _idle_pattern(pattern, wanted, f"training.transfer.{field}")
    for pattern in transfer.drop:
        yield from _idle_pattern(pattern, stored, "training.transfer.drop")


def _idle_pattern(pattern: str, names: Shapes, field: str) -> Iterator[str]:
    if not any(fnmatchcase(name, pattern) for name in names):
        near = nearest_names(pattern, list(names))
        yield f"{field} names {pattern}, which no parameter is called" + (f"; nearest: {near[0]}" if near else "")


def check_patterns(model: TrainableModel) -> None:
    """Raise ConfigError where fields that choose what is trained name no parameter, or nothing is left to train."""
    run = model.run
    lora = run.training.lora
    asked = {"training.freeze": run.training.freeze, "optimizer.lr_ratios": list(run.optimizer.lr_ratios)}
    if lora is not None:
        asked["training.lora.train"] = lora.train
    # Names come from building the whole model on meta: not for runs that ask nothing of them.
    if lora is None and not any(asked.values()):
        return
    names, trained = model.whole_shapes.parameters, TrainedParameters.of(run.training)
    problems = [
        text
        for field, patterns in asked.items()
        for pattern in patterns
        for text in _idle_pattern(pattern, names, field)
    ]
    if lora is not None:
        adapted = {name: shape for name, shape in names.items() if adapter_names(name)[0] in names}
        problems += [
            f"training.lora.matrices names {pattern}, which no weight of a linear layer is called; layers with an adapter "
            f"have one, e.g. {next(iter(adapted), 'none of this model')}"
            for pattern in lora.matrices
            if not any(fnmatchcase(name, pattern) for name in adapted)
        ]
    if all(map(trained.freezes, names)):
        problems.append("training.freeze names every parameter, which leaves nothing to train")
    if problems:
        raise ConfigError("\n".join(problems))


def load_transfer(plan: TransferPlan, model: TrainableModel, applied: ParallelModel) -> None:
    """Fill the tensors of `applied` as `plan` says; new ones keep the values that they have. Every rank calls it."""
    reader = open_checkpoints(plan.checkpoint.path)
    for fates in _rounds([fate for fate in plan.fates if fate.source is not None and not fate.whole]):
        # As they are stored, each rank its own part.
        saved = applied.saved
        places = {
            f"{MODEL}{fate.source}": place_of(saved[fate.name], applied.splits.get(fate.name))
            for fate in fates
            if fate.name in saved
        }
        reader.load(plan.checkpoint, places, only={f"{MODEL}{fate.source}" for fate in fates})
    whole = [fate for fate in plan.fates if fate.whole and fate.name in applied.saved]
    if whole:
        with TensorReader(plan.checkpoint.path) as tensors:
            for fate in whole:
                _load_whole(tensors, fate, model, applied)


def _rounds(fates: Sequence[Fate]) -> list[list[Fate]]:
    """Return `fates` in as few lists as give each source once a list."""
    seen: Counter[str] = Counter()
    rounds: list[list[Fate]] = []
    for fate in fates:
        assert fate.source is not None
        if seen[fate.source] == len(rounds):
            rounds.append([])
        rounds[seen[fate.source]].append(fate)
        seen[fate.source] += 1
    return rounds


@torch.no_grad()
def _load_whole(reader: TensorReader, fate: Fate, model: TrainableModel, applied: ParallelModel) -> None:
    """Fill one tensor from another one: every rank makes the whole of it, and keeps its own part."""
    assert fate.source is not None
    local, offsets, _ = place_of(applied.saved[fate.name], applied.splits.get(fate.name))
    initial = torch.empty(fate.shape, dtype=local.dtype)
    initialise_parameters({fate.name: initial}, model.initial_rules(), model.run.training.seed)
    made = reader.read(f"{MODEL}{fate.source}")
    if fate.merges is not None:
        down, up = (reader.read(f"{MODEL}{name}") for name in adapter_names(fate.source))
        made = merged_weight(made, down, up, fate.merges.scale)
    if fate.resize is not None:
        made = fate.resize.apply(made, initial)
    assert made.shape == initial.shape, fate.name
    for dim, (start, length) in enumerate(zip(offsets, local.shape, strict=True)):
        made = made.narrow(dim, min(start, made.shape[dim] - length), length)
    local.copy_(made)


def transfer_rows(model: TrainableModel, plan: TransferPlan | None) -> list[tuple[str, str, str, str]]:
    """Return rows of a table: parameters, what becomes of them, how they are trained, how many numbers; alike ones joined.

    Parameters of blocks that differ in their number alone are one row. Empty where nothing departs from a new run whose
    parameters are all trained alike.
    """
    run = model.run
    if plan is None and not (run.training.freeze or run.training.lora or run.optimizer.lr_ratios):
        return []
    trained_parameters = TrainedParameters.of(run.training)
    fates = {} if plan is None else {fate.name: fate.in_words for fate in plan.fates}
    joined: dict[tuple[str, str, str], int] = {}
    blocks: dict[tuple[str, str, str], list[int]] = {}
    for name, shape in model.whole_shapes.parameters.items():
        family, number = _without_number(name)
        trained = "frozen" if trained_parameters.freezes(name) else _rate_in_words(run, name)
        words = fates.get(name, "new").replace(f"blocks.{number}.", "blocks.*.")
        key = (family, words, trained)
        joined[key] = joined.get(key, 0) + math.prod(shape)
        blocks.setdefault(key, []).append(number)
    rows = [
        (_with_numbers(name, numbers), words, trained, f"{count:,}")
        for ((name, words, trained), count), numbers in zip(joined.items(), blocks.values(), strict=True)
    ]
    dropped: dict[str, list[int]] = {}
    for name in () if plan is None else plan.dropped:
        family, number = _without_number(name)
        dropped.setdefault(family, []).append(number)
    return rows + [(_with_numbers(name, numbers), "dropped", "", "") for name, numbers in dropped.items()]


TRANSFER_COLUMNS: tuple[Column[Sequence[str]], ...] = (
    Column("parameter", lambda row: row[0], "left"),
    Column("begins", lambda row: row[1], "left"),
    Column("trained", lambda row: row[2], "left"),
    Column("numbers", lambda row: row[3]),
)
"""How the rows of `transfer_rows` are printed."""


def describe_transfer(model: TrainableModel, plan: TransferPlan | None) -> list[str]:
    """Return the lines of the same table; none for a run of which it has no rows."""
    rows = transfer_rows(model, plan)
    return write_text_table(TRANSFER_COLUMNS, rows) if rows else []


def _rate_in_words(run: Run, name: str) -> str:
    """Return the factor of the learning rate of the parameter `name`, where it has one."""
    ratio = learning_rate_ratio(name, run.optimizer)
    return "" if ratio == 1.0 else f"lr x {ratio:g}"


def _without_number(name: str) -> tuple[str, int]:
    """Return a parameter's name with `*` in place of the number of its block, and that number; -1 outside of blocks."""
    first, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    return (f"blocks.*.{inner}", int(number)) if first == "blocks" and number.isdecimal() else (name, -1)


def _with_numbers(name: str, numbers: Sequence[int]) -> str:
    """Return a name of `_without_number` with block numbers in place of `*`, consecutive ones as 0-3."""
    if numbers[0] < 0:
        return name
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return name.replace("*", words, 1)


def _read_contents(path: Path) -> tuple[Checkpoint, Model | None, Adapters | None, Shapes] | None:
    """Return the newest checkpoint at `path`, the model section and the adapters that it was trained with, and the shapes of
    its tensors.

    None where there is no checkpoint. Imported weights know their model section too; foreign ones may know none.
    """
    newest = open_checkpoints(path, one_rank=True).newest()
    if newest is None:
        return None
    with TensorReader(newest.path) as reader:
        shapes = {
            name.removeprefix(MODEL): tuple(record.shape)
            for name, record in reader.records.items()
            if name.startswith(MODEL)
        }
    state = read_state(newest.path)
    run, model, adapters = state.get("run"), state.get("model"), None
    if isinstance(run, str):
        # These sections alone: what else a run said then need not be a sound run now.
        content = parse_document(run, f"{newest.path}/state.json: run").value
        model, training = (content.get(name) if isinstance(content, dict) else None for name in ("model", "training"))
        lora = training.get("lora") if isinstance(training, dict) else None
        adapters = None if lora is None else Adapters.of(LoRA.model_validate(lora))
    if not isinstance(model, dict):
        return newest, None, adapters, shapes
    section = find_family(str(model.get("family"))).model
    return newest, section.model_validate_json(json.dumps(model)), adapters, shapes
