"""What stands around the charts of the page: headline tiles, notes, samples, and the event and machine tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from phalanx.config.load import parse_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.sizes import sizes_of
from phalanx.report.run_log import Event, RunLog
from phalanx.report.summary import Summary
from phalanx.report.text import count, duration, number, percent, shorten_blank_lines

Item = TypeVar("Item")

MOST_SAMPLES = 30
MOST_EVENTS = 400
MOST_WARNINGS = 5
LONGEST_PROMPT = 1000
LONGEST_SAMPLE = 3000
LONGEST_DETAIL = 400
LONGEST_CONFIG = 100_000

_CONVENTIONS = {"causal": "causal half of attention", "palm": "PaLM, attention not halved"}
_COUNTED = {"weather": "attention sees all pairs", "materials": "of a structure of mean size"}
"""Of the families for which `training.flops` makes no difference."""
_ROUTINE = ("checkpoint", "evaluation")
_MACHINE_LABELS = {
    "device": "Device",
    "device_type": "Device type",
    "device_kind": "Device in machine descriptions",
    "device_count": "Devices",
    "host": "Host",
    "system": "Operating system",
    "cpu": "CPU",
    "cpu_count": "CPU cores",
    "memory_gib": "Host memory (GiB)",
    "torch": "PyTorch",
    "python": "Python",
    "phalanx": "Phalanx",
    "peak_tflops_nominal": "Nominal peak of a device (TFLOP/s)",
    "peak_tflops_measured": "Measured matmul peak of a device (TFLOP/s)",
    "flops_convention": "Model FLOPs convention",
}


@dataclass(frozen=True)
class Tile:
    """One headline figure."""

    key: str
    label: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """Text that the model wrote."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Samples:
    """The samples of the newest step that has any, and those of earlier steps, newest first."""

    latest: list[Sample]
    earlier: list[Sample]
    left_out: int


@dataclass(frozen=True)
class EventRow:
    """One row of the event table."""

    step: int
    time: str
    kind: str
    details: str
    style: str


@dataclass(frozen=True)
class EventTable:
    """The events but samples, in the order they were written."""

    rows: list[EventRow]
    left_out: int


@dataclass(frozen=True)
class TimePart:
    """One part of the time spent in steps."""

    label: str
    share: float
    percent: str
    duration: str
    colour: int


def tiles(summary: Summary) -> list[Tile]:
    """The headline figures; a figure the log does not tell has no tile, the final loss always has one."""
    found = [
        Tile("final_loss", "Final loss", number(summary.final_loss), "", f"training, step {summary.steps:,}"),
        *_validation_tiles(summary),
        Tile("tokens", summary.unit.capitalize(), count(summary.tokens), "", f"{summary.tokens:,}"),
    ]
    if math.isfinite(summary.median_tokens_per_second):
        rate = count(summary.median_tokens_per_second)
        found.append(Tile("tokens_per_second", "Throughput", rate, f"{summary.unit}/s", "all devices, median step"))
    found += _mfu_tiles(summary)
    in_steps = f"{duration(summary.step_seconds)} in steps"
    found.append(Tile("wall", "Wall time", duration(summary.wall_seconds), "", in_steps))
    if math.isfinite(summary.data_wait_share):
        found.append(Tile("data_wait", "Data wait", percent(summary.data_wait_share), "", "of the time in steps"))
    if math.isfinite(summary.rank_wait_share):
        waited = "for the slowest, mean over ranks, of the time in steps"
        found.append(Tile("rank_wait", "Ranks' wait", percent(summary.rank_wait_share), "", waited))
    return found


def _validation_tiles(summary: Summary) -> list[Tile]:
    if summary.validation_step is None:
        return []
    at = f"step {summary.validation_step:,}"
    found = [Tile("validation_loss", "Validation loss", number(summary.validation_loss), "", at)]
    if not math.isnan(summary.perplexity):
        found.append(Tile("perplexity", "Perplexity", number(summary.perplexity), "", "validation, per token"))
    if not math.isnan(summary.bits_per_byte):
        found.append(Tile("bits_per_byte", "Bits per byte", number(summary.bits_per_byte), "", "validation"))
    return found


def _mfu_tiles(summary: Summary) -> list[Tile]:
    convention = summary.flops_convention
    if summary.family == "language":
        counted = _CONVENTIONS.get(convention, convention) if convention else "convention not recorded"
    else:
        counted = _COUNTED.get(summary.family, summary.family)
    figures = (
        ("mfu", "MFU", summary.median_mfu, "of nominal peak"),
        ("mfu_measured", "MFU, measured peak", summary.median_mfu_measured, "of measured matmul peak"),
    )
    return [Tile(key, label, percent(value), "", f"{of}; {counted}") for key, label, value, of in figures if value >= 0]


def notes(log: RunLog, summary: Summary) -> list[str]:
    """What a reader must know before trusting the figures: what is missing, and what went wrong in the run."""
    found = list(log.notes)
    if summary.nonfinite_losses:
        bad = log.steps[~np.isfinite(log.columns["loss"])]
        found.append(
            f"The loss was NaN, infinite or missing at {summary.nonfinite_losses:,} of {summary.records:,} steps, first at "
            f"step {bad[0]:,}; the charts show these as gaps with a shaded mark."
        )
    if summary.skipped_updates:
        found.append(f"{summary.skipped_updates:,} steps left the parameters alone: their gradient was not finite.")
    warnings = log.of_kind("warning")
    found += [f"Warning at step {event.step:,}: {_details(event)}" for event in warnings[:MOST_WARNINGS]]
    if len(warnings) > MOST_WARNINGS:
        found.append(f"{len(warnings) - MOST_WARNINGS:,} more warnings stand among the events.")
    return found


