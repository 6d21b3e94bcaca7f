"""The HTML report of a run: one file that loads nothing and needs no library.

The markup is in `templates/run.html`, the read-out under the pointer in `run.js`. The axis choices work without a script; a
content security policy lets no other script than ours run, whatever the run's text holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from phalanx.config.families import sizes_of
from phalanx.config.load import parse_run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import require_replaceable, write_atomically
from phalanx.formatting import (
    format_count,
    format_duration,
    format_number,
    format_percent,
    shorten_blank_lines,
)
from phalanx.layout.spec import DEGREES
from phalanx.report.interactive_chart import PLOT_HEIGHT, PLOT_WIDTH, Chart, draw_chart
from phalanx.report.page import Tile, render_page, write_script_json
from phalanx.report.page_sections import (
    ERROR_COLUMNS,
    LAYER_COLUMNS,
    TASK_COLUMNS,
    describe_errors,
    describe_experts,
    describe_tasks,
    describe_widths,
)
from phalanx.report.run_charts import chart_run, format_value, read_out
from phalanx.report.run_log import EVALUATED_EVENT, Event, RunLog, Summary, split_wall_time, summarise_run
from phalanx.report.table import Column

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
"""FLOPs convention of the families for which `training.flops` makes no difference."""
_ROUTINE = ("checkpoint", "evaluation", EVALUATED_EVENT, "tasks")
_TABLED = (("tasks", "tasks"), ("evaluation", "errors"))
"""Kinds of events and fields of theirs that stand in tables of their own."""
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


def write_page(log: RunLog, out: Path | None = None) -> Path:
    """Write the page of a run, finished or not, as one HTML file; return its path.

    out: the file to write, by default `report.html` in the run directory; missing folders are made. Raises ConfigError where
    it is a directory, PhalanxError where it cannot be written.
    """
    page = log.run_dir / "report.html" if out is None else out
    if page.is_dir():
        raise ConfigError(f"{page} is a directory: name the file to write, for example {page / 'report.html'}")
    # /dev/null and the like must not be replaced by a file
    require_replaceable(page)
    try:
        write_atomically(page, render_run(log))
    except OSError as error:
        raise PhalanxError(f"cannot write {page}: {error.strerror}; name another file with --out") from error
    return page


def render_run(log: RunLog, live: str | None = None) -> str:
    """Return the page as text. live: see `render_page`."""
    # Each is computed once: logs of long runs are large.
    run, summary = chart_run(log), summarise_run(log)
    figures, experts, widths = read_out(run), describe_experts(log.experts), describe_widths(log.run_dir)
    headline = [f"loss {format_number(summary.final_loss)}"]
    if summary.validation_step is not None:
        headline.append(f"validation {format_number(summary.validation_loss)}")
    headline.append(f"{format_count(summary.tokens)} {summary.unit}")
    # A log without events, as of a copied metrics file, does not tell whether its run ended.
    label = "Still running, or stopped" if log.events else "No events recorded"
    # one text a column is half the size of a list of texts
    columns = {name: "|".join(texts) for name, texts in figures.columns.items()}
    return render_page(
        "run.html",
        *(["figures.css"] if experts or widths else []),
        scripts=["run.js"],
        live=live,
        experts=experts,
        layer_columns=LAYER_COLUMNS,
        tasks=describe_tasks(log),
        errors=describe_errors(log),
        error_columns=ERROR_COLUMNS,
        widths=widths,
        task_columns=TASK_COLUMNS,
        name=log.run_dir.resolve().name,
        headline=", ".join(headline),
        state={"name": "finished", "label": "Finished"} if summary.finished else {"name": "unfinished", "label": label},
        facts=list_facts(log, summary),
        tiles=make_headline(summary),
        notes=list_notes(log, summary),
        charts=[(chart, draw_chart(chart, run.domains, run.marks)) for chart in run.charts],
        describe=_describe_chart,
        marks={name: len(log.of_kind(kind)) for name, kind in (("resumes", "resume"), ("checkpoints", "checkpoint"))},
        last=figures.last,
        median_step=format_duration(summary.median_step_seconds),
        time_split=split_time(summary),
        samples=pick_samples(log),
        events=pick_events(log),
        event_columns=EVENT_COLUMNS,
        event_style=lambda event: f"event-{event.kind if event.kind in ('resume', 'warning') else 'other'}",
        machine=list_machine(log),
        config=None if log.config_text is None else _clip(log.config_text, LONGEST_CONFIG),
        summary=summary,
        event_count=len(log.events),
        plot_width=PLOT_WIDTH,
        plot_height=PLOT_HEIGHT,
        readout=write_script_json({"domains": figures.domains, "positions": figures.positions, "columns": columns}),
    )


def _describe_chart(chart: Chart) -> str:
    """Return a chart in words, for those who do not see it."""
    sentences = []
    for series in (one for one in chart.series if one.label):
        finite = np.flatnonzero(np.isfinite(series.values))
        if not finite.size:
            sentences.append(f"{series.label}: no finite value.")
            continue
        values, steps = series.values[finite], series.positions.step[finite]
        ends = " ".join(
            f"{word} {format_value(chart.key, float(values[i]))} at step {steps[i]:,.0f}{stop}"
            for word, i, stop in (
                ("from", 0, ""),
                ("to", -1, ";"),
                ("lowest", values.argmin(), ","),
                ("highest", values.argmax(), "."),
            )
        )
        sentences.append(f"{series.label} {ends}")
    return " ".join(sentences)


# --- what stands around the charts -------------------------------------------------------------------------------------


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
class EventTable:
    """The events but samples, in the order they were written."""

    rows: list[Event]
    left_out: int


@dataclass(frozen=True)
class TimePart:
    """One part of the wall time."""

    label: str
    share: float
    percent: str
    duration: str
    colour: int


def make_headline(summary: Summary) -> list[Tile]:
    """Return the headline figures; a figure the log does not tell has no tile, the final loss always has one."""
    unit, in_steps = summary.unit, f"{format_duration(summary.step_seconds)} in steps"
    tiles = [
        Tile("final_loss", "Final loss", format_number(summary.final_loss), "", f"training, step {summary.steps:,}")
    ]
    if summary.validation_step is not None:
        at = f"step {summary.validation_step:,}"
        tiles.append(Tile("validation_loss", "Validation loss", format_number(summary.validation_loss), "", at))
        # models of weather and materials have no perplexity
        if not math.isnan(summary.perplexity):
            perplexity = format_number(summary.perplexity)
            tiles.append(Tile("perplexity", "Perplexity", perplexity, "", "validation, per token"))
        if not math.isnan(summary.bits_per_byte):
            tiles.append(Tile("bits_per_byte", "Bits per byte", format_number(summary.bits_per_byte), "", "validation"))
    tiles.append(Tile("tokens", unit.capitalize(), format_count(summary.tokens), "", f"{summary.tokens:,}"))
    if math.isfinite(summary.median_tokens_per_second):
        rate = format_count(summary.median_tokens_per_second)
        tiles.append(Tile("tokens_per_second", "Throughput", rate, f"{unit}/s", "all devices, median step"))
    counted = _name_flops_convention(summary)
    for key, label, value, of in (
        ("mfu", "MFU", summary.median_mfu, "of nominal peak"),
        ("mfu_measured", "MFU, measured peak", summary.median_mfu_measured, "of measured matmul peak"),
    ):
        # false for NaN, too
        if value >= 0:
            tiles.append(Tile(key, label, format_percent(value), "", f"{of}; {counted}"))
    tiles.append(Tile("wall", "Wall time", format_duration(summary.wall_seconds), "", in_steps))
    if math.isfinite(summary.data_wait_share):
        share = format_percent(summary.data_wait_share)
        tiles.append(Tile("data_wait", "Data wait", share, "", "of the time in steps"))
    if math.isfinite(summary.joules_per_token):
        note = (
            f"{format_number(summary.joules_per_token)} J per {unit.removesuffix('s')}, median; all devices, in steps"
        )
        tiles.append(Tile("energy", "Energy", format_number(summary.energy_joules / 3.6e6), "kWh", note))
    if math.isfinite(summary.critical_batch):
        words = "samples, by the noise of gradients; last estimate"
        tiles.append(Tile("critical_batch", "Critical batch", format_count(summary.critical_batch), "", words))
    if math.isfinite(summary.rank_wait_share):
        share, waited = (
            format_percent(summary.rank_wait_share),
            "for the slowest, mean over ranks, of the time in steps",
        )
        tiles.append(Tile("rank_wait", "Ranks' wait", share, "", waited))
    return tiles


def _name_flops_convention(summary: Summary) -> str:
    """Return what is counted as model FLOPs, without which an MFU says little."""
    if summary.family != "language":
        return _COUNTED.get(summary.family, summary.family)
    convention = summary.flops_convention
    return _CONVENTIONS.get(convention, convention) if convention else "convention not recorded"


def list_notes(log: RunLog, summary: Summary) -> list[str]:
    """Return what a reader must know before trusting the figures: what is missing, and what went wrong in the run."""
    found = list(log.notes)
    if summary.nonfinite_losses:
        bad = log.steps[~np.isfinite(log.columns["loss"])]
        found.append(
            f"The loss was NaN, infinite or missing at {summary.nonfinite_losses:,} of {summary.records:,} steps, first at "
            f"step {bad[0]:,}; the charts show these as gaps with a shaded mark."
        )
    if summary.skipped_updates:
        found.append(
            f"{summary.skipped_updates:,} steps left the parameters alone: not finite, or far above those before."
        )
    rewinds = log.of_kind("rewind")
    if rewinds:
        passed = sum(n for event in rewinds if math.isfinite(n := event.number("passed_batches")))
        found.append(f"{len(rewinds):,} rewinds to a checkpoint; {passed:,.0f} batches were passed over.")
    found += [f"Step {event.step:,}: replicas of parameters differed." for event in log.of_kind("replicas_differ")]
    if chosen := log.of_kind("checkpoint_interval"):
        # Each choice replaces the one before.
        every, step, stall, failure, goodput = (
            chosen[-1].number(name) for name in ("every", "step_seconds", "stall_seconds", "failure_seconds", "goodput")
        )
        found.append(
            f"Checkpoints every {every:,.0f} steps ({format_duration(every * step)}), chosen at step {chosen[-1].step:,} to "
            f"lose least (Young, Daly): one holds training up for {format_duration(stall)}, and the job fails every "
            f"{format_duration(failure)} on average; expected goodput {format_percent(goodput)}."
        )
    warnings = log.of_kind("warning")
    found += [f"Warning at step {event.step:,}: {describe_event(event)}" for event in warnings[:MOST_WARNINGS]]
    if len(warnings) > MOST_WARNINGS:
        found.append(f"{len(warnings) - MOST_WARNINGS:,} more warnings stand among the events.")
    return found


def list_facts(log: RunLog, summary: Summary) -> list[str]:
    """Return how far the run came, on what, and when."""
    planned = log.planned_steps
    done = f"{summary.steps:,}" if planned is None else f"{summary.steps:,} of {planned:,}"
    found = [f"{done} step{'s' * (done != '1')}"]
    machine = log.machine or {}
    run = None
    if log.config_text is not None:
        # a run file that is not whole, or of another version, leaves facts out and shows the rest of the page
        with suppress(ConfigError):
            run = parse_run(log.config_text, "run.yaml")
    if run is not None:
        found.append(f"{format_count(sizes_of(run.model).parameter_count(run.model))} parameters")
    if "device" in machine:
        devices = machine.get("device_count", 1)
        found.append(f"{devices} × {machine['device']}"[:LONGEST_DETAIL])
    if run is not None:
        degrees = {name: getattr(run.layout, name) for name in DEGREES}
        # with the devices known, a degree that is auto follows from the others
        count, rest = machine.get("device_count"), math.prod(n for n in degrees.values() if n != "auto")
        if isinstance(count, int) and count % rest == 0:
            degrees = {name: count // rest if degree == "auto" else degree for name, degree in degrees.items()}
        spread = " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1) or "one rank"
        found.append(f"{spread}, global batch {run.layout.global_batch}, {run.layout.precision}")
        found.append(f"data {', '.join(run.data_names)}"[:LONGEST_DETAIL])
    if log.events:
        first, last = (end(event.time for event in log.events) for end in (min, max))
        day = "" if first.date() == last.date() else f"{last:%Y-%m-%d} "
        found.append(f"{first:%Y-%m-%d %H:%M} to {day}{last:%H:%M} UTC")
    return found


def split_time(summary: Summary) -> list[TimePart]:
    """Return what the wall time of a run went to; none where it is not known."""
    parts = split_wall_time(summary)
    total = sum(parts.values())
    if not total:
        return []
    return [
        TimePart(name, seconds / total, format_percent(seconds / total), format_duration(seconds), colour)
        for colour, (name, seconds) in enumerate(parts.items(), 1)
        if seconds > 0.0
    ]


def pick_samples(log: RunLog) -> Samples:
    """Return the samples of a run, thinned evenly where there are very many."""
    events = sorted(log.of_kind("sample"), key=lambda event: -event.step)
    newest = [event for event in events if event.step == events[0].step]
    latest, earlier = newest[:MOST_SAMPLES], events[len(newest) :]
    shown = thin_evenly(earlier, MOST_SAMPLES)
    left_out = len(events) - len(latest) - len(shown)
    return Samples([_show_sample(event) for event in latest], [_show_sample(event) for event in shown], left_out)


def _show_sample(event: Event) -> Sample:
    prompt, text = (str(event.fields.get(name) or "") for name in ("prompt", "text"))
    written = shorten_blank_lines(text.removeprefix(prompt))
    return Sample(event.step, _clip(prompt, LONGEST_PROMPT), _clip(written, LONGEST_SAMPLE))


def pick_events(log: RunLog) -> EventTable:
    """Return the events but samples, routine ones thinned evenly where there are very many."""
    routine = [i for i, event in enumerate(log.events) if event.kind in _ROUTINE]
    rare = [i for i, event in enumerate(log.events) if event.kind not in (*_ROUTINE, "sample")]
    kept = sorted([*thin_evenly(rare, MOST_EVENTS // 2), *thin_evenly(routine, MOST_EVENTS // 2)])
    return EventTable([log.events[i] for i in kept], len(routine) + len(rare) - len(kept))


def describe_event(event: Event) -> str:
    """Return what an event says beside its kind, step and time, in one line unless its text has several."""
    fields = {name: value for name, value in event.fields.items() if (event.kind, name) not in _TABLED}
    parts = (
        _format_plain(value) if name in ("text", "message") else f"{name.replace('_', ' ')} {_format_plain(value)}"
        for name, value in fields.items()
    )
    return _clip(" · ".join(parts))


EVENT_COLUMNS: tuple[Column[Event], ...] = (
    Column("Step", lambda event: f"{event.step:,}"),
    Column("Time (UTC)", lambda event: f"{event.time:%Y-%m-%d %H:%M:%S}", "left", 1, style=lambda event: "nowrap"),
    Column("Event", lambda event: _clip(event.kind, 40), "left"),
    Column("Details", describe_event, "left"),
)


def list_machine(log: RunLog) -> list[tuple[str, str]]:
    """Return rows of label and value, the known ones first and in order."""
    machine = log.machine or {}
    # Later versions may record what no label is known for.
    names = [*(name for name in _MACHINE_LABELS if name in machine), *(n for n in machine if n not in _MACHINE_LABELS)]
    return [(_MACHINE_LABELS.get(name, name.replace("_", " ")), _clip(_format_plain(machine[name]))) for name in names]


def thin_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items, evenly spread, the first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _format_plain(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e5 else format_number(value)
    return str(value)


def _clip(text: str, longest: int = LONGEST_DETAIL) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} more characters)"
