"""Published training runs from a table: what ran, in which layout, and how fast, in our own words and units.

A row that cannot be compared with a plan says why in one sentence. Rates are tokens a second and device; a source's
TFLOP/s become tokens by the source's own convention (`published.flops`). Rows recalled from memory are never used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from phalanx.config.model import LanguageModel
from phalanx.hardware.device_facts import known_devices
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.measured.cells import Precision, Row, Unusable, device_of, precision_of, read_rows
from phalanx.planner.measured.runs import (
    Attempts,
    MeasuredRun,
    Memory,
    Rate,
    check_microbatch_stated,
    check_stages_hold_blocks,
    device_count,
    layout_of,
    length_of,
    status_of,
    timed_rate,
)
from published.cells import COLUMNS, devices_per_node, memory_gib, recompute_of, zero_of
from published.flops import Convention, convention_of
from published.models import published_model


@dataclass(frozen=True)
class PublishedRun(MeasuredRun):
    """A row of a table of published runs."""

    tag: str
    """How the figures came into the table: read, digitized, derived, recalled."""
    confidence: str
    attention: str
    """The kernel, in the source's words."""
    model_name: str
    source: str
    notes: str
    devices_per_node: int | None
    sequence_parallel: bool | None
    """Whether activations between tensor-parallel blocks are split as well, as ours are; None where not stated."""
    agreement: float | None
    """Operations a second by the convention and the measured tokens or time, over those stated; None where only one of
    the two is known."""


def read_published_runs(path: Path) -> list[PublishedRun]:
    """Read every row of the table, used or not, in order.

    Raises DataError naming the file, and the line where there is one, for a table that cannot be read, lacks a column or
    holds a row twice. A row with a number that cannot be is one that is not used.
    """
    return [_read_row(row) for row in read_rows(path, COLUMNS)]


_WORDS = ("row_id", "group", "system", "tag", "confidence", "framework", "attention", "source", "notes")


def _read_row(row: Row) -> PublishedRun:
    attempt = Attempts(row)
    status = status_of(row.text("status"))
    attempt(_trusted)
    model, precision = attempt(published_model), attempt(precision_of)
    device, per_unit = attempt(device_of) or (None, 1)
    devices = attempt(device_count, per_unit)
    layout = attempt(_expert_layout, attempt(layout_of, devices, status, attempt(zero_of)))
    attempt(check_microbatch_stated)
    attempt(check_stages_hold_blocks, model, layout)
    recompute, length = attempt(recompute_of), attempt(length_of)
    memory, per_node = attempt(memory_gib, per_unit), attempt(devices_per_node, per_unit)
    counted = attempt(partial(_counted, device=device, precision=precision, per_unit=per_unit))
    timed = attempt(timed_rate, devices, length, per_unit)
    rate = timed or attempt(_rate_by_convention, model, length, counted)
    reasons = attempt.reasons
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
        model_name=row.text("model"),
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


def _expert_layout(row: Row, layout: ResolvedLayout) -> ResolvedLayout:
    """Return the layout with the row's ranks of experts. Raises Unusable where ours cannot spread them so."""
    ep, ranks = row.whole("ep") or 1, int(layout.table.expert_ranks[0])
    if ranks % ep:
        raise Unusable(f"ep={ep} does not divide the {ranks} ranks of a stage and replica")
    return replace(layout, ep=ep)


def _trusted(row: Row) -> None:
    if row.text("tag") == "recalled":
        raise Unusable("it was recalled from memory, not seen")
    if "unreliable" in row.text("status"):
        raise Unusable("its source calls it unreliable")
    if (row.text("framework"), row.text("model")) in _REGRESSIONS:
        raise Unusable("its source calls it a regression, of a kernel that took ten times as long")
    if "boundary" in row.text("status"):
        raise Unusable("it states the largest model that fits, not a run")
    if "analytic" in row.text("notes").lower():
        raise Unusable("its figures were calculated by the source, not measured")


_REGRESSIONS = {("Megatron-Bridge 26.06.01", "GPT OSS 120B")}
"""NVIDIA-NeMo/Megatron-Bridge@067f987d, docs/performance-summary-archive.md, [^gpt-oss-note]: NVIDIA/cudnn-frontend#256,
whose fix (#322) brings that kernel from 1363 to 156 us."""


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
    peak = facts.peak_tflops.get("bf16" if "fp8" in precision else precision) if facts and precision else None
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
    if model.sliding_window is not None or model.leading_layers:
        # What sources count of windows and of layers that predict further tokens is not said.
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