def status(log: RunLog, summary: Summary) -> tuple[str, str]:
    """The class and the words of the badge that says whether the run came to its end."""
    if summary.finished:
        return "finished", "Finished"
    return "unfinished", "Still running, or stopped" if log.events else "No events recorded"


def facts(log: RunLog, summary: Summary) -> list[str]:
    """How far the run came, on what, and when."""
    training = (log.config or {}).get("training")
    planned = training.get("steps") if isinstance(training, Mapping) else None
    done = f"{summary.steps:,} of {planned:,}" if isinstance(planned, int) else f"{summary.steps:,}"
    found = [f"{done} step{'s' * (done != '1')}"]
    machine = log.machine or {}
    run = _parsed_run(log)
    if run is not None:
        found.append(f"{count(sizes_of(run.model).parameter_count(run.model))} parameters")
    if "device" in machine:
        devices = machine.get("device_count", 1)
        found.append(f"{devices} × {machine['device']}"[:LONGEST_DETAIL])
    if run is not None:
        sources = ", ".join(str(source["path"]) for source in run.data.model_dump(mode="json")["sources"])
        found += [_layout_in_words(run, machine.get("device_count")), f"data {sources}"[:LONGEST_DETAIL]]
    if log.events:
        first, last = (end(event.time for event in log.events) for end in (min, max))
        day = "" if first.date() == last.date() else f"{last:%Y-%m-%d} "
        found.append(f"{first:%Y-%m-%d %H:%M} to {day}{last:%H:%M} UTC")
    return found


def _parsed_run(log: RunLog) -> Run | None:
    """The run file, where it is whole and of this version."""
    if log.config_text is None:
        return None
    try:
        return parse_run(log.config_text, "run.yaml")
    except ConfigError:
        return None


def _layout_in_words(run: Run, devices: object) -> str:
    """The degrees above 1, the one that is auto as what remains of the devices, and the global batch."""
    degrees = {name: getattr(run.layout, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    rest = math.prod(degree for degree in degrees.values() if degree != "auto")
    if isinstance(devices, int) and devices % rest == 0:
        degrees = {name: devices // rest if degree == "auto" else degree for name, degree in degrees.items()}
    spread = " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1) or "one rank"
    return f"{spread}, global batch {run.layout.global_batch}, {run.layout.precision}"


def time_split(log: RunLog, summary: Summary) -> list[TimePart]:
    """Computing, data wait, checkpoint stall and ranks' wait as parts of the time in steps; empty where unrecorded."""
    waits = [
        ("data wait", summary.data_wait_share, 2),
        ("checkpoint stall", summary.checkpoint_stall_share, 3),
        ("ranks' wait", summary.rank_wait_share, 4),
    ]
    waits = [(label, min(share, 1.0), colour) for label, share, colour in waits if math.isfinite(share)]
    if not waits:
        return []
    rest = max(0.0, 1 - sum(share for _, share, _ in waits))
    return [
        TimePart(label, share, percent(share), duration(share * summary.step_seconds), colour)
        for label, share, colour in [("computing", rest, 1), *waits]
    ]


def samples(log: RunLog) -> Samples:
    """The samples of a run, thinned evenly where there are very many."""
    events = sorted(log.of_kind("sample"), key=lambda event: -event.step)
    newest = [event for event in events if event.step == events[0].step]
    latest, earlier = newest[:MOST_SAMPLES], events[len(newest) :]
    shown = thinned(earlier, MOST_SAMPLES)
    left_out = len(events) - len(latest) - len(shown)
    return Samples([_sample(event) for event in latest], [_sample(event) for event in shown], left_out)


def _sample(event: Event) -> Sample:
    prompt, text = (str(event.fields.get(name) or "") for name in ("prompt", "text"))
    written = shorten_blank_lines(text.removeprefix(prompt))
    return Sample(event.step, _clipped(prompt, LONGEST_PROMPT), _clipped(written, LONGEST_SAMPLE))


def event_table(log: RunLog) -> EventTable:
    """The events but samples, routine ones thinned evenly where there are very many."""
    routine = [i for i, event in enumerate(log.events) if event.kind in _ROUTINE]
    rare = [i for i, event in enumerate(log.events) if event.kind not in (*_ROUTINE, "sample")]
    kept = sorted([*thinned(rare, MOST_EVENTS // 2), *thinned(routine, MOST_EVENTS // 2)])
    rows = [_event_row(log.events[i]) for i in kept]
    return EventTable(rows, len(routine) + len(rare) - len(rows))


def _event_row(event: Event) -> EventRow:
    style = event.kind if event.kind in ("resume", "warning") else "other"
    return EventRow(event.step, f"{event.time:%Y-%m-%d %H:%M:%S}", _clipped(event.kind, 40), _details(event), style)


def _details(event: Event) -> str:
    parts = (
        _plain(value) if name in ("text", "message") else f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in event.fields.items()
    )
    return _clipped(" · ".join(parts))


def machine_table(log: RunLog) -> list[tuple[str, str]]:
    """Rows of label and value, the known ones first and in order."""
    machine = log.machine or {}
    names = [*(name for name in _MACHINE_LABELS if name in machine), *(n for n in machine if n not in _MACHINE_LABELS)]
    return [(_MACHINE_LABELS.get(name, name.replace("_", " ")), _clipped(_plain(machine[name]))) for name in names]


def config_text(log: RunLog) -> str | None:
    """The resolved run file as written, cut where it is extremely long."""
    return None if log.config_text is None else _clipped(log.config_text, LONGEST_CONFIG)


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spread, the first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _plain(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e5 else number(value)
    return str(value)


def _clipped(text: str, longest: int = LONGEST_DETAIL) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} more characters)"
