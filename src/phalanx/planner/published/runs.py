"""Published training runs from a table: what ran, in which layout, and how fast, in our own words and units.

A row that cannot be compared with a plan says why in one sentence. Rates are tokens a second and device; a source's
TFLOP/s become tokens by the source's own convention (`published_flops`). Rows recalled from memory are never used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from phalanx.config.model import LanguageModel
from phalanx.hardware.device import known_devices
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.published.cells import (
    Precision,
    Recompute,
    Row,
    Unusable,
    device_of,
    devices_per_node,
    memory_gib,
    precision_of,
    read_rows,
    recompute_of,
    replicas_of,
    zero_of,
)
from phalanx.planner.published.flops import Convention, convention_of
from phalanx.planner.published.shapes import model_of

Status = Literal["ok", "oom"]
T = TypeVar("T")


@dataclass(frozen=True)
class Rate:
    """How fast a run was."""

    tokens_per_s: float
    """Tokens a second and device."""
    source: str
    """The column it is from; for one that counts operations, the convention too."""


@dataclass(frozen=True)
class Memory:
    """What one device held."""

    gib: float
    kind: str
    """What was measured, in the source's words."""


@dataclass(frozen=True)
class PublishedRun:
    """One row. What could not be read is None; a used row has all of model, layout, device and a rate, memory or `oom`."""

    row_id: str
    group: str
    system: str
    tag: str
    """How the figures came into the table: read, digitized, derived, recalled."""
    confidence: str
    framework: str
    attention: str
    """The kernel, in the source's words."""
    source: str
    notes: str
    used: bool
    reason: str
    """Why the row is not used; empty for one that is."""
    assumed: tuple[str, ...]
    """What the source does not state and was filled in."""
    device: str | None
    """Our name of the device; one that `cluster.devices` may not hold."""
    devices: int | None
    """How many in all; GCDs of an MI250X are devices."""
    devices_per_node: int | None
    model: LanguageModel | None
    sequence_length: int | None
    layout: ResolvedLayout | None
    """With micro-batches of one sample where the source does not state them; such a row is not used."""
    recompute: Recompute | None
    precision: Precision | None
    sequence_parallel: bool | None
    """Whether activations between tensor-parallel blocks are split as well, as ours are; None where not stated."""
    rate: Rate | None
    memory: Memory | None
    status: Status
    """oom: it did not fit."""
    agreement: float | None
    """Operations a second by the convention and the measured tokens or time, over those stated; None where only one of
    the two is known."""


def read_runs(path: Path) -> list[PublishedRun]:
    """Every row of the table, used or not, in order.

    Raises DataError naming the file, and the line where there is one, for a table that cannot be read, lacks a column or
    holds a row twice. A row with a number that cannot be is one that is not used.
    """
    return [_read_row(row) for row in read_rows(path)]


def _read_row(row: Row) -> PublishedRun:
    reasons: list[str] = []

    def attempt(read: Callable[..., T], *arguments: object) -> T | None:
        """What `read` gives, or None with its reason kept; None at once where an argument is missing."""
        if any(argument is None for argument in arguments):
            return None
        try:
            return read(row, *arguments)
        except Unusable as error:
            reasons.append(str(error))
            return None

    status = _status(row.text("status"))
    attempt(_trusted)
    model = attempt(model_of)
    precision = attempt(precision_of)
    named = attempt(device_of)
    device, per_unit = named or (None, 1)
    devices = attempt(_device_count, per_unit)
    layout = attempt(_layout, devices, status)
    attempt(_microbatch_stated)
    attempt(_stages_hold_blocks, model, layout)
    recompute = attempt(recompute_of)
    length = attempt(_length)
    memory, per_node = attempt(memory_gib, per_unit), attempt(devices_per_node, per_unit)
    counted = attempt(partial(_counted, device=device, precision=precision, per_unit=per_unit))
    timed = attempt(_timed, devices, length, per_unit)
    rate = timed or attempt(_rate_by_convention, model, length, counted)
    if status == "ok" and rate is None and memory is None:
        reasons.append("the source states neither a rate that can be converted to tokens nor memory")
    return PublishedRun(
        **{name: row.text(name) for name in _WORDS},
        used=not reasons,
        reason=reasons[0] if reasons else "",
        assumed=tuple(row.assumed),
        device=device,
        devices=devices,
        devices_per_node=per_node,
        model=model,
        sequence_length=length,
        layout=layout,
        recompute=recompute,
        precision=precision,
        sequence_parallel={"True": True, "False": False}.get(row.text("sp")),
        rate=rate,
        memory=None if memory is None else Memory(*memory),
        status=status,
        agreement=_agreement(_convention(row), model, length, timed, counted),
    )


_WORDS = ("row_id", "group", "system", "tag", "confidence", "framework", "attention", "source", "notes")


def _trusted(row: Row) -> None:
    if row.text("tag") == "recalled":
        raise Unusable("it was recalled from memory, not seen")
    if "unreliable" in row.text("status"):
        raise Unusable("its source calls it unreliable")
    if "boundary" in row.text("status"):
        raise Unusable("it states the largest model that fits, not a run")
    if "analytic" in row.text("notes").lower():
        raise Unusable("its figures were calculated by the source, not measured")


def _status(words: str) -> Status:
    return "oom" if "oom" in words or "not fit" in words else "ok"


def _device_count(row: Row, per_unit: int) -> int:
    (count,) = row.wholes("n_gpus")
    return count * per_unit


