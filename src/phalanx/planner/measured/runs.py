"""Measured training runs from a table: what ran, in which layout, how fast, and what it held.

A row that cannot be compared with a prediction says why in one sentence. Rates are tokens a second and device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset, preset_names
from phalanx.errors import DataError
from phalanx.layout.spec import Recompute, ResolvedLayout
from phalanx.planner.measured.cells import (
    Precision,
    Row,
    Unusable,
    device_of,
    precision_of,
    read_rows,
    replicas_of,
)

Status = Literal["ok", "oom"]
T = TypeVar("T")


@dataclass(frozen=True)
class Rate:
    """How fast a run was."""

    tokens_per_s: float
    """Tokens a second and device."""
    source: str
    """The column it is from."""


@dataclass(frozen=True)
class Memory:
    """What one device held."""

    gib: float
    kind: str
    """What was measured, in the source's words."""


@dataclass(frozen=True)
class MeasuredRun:
    """One row. What could not be read is None; a used row has all of model, layout, device and a rate, memory or `oom`."""

    row_id: str
    group: str
    """Rows of one group are summarised together."""
    system: str
    """The machine, by the name of its description."""
    framework: str
    used: bool
    reason: str
    """Why the row is not used; empty for one that is."""
    assumed: tuple[str, ...]
    """What the row does not state and was filled in."""
    device: str | None
    """Our name of the device; one that `hardware.device` may not hold."""
    devices: int | None
    """How many in all; GCDs of an MI250X are devices."""
    model: LanguageModel | None
    sequence_length: int | None
    layout: ResolvedLayout | None
    """With micro-batches of one sample where the row does not state them; such a row is not used."""
    recompute: Recompute | None
    precision: Precision | None
    rate: Rate | None
    memory: Memory | None
    status: Status
    """oom: it did not fit."""


class Attempts:
    """Reads the cells of a row one by one, and keeps the reasons why some cannot be read."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.reasons: list[str] = []

    def __call__(self, read: Callable[..., T], *arguments: object) -> T | None:
        """Return what `read` makes of the row, or None with its reason kept; None at once where an argument is missing."""
        if any(argument is None for argument in arguments):
            return None
        try:
            return read(self.row, *arguments)
        except Unusable as error:
            self.reasons.append(str(error))
            return None


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read every row of a table of runs of ours, used or not, in order.

    Raises DataError naming the file, and the line where there is one, for a table that cannot be read, lacks a column, or
    holds a row twice or a run of another framework. A row with a number that cannot be is one that is not used.
    """
    runs = []
    for row in read_rows(path):
        framework = row.text("framework")
        if not framework.lower().startswith("phalanx"):
            raise DataError(
                f"{path}, line {row.line}: framework: '{framework}' is not Phalanx; write Phalanx for a run of yours, or, "
                f"for published runs of other frameworks, run python benchmarks/published/check.py {path}"
            )
        runs.append(_read_row(row))
    return runs


def _read_row(row: Row) -> MeasuredRun:
    """Return the run of a row, with the first reason why it cannot be used, if there is one."""
    attempt = Attempts(row)
    # Every column is read, though one of them cannot be: its reason is noted, and what follows from it is None.
    status = status_of(row.text("status"))
    model, precision = attempt(model_of), attempt(precision_of)
    device, per_unit = attempt(device_of) or (None, 1)
    devices = attempt(device_count, per_unit)
    layout = attempt(layout_of, devices, status, attempt(_zero_of))
    attempt(check_microbatch_stated)
    attempt(check_stages_hold_blocks, model, layout)
    recompute, length, memory = attempt(_recompute_of), attempt(length_of), attempt(_memory_of)
    rate = attempt(timed_rate, devices, length, per_unit)
    # A run that ended for want of memory says something about memory without any figure.
    if status == "ok" and rate is None and memory is None:
        attempt.reasons.append("it states neither tokens, step time nor samples a second, nor memory")
    return MeasuredRun(
        row_id=row.text("row_id"),
        group=row.text("group"),
        system=row.text("system"),
        framework=row.text("framework"),
        used=not attempt.reasons,
        reason=attempt.reasons[0] if attempt.reasons else "",
        assumed=tuple(row.assumed),
        device=device,
        devices=devices,
        model=model,
        sequence_length=length,
        layout=layout,
        recompute=recompute,
        precision=precision,
        rate=rate,
        memory=memory,
        status=status,
    )


def _zero_of(row: Row) -> int:
    stated = row.text("zero_stage") or "0"
    if stated not in ("0", "1", "2", "3"):
        raise Unusable(f"line {row.line}, column zero_stage: {stated} is not 0, 1, 2 or 3")
    return int(stated)


def _recompute_of(row: Row) -> Recompute:
    stated = row.text("recompute").lower()
    for known in ("none", "selective", "full"):
        if stated == known:
            return known
    raise Unusable(f"line {row.line}, column recompute: '{stated}' is not none, selective or full")


def _memory_of(row: Row) -> Memory | None:
    """Return the peak memory of one device, in units of 2^30 bytes, which PyTorch and the vendors' tools call GB too."""
    value = row.number("mem_per_gpu")
    return Memory(value, "") if value is not None and row.text("mem_unit") in ("GB", "GiB") else None


def status_of(words: str) -> Status:
    """Return whether the run fitted, by the words of its status."""
    return "oom" if "oom" in words or "not fit" in words else "ok"


def device_count(row: Row, per_unit: int) -> int:
    """Return the devices of a run. per_unit: devices that the row counts as one."""
    (count,) = row.wholes("n_gpus")
    return count * per_unit


def length_of(row: Row) -> int | None:
    """Return the tokens of a sample, None where they are not stated."""
    return row.whole("seq")


def check_microbatch_stated(row: Row) -> None:
    """Raise Unusable where the samples of a micro-batch are not stated."""
    row.wholes("mbs")


def layout_of(row: Row, devices: int, status: Status, zero: int) -> ResolvedLayout:
    """Return the row's layout. Raises Unusable where degrees or the batch are not stated or do not fit together."""
    tp, pp, global_batch = row.wholes("tp", "pp", "gbs")
    microbatch, cp = row.whole("mbs") or 1, row.whole("cp") or 1
    stages_per_rank = row.whole("vpp") or 1
    if devices % (tp * pp * cp):
        raise Unusable(f"tp={tp} x pp={pp} x cp={cp} does not divide its {devices} devices")
    data_ranks = row.whole("dp") or devices // (tp * pp * cp)
    if tp * pp * cp * data_ranks != devices:
        raise Unusable(f"tp={tp} x pp={pp} x cp={cp} x dp={data_ranks} is not its {devices} devices")
    if global_batch % (data_ranks * microbatch) and status == "oom":
        # Memory does not depend on how many micro-batches were to follow.
        global_batch = data_ranks * microbatch
        row.assumed.append(f"global_batch={global_batch}")
    if global_batch % (data_ranks * microbatch):
        raise Unusable(f"its global batch of {global_batch} is not a multiple of mbs={microbatch} x dp={data_ranks}")
    replicas = replicas_of(row, data_ranks)
    layout = ResolvedLayout(
        global_batch=global_batch,
        microbatch=microbatch,
        # Without ZeRO every data-parallel rank is a replica.
        dp_replicate=data_ranks if zero == 0 else replicas,
        dp_shard=1 if zero == 0 else data_ranks // replicas,
        cp=cp,
        tp=tp,
        pp=pp,
        zero=zero,
        schedule="interleaved_1f1b" if stages_per_rank > 1 else "1f1b",
        stages_per_rank=stages_per_rank if pp > 1 else 1,
        # Pipelines keep what they have gathered.
        reshard_after_forward=zero == 3 and pp == 1,
    )
    stated = row.whole("grad_accum")
    if stated is not None and stated != layout.accumulation:
        raise Unusable(f"it states {stated} micro-batches a step, but its batches make {layout.accumulation}")
    return layout


def check_stages_hold_blocks(_row: Row, model: LanguageModel, layout: ResolvedLayout) -> None:
    """Raise Unusable where there are more pipeline stages than blocks."""
    if layout.n_stages > model.n_layers:
        stages = f"pp={layout.pp} x vpp={layout.stages_per_rank} = {layout.n_stages} pipeline stages"
        raise Unusable(f"its {stages} are more than its {model.n_layers} layers")