def _length(row: Row) -> int | None:
    return row.whole("seq")


def _microbatch_stated(row: Row) -> None:
    row.wholes("mbs")


def _layout(row: Row, devices: int, status: Status) -> ResolvedLayout:
    """The row's layout. Raises Unusable where degrees or the batch are not stated or do not fit together."""
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
    zero, replicas = zero_of(row), replicas_of(row, data_ranks)
    layout = ResolvedLayout(
        global_batch=global_batch,
        microbatch=microbatch,
        dp_replicate=data_ranks if zero == 0 else replicas,
        dp_shard=1 if zero == 0 else data_ranks // replicas,
        cp=cp,
        tp=tp,
        pp=pp,
        zero=zero,
        schedule="interleaved_1f1b" if stages_per_rank > 1 else "1f1b",
        stages_per_rank=stages_per_rank if pp > 1 else 1,
        reshard_after_forward=zero == 3 and pp == 1,
    )
    stated = row.whole("grad_accum")
    if stated is not None and stated != layout.accumulation:
        raise Unusable(f"it states {stated} micro-batches a step, but its batches make {layout.accumulation}")
    return layout


def _stages_hold_blocks(_row: Row, model: LanguageModel, layout: ResolvedLayout) -> None:
    if layout.n_stages > model.n_layers:
        stages = f"pp={layout.pp} x vpp={layout.stages_per_rank} = {layout.n_stages} pipeline stages"
        raise Unusable(f"its {stages} are more than its {model.n_layers} layers")


def _timed(row: Row, devices: int, length: int, per_unit: int) -> Rate | None:
    """The rate from tokens, step time or samples a second, whichever the row has first; None where it has none."""
    tokens = row.number("tokens_per_s_per_gpu")
    if tokens is not None:
        return Rate(tokens / per_unit, "tokens_per_s_per_gpu")
    seconds, global_batch = row.number("step_time_s"), row.number("gbs")
    if seconds is not None and global_batch is not None:
        return Rate(global_batch * length / seconds / devices, "step_time_s")
    samples = row.number("samples_per_s")
    return None if samples is None else Rate(samples * length / devices, "samples_per_s")


@dataclass(frozen=True)
class _Counted:
    """Operations a second and device as a source states them."""

    flops: float
    column: str


def _counted(row: Row, device: str | None, precision: Precision | None, per_unit: int) -> _Counted | None:
    teraflops = row.number("tflops_per_gpu")
    if teraflops is not None:
        return _Counted(teraflops * 1e12 / per_unit, "tflops_per_gpu")
    share = row.number("mfu_pct")
    facts = next((facts for _, facts in known_devices() if facts.name == device), None)
    peak = facts.peak_tflops.get(precision) if facts and precision else None
    return None if share is None or peak is None else _Counted(share / 100.0 * peak * 1e12, "mfu_pct")


def _rate_by_convention(row: Row, model: LanguageModel, length: int, counted: _Counted) -> Rate:
    convention = _convention(row)
    if convention is None:
        raise Unusable(f"it states {counted.column} alone, and what its source counts is not known")
    return Rate(counted.flops / convention(model, length), f"{counted.column} by {convention.__name__}")


def _convention(row: Row) -> Convention | None:
    return convention_of(row.text("group"), " ".join(map(row.text, ("framework", "flops_kind", "notes"))))


def _agreement(
    convention: Convention | None,
    model: LanguageModel | None,
    length: int | None,
    timed: Rate | None,
    counted: _Counted | None,
) -> float | None:
    if convention is None or model is None or length is None or timed is None or counted is None:
        return None
    return timed.tokens_per_s * convention(model, length) / counted.flops


@dataclass(frozen=True)
class GroupSummary:
    """What the rows of one group are good for."""

    group: str
    rows: int
    used: int
    reasons: tuple[tuple[str, int], ...]
    """Why the others are not used, with how many, most frequent first."""
    rates: tuple[tuple[str, int], ...]
    """Where the rates of used rows are from, with how many."""
    devices: tuple[str, ...]
    """Devices of used rows."""
    memory: int
    """Used rows with memory."""
    out_of_memory: int
    """Used rows that did not fit."""
    compared: int
    """Rows, used or not, that state both a time and a count of operations."""
    agree: int
    """Of those, how many agree within 3% by the group's convention."""


AGREEMENT = 0.03
"""How far a stated count of operations may be from the one that follows from the stated time: rounding of both."""


def summarise(runs: list[PublishedRun]) -> list[GroupSummary]:
    """One line for each group, in order of first appearance."""
    groups: dict[str, list[PublishedRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return [_summary(group, rows) for group, rows in groups.items()]


def _summary(group: str, rows: list[PublishedRun]) -> GroupSummary:
    used = [run for run in rows if run.used]
    compared = [run.agreement for run in rows if run.agreement is not None]
    return GroupSummary(
        group=group,
        rows=len(rows),
        used=len(used),
        reasons=tuple(Counter(run.reason for run in rows if not run.used).most_common()),
        rates=tuple(Counter(run.rate.source for run in used if run.rate).most_common()),
        devices=tuple(sorted({run.device for run in used if run.device})),
        memory=sum(run.memory is not None for run in used),
        out_of_memory=sum(run.status == "oom" for run in used),
        compared=len(compared),
        agree=sum(abs(ratio - 1.0) <= AGREEMENT for ratio in compared),
    )