def timed_rate(row: Row, devices: int, length: int, per_unit: int) -> Rate | None:
    """Return the rate from tokens, step time or samples a second, whichever the row has first; None where it has none."""
    tokens = row.number("tokens_per_s_per_gpu")
    if tokens is not None:
        return Rate(tokens / per_unit, "tokens_per_s_per_gpu")
    seconds, global_batch = row.number("step_time_s"), row.number("gbs")
    if seconds is not None and global_batch is not None:
        return Rate(global_batch * length / seconds / devices, "step_time_s")
    samples = row.number("samples_per_s")
    return None if samples is None else Rate(samples * length / devices, "samples_per_s")


# --- the model of a run -------------------------------------------------------------------------------------------------


_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mpt", {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": True}),
    ("nemotron", {"positions": "rope", "norm": "layernorm", "mlp": "gelu", "bias": False, "tied_head": False}),
    ("llama|qwen|mistral|swiglu", {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied_head": False}),
    ("bloom|poro", {"positions": "alibi", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True}),
    ("neox|forge", {"positions": "rope", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": False}),
    ("", {"positions": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True}),
)
"""Fields that a family's name implies; the last row is GPT as Megatron-LM has it. MPT: as in LLM Foundry's benchmark."""

SIZES = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads", "kv_heads": "n_kv_heads", "ffn": "d_ff"}
"""Fields of a language model by the columns that state them."""
_USUAL_VOCABULARY = 51_200
"""GPT-2's 50,257 tokens padded as Megatron-LM pads them for up to 8 tensor-parallel ranks."""


def model_of(row: Row, known: Mapping[str, Any] | None = None) -> LanguageModel:
    """Return the row's model.

    known: sizes that the name of the model implies, by field; those of the preset of this name where None. Raises Unusable
    for unstated sizes, and for sizes that make no model.
    """
    name = row.text("model")
    known = preset_sizes(name.lower()) if known is None else known
    (length,) = row.wholes("seq")
    named = f"{name} {row.text('family')}".lower()
    of_family = next(fields for pattern, fields in _FAMILIES if re.search(pattern, named))
    fields: dict[str, Any] = {"max_positions": length} | of_family
    stated = {ours: size for theirs, ours in SIZES.items() if (size := row.whole(theirs)) is not None}
    fields |= dict(known) | stated
    missing = [theirs for theirs, ours in SIZES.items() if ours not in fields and theirs not in ("kv_heads", "ffn")]
    if missing:
        raise Unusable(f"the source does not state {', '.join(missing)}")
    row.assumed += [f"{ours}={known[ours]}" for ours in SIZES.values() if ours in known and ours not in stated]
    if "d_ff" not in fields:
        # An MLP is usually four times as wide as the model; with three matrices, two thirds of that in steps of 256.
        four: int = 4 * fields["d_model"]
        fields["d_ff"] = -(-four * 2 // 3 // 256) * 256 if fields["mlp"] == "swiglu" else four
        row.assumed.append(f"d_ff={fields['d_ff']}")
    if "n_kv_heads" not in fields:
        row.assumed.append(f"n_kv_heads={fields['n_heads']}")
    vocabulary = row.whole("vocab")
    fields["vocab_size"] = vocabulary or known.get("vocab_size") or _USUAL_VOCABULARY
    if vocabulary is None:
        row.assumed.append(f"vocab_size={fields['vocab_size']}")
    try:
        return LanguageModel.model_validate(fields)
    except ValidationError as error:
        raise Unusable(f"no model of ours has its shape: {error.errors()[0]['msg']}") from error


def preset_sizes(name: str) -> dict[str, Any]:
    """Return the sizes of the language model that is a preset of this name, by field; empty where there is none."""
    if name not in preset_names():
        return {}
    preset = load_preset(name)
    if preset.family != "language":
        return {}
    sizes = preset.fields
    return {ours: sizes[ours] for ours in (*SIZES.values(), "vocab_size") if sizes.get(ours) is not None}
