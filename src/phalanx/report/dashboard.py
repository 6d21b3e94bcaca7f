"""Runs and studies as lines of a terminal, for any width and height: what `phalanx watch` shows.

The figures are those of the pages (`run_page`, `study_page`); here they only find their places. Nothing is read here, and no
terminal is touched: lines go in and out as `rich` text.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
from rich.text import Text

from phalanx.formatting import format_count, format_duration, format_number, format_percent
from phalanx.printable import make_printable
from phalanx.report.drawing import Scale, choose_value_ticks, fit_scale
from phalanx.report.interactive_chart import Chart
from phalanx.report.page import Tile
from phalanx.report.run_charts import chart_run
from phalanx.report.run_log import (
    EVALUATED_EVENT,
    SAVE_EVENT,
    SLOW_LINK_EVENT,
    Event,
    FloatArray,
    IntArray,
    RunLog,
    Summary,
    last_finite,
    median_of_finite,
    split_wall_time,
    summarise_run,
)
from phalanx.report.run_page import EVENT_COLUMNS, describe_event, list_facts, list_notes, make_headline
from phalanx.report.study_page import (
    SEARCH_TRIALS,
    TUNE_TRIALS,
    Row,
    format_choice,
    list_search_notes,
    list_search_tiles,
    list_tune_tiles,
    name_search,
    rank_tuned,
)
from phalanx.report.table import Column, RowT, write_text_table

BoolArray = npt.NDArray[np.bool_]
RECENT_STEPS = 20
"""Last steps whose median is called "now"."""
QUIET_S, QUIET_STEPS = 60.0, 10.0
"""Seconds, and median steps, without a new line after which a run no longer counts as training."""
_LEAST_WIDTH = 20
_LOW = 32
"""Lines below which a terminal has one for each figure."""
_UNBOUNDED_CHART, _UNBOUNDED_ROWS = 10, 12
"""Lines of the chart, and of events or trials, where no height is given."""
_LEAST_CHART, _LARGEST_CHART = 4, 14
_MOST_NOTES = 3
_TOLD_TILES = (
    *("tokens", "tokens_per_second", "wall", "data_wait"),
    *("final_loss", "validation_loss", "perplexity", "bits_per_byte"),
)
"""Headline figures of the page that other lines tell here."""
_TOLD_EVENTS = ("sample", "checkpoint", SAVE_EVENT, EVALUATED_EVENT, "evaluation")
"""Kinds of events that are not listed: lines of their own tell the last of each, and samples are long."""
_PLAIN = str.maketrans({"·": "-", "×": "x", "…": ".", "−": "-", "–": "-", "∞": "inf"})
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bits of the dots of a character of the block U+2800, by row and column."""


@dataclass(frozen=True)
class Room:
    """What the terminal offers."""

    width: int
    height: int | None = None
    """Lines; None for as many as it takes."""
    plain: bool = False
    """Whether only ASCII can be written."""

    @property
    def most_pieces(self) -> int:
        """Lines that a long figure or sentence may take."""
        return 1 if self.height is not None and self.height < _LOW else 2


@dataclass(frozen=True)
class RunFigures:
    """What is drawn of a run, computed once: a picture is drawn every second, and long logs take a while."""

    log: RunLog
    summary: Summary
    loss: Chart
    facts: list[str]
    notes: list[str]
    events: list[Event]
    """The newest first, without those that lines of their own tell."""

    @classmethod
    def of(cls, log: RunLog) -> RunFigures:
        """Compute the figures of a log."""
        summary = summarise_run(log)
        events = [event for event in reversed(log.events) if event.kind not in _TOLD_EVENTS]
        notes = list_notes(log, summary)[:_MOST_NOTES]
        return cls(log, summary, chart_run(log).charts[0], list_facts(log, summary), notes, events)


def draw_run(run: RunFigures, room: Room, *, quiet_s: float = 0.0, faults: Sequence[str] = ()) -> list[Text]:
    """Return the lines of a run.

    quiet_s: seconds since the log last grew. faults: what each fault of the run was, in the order in which they came.
    """
    log, summary = run.log, run.summary
    head = [
        _write_head(log.run_dir.resolve().name, *_name_state(log, summary, quiet_s)),
        *_wrap(" · ".join(run.facts), room, "dim", most=room.most_pieces),
    ]
    body = [*_write_rows(_list_run_rows(log, summary, faults), room), *_write_notes(run.notes, room)]
    tall, shown = _share_height(room, len(head) + len(body) + 6, len(run.events))
    # what a low terminal leaves out are the oldest
    table = _write_table(EVENT_COLUMNS, run.events[:shown], room)
    return _fit([*head, Text(), *_draw_loss(run, room, tall), Text(), *body, Text(), *table], room)


def draw_search(summary: Row, room: Room) -> list[Text]:
    """Return the lines of a search of layouts. summary: what `phalanx search --json` prints."""
    values = [row["step_s"] for row in summary["trials"]]
    ranked = sorted(summary["trials"], key=lambda row: (row["step_s"] is None, row["step_s"] or row["number"]))
    best = summary["best"]
    return _draw_study(
        _write_head(name_search(summary), *_name_study_state(summary)),
        [
            *list_search_tiles(summary),
            *_tell_running(summary),
            *([] if best is None else [Tile("choice", "Best choice", best["words"])]),
        ],
        list_search_notes(summary),
        ("Seconds of a step, by trial", summary["trials"], values),
        _write_table(SEARCH_TRIALS, ranked, room),
        room,
    )


def draw_tune(summary: Row, room: Room) -> list[Text]:
    """Return the lines of a study of hyperparameters. summary: what `phalanx tune --json` prints."""
    values = [row["score"] if row["failed"] is None else None for row in summary["trials"]]
    best = summary["best"]
    bars = [
        Tile("device", row["device"], f"|{row['bar']}|", "", f"idle {format_percent(row['idle'])}")
        for row in summary["devices"]["each"][:4]
    ]
    choice = [] if best is None else [Tile("choice", "Best choice", format_choice(best["values"]))]
    return _draw_study(
        _write_head(f"{summary['model']}: least {summary['metric']}", *_name_study_state(summary)),
        [*list_tune_tiles(summary), *_tell_running(summary), *choice, *bars],
        [summary["unfinished"]] if summary["unfinished"] else [],
        (f"{summary['metric']}, by trial", summary["trials"], values),
        _write_table(TUNE_TRIALS, rank_tuned(summary), room),
        room,
    )


def draw_message(name: str, words: str, room: Room, events: Sequence[Event] = ()) -> list[Text]:
    """Return the lines that say why there is nothing to draw yet, and the last of what has happened."""
    table = _write_table(EVENT_COLUMNS, events[: -_UNBOUNDED_ROWS - 1 : -1], room)
    return _fit([_write_head(name, "waiting", "yellow", ""), *_wrap(words, room), Text(), *table], room)


# --- a run -------------------------------------------------------------------------------------------------------------


def _name_state(log: RunLog, summary: Summary, quiet_s: float) -> tuple[str, str, str]:
    """Return what a run is doing, the style of these words, and how far it is."""
    if summary.finished:
        return "finished", "green", f"{summary.steps:,} steps in {format_duration(summary.wall_seconds)}"
    step_s = median_of_finite(log.columns["step_seconds"][-RECENT_STEPS:])
    planned = log.planned_steps
    done = f"step {summary.steps:,}" + ("" if planned is None else f" of {planned:,}")
    if quiet_s > max(QUIET_S, QUIET_STEPS * (step_s if math.isfinite(step_s) else 0.0)):
        return f"no new line for {format_duration(quiet_s)}", "yellow", f"{done}; stopped, or busy between steps"
    left = math.nan if planned is None else max(0, planned - summary.steps) * step_s
    return "training", "cyan", done + (f", {format_duration(left)} left" if math.isfinite(left) else "")


def _list_run_rows(log: RunLog, summary: Summary, faults: Sequence[str]) -> list[Tile]:
    """Return the figures beside the chart, each with what stands behind it."""
    now, step_s = (
        median_of_finite(log.tokens_per_second[-RECENT_STEPS:]),
        median_of_finite(log.columns["step_seconds"][-RECENT_STEPS:]),
    )
    median = format_count(summary.median_tokens_per_second)
    note = f"now, median {median}; {format_count(summary.tokens)} in all; a step takes {format_duration(step_s)}"
    rows = [Tile("rate", f"{summary.unit.capitalize()}/s", format_count(now), "", note)]
    rows += [
        replace(tile, label=tile.label.partition(",")[0])
        for tile in make_headline(summary)
        if tile.key not in _TOLD_TILES
    ]
    used, peak = (last_finite(log.column(f"memory_{name}_gib")) for name in ("now", "peak"))
    if math.isfinite(peak):
        note = f"after a step of the first rank, at most {peak:.1f} GiB"
        rows.append(Tile("memory", "Memory", f"{used:.1f} GiB", "", note))
    else:
        # CPUs count no memory of their own
        rows.append(Tile("memory", "Memory", "not told", "", "by this kind of device"))
    ranks = (log.machine or {}).get("device_count", "unknown")
    # Times of the ranks are looked at twice a second: of most steps nothing is known.
    looked = np.flatnonzero(np.isfinite(log.column("straggler")))
    late = looked.size and len(log.steps) - looked[-1] <= RECENT_STEPS
    words = [f"rank {log.column('straggler')[looked[-1]]:.0f} is slow" if late else ""]
    links = [event for event in log.of_kind(SLOW_LINK_EVENT) if isinstance(event.fields.get("ranks"), list)]
    if links and len(log.steps) and log.steps[-1] - links[-1].step <= RECENT_STEPS:
        named = ", ".join(make_printable(str(rank)) for rank in links[-1].fields["ranks"][:8])
        words.append(f"the link of ranks {named} is slow")
    if faults:
        words.append(f"{len(faults):,} fault{'s' * (len(faults) > 1)}, the last: {faults[-1]}")
    if resumes := len(log.of_kind("resume")):
        words.append(f"resumed {resumes:,} time{'s' * (resumes > 1)}")
    rows.append(Tile("ranks", "Ranks", str(ranks), "", "; ".join(filter(None, words))))
    parts = split_wall_time(summary)
    total = sum(parts.values())
    if total > 0.0:
        rest = ", ".join(
            f"{format_percent(seconds / total)} {name}"
            for name, seconds in parts.items()
            if name != "training" and seconds >= 0.005 * total
        )
        note = f"of {format_duration(total)}" + (f"; {rest}" if rest else "")
        rows.append(Tile("goodput", "Goodput", format_percent(parts["training"] / total), "", note))
    for kind in ("evaluation", "checkpoint"):
        if found := log.of_kind(kind):
            rows.append(Tile(kind, kind.capitalize(), f"step {found[-1].step:,}", "", describe_event(found[-1])))
    return rows


def _draw_loss(run: RunFigures, room: Room, tall: int) -> list[Text]:
    """Return the curve of the loss below its figures; the noisy curve gives way to its average."""
    log, summary, chart = run.log, run.summary, run.loss
    series = [one for one in chart.series if one.look != "faint"]
    title = Text.assemble(("Loss ", "bold"), (format_number(summary.final_loss), "bold cyan"))
    title.append(f" · lowest {format_number(summary.lowest_loss)}")
    if summary.validation_step is not None:
        title.append(" · ")
        title.append(f"held out {format_number(summary.validation_loss)}", "magenta")
    values = np.concatenate([one.values[one.kept] for one in series])
    scale = fit_scale(values, logarithmic=chart.starts_logarithmic)
    # An evaluation may come after the last recorded step.
    ends = float(log.steps[0]), max(float(one.positions.step[-1]) for one in series)
    # A single step needs some width, too.
    across = Scale(*ends) if ends[1] > ends[0] else Scale(ends[0] - 0.5, ends[0] + 0.5)
    raster = Raster(room, tall, scale)
    for one, style in zip(series, ("cyan", "magenta"), strict=False):
        places, values = across.share(one.positions.step[one.kept]), one.values[one.kept]
        if one.look == "dotted":
            # few evaluations: a line between them would hide the curve of training
            raster.add_marks(places, values, style)
            continue
        # a gap between two kept points breaks the line even where the gap itself was not kept
        raster.add_curve(places, values, style, np.cumsum(~np.isfinite(one.values))[one.kept])
    return [title, *raster.finish(f"step {ends[0]:,.0f}", f"{ends[1]:,.0f}")]


# --- a study -----------------------------------------------------------------------------------------------------------


def _draw_study(
    head: Text,
    tiles: Sequence[Tile],
    notes: Sequence[str],
    progress: tuple[str, list[Row], list[float | None]],
    table: list[Text],
    room: Room,
) -> list[Text]:
    """Return the lines of a study. progress: title of the chart, the trials, and the value of each or None."""
    title, trials, values = progress
    body = [*_write_rows(tiles, room), *_write_notes(notes, room)]
    tall, shown = _share_height(room, len(body) + 6, len(table) - 1)
    good = np.array([math.nan if value is None else value for value in values], np.float64)
    chart: list[Text] = []
    if np.isfinite(good).any():
        numbers = np.array([row["number"] for row in trials], np.float64)
        across = Scale(numbers.min() - 0.5, numbers.max() + 0.5)
        raster = Raster(room, tall, fit_scale(good))
        # Failed trials are no part of the best so far.
        raster.add_curve(across.share(numbers), np.fmin.accumulate(good), "dim")
        raster.add_marks(across.share(numbers), good, "cyan")
        chart = [Text(title, "bold"), *raster.finish(f"trial {numbers.min():.0f}", f"{numbers.max():.0f}"), Text()]
    return _fit([head, Text(), *chart, *body, Text(), *table[: shown + 1]], room)


def _name_study_state(summary: Row) -> tuple[str, str, str]:
    running = sum(row["state"] == "running" for row in summary["trials"])
    return (f"{running} running", "cyan", "") if running else ("no trial runs", "green", "")


def _tell_running(summary: Row) -> list[Tile]:
    """Return how far running trials are, as far as somebody has looked."""
    words = [row["progress"] for row in summary["trials"] if row.get("progress")]
    return [Tile("running", "Running", "", "", "; ".join(words))] if words else []


# --- lines -------------------------------------------------------------------------------------------------------------


class Raster:
    """A chart of dots, two across and four down a character, with ticks at its left."""

    def __init__(self, room: Room, tall: int, scale: Scale) -> None:
        """tall: lines for the dots. scale: of the values."""
        self.scale, self.tall, self.plain = scale, tall, room.plain
        self.labels: dict[int, str] = {}
        for tick in choose_value_ticks(scale):
            row = min(tall - 1, max(0, int((1.0 - tick.share) * tall)))
            # labels next to each other cannot be told apart
            if not {row - 1, row, row + 1} & self.labels.keys():
                self.labels[row] = tick.label
        self.left = max(map(len, self.labels.values()), default=0) + 2
        self.wide = max(1, room.width - self.left)
        self.bits = np.zeros((tall, self.wide), np.int64)
        self.styles = np.full((tall, self.wide), "", dtype=object)

    def add_curve(self, shares: FloatArray, values: FloatArray, style: str, gaps: IntArray | None = None) -> None:
        """Add a line through points, broken where a value is not finite.

        shares: places from left (0) to right (1). gaps: how many gaps lie before each point, where not all points are given.
        """
        x, y, known = self._place(shares, values)
        for i in np.flatnonzero(known):
            # A line from the point before, or a dot where that is not known.
            joined = i and known[i - 1] and (gaps is None or gaps[i] == gaps[i - 1])
            j = i - 1 if joined else i
            dots = int(max(abs(x[i] - x[j]), abs(y[i] - y[j]))) + 1
            across, down = (np.linspace(v[j], v[i], dots).round().astype(np.int64) for v in (x, y))
            self._set(across, down, style)

    def add_marks(self, shares: FloatArray, values: FloatArray, style: str) -> None:
        """Add a mark of four dots for each point of which the value is finite. shares: as for a curve."""
        x, y, known = self._place(shares, values)
        for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
            across = np.minimum(x[known].astype(np.int64) + dx, 2 * self.wide - 1)
            down = np.minimum(y[known].astype(np.int64) + dy, 4 * self.tall - 1)
            self._set(across, down, style)

    def _place(self, shares: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Return dots from the left and from the top, and which of the points have a place."""
        x = np.round(shares * (2 * self.wide - 1))
        y = np.round((1.0 - np.clip(self.scale.share(values), 0.0, 1.0)) * (4 * self.tall - 1))
        return x, y, np.isfinite(x) & np.isfinite(y)

    def _set(self, across: IntArray, down: IntArray, style: str) -> None:
        np.bitwise_or.at(self.bits, (down // 4, across // 2), _BRAILLE[down % 4, across % 2])
        self.styles[down // 4, across // 2] = style

    def finish(self, first: str, last: str) -> list[Text]:
        """Return the lines, and one below with the names of both ends."""
        lines = []
        axis, corner, base = ("|", "+", "-") if self.plain else ("┤", "└", "─")
        for row in range(self.tall):
            line = Text().append(f"{self.labels.get(row, ''):>{self.left - 2}} {axis}", "dim")
            cells = zip(self.bits[row].tolist(), self.styles[row].tolist(), strict=True)
            # a run of one style at a time: a frame goes over a network
            for style, group in groupby(cells, key=lambda cell: str(cell[1])):
                dots = (" " if not bits else "*" if self.plain else chr(0x2800 + bits) for bits, _ in group)
                line.append("".join(dots), style)
            lines.append(line)
        between = base * max(1, self.wide - len(first) - len(last) - 2)
        lines.append(Text(f"{'':{self.left - 1}}{corner}{first} {between} {last}"[: self.left + self.wide], "dim"))
        return lines


def _write_head(name: str, state: str, style: str, rest: str) -> Text:
    head = Text.assemble((_clean(name), "bold"), "  ", (_clean(state), f"bold {style}"))
    return head.append(f"  {_clean(rest)}" if rest else "")


def _write_rows(rows: Sequence[Tile], room: Room) -> list[Text]:
    """Return a line for each figure, with what stands behind it broken into a second one."""
    left = min(max((len(_clean(tile.label)) for tile in rows), default=0) + 2, max(8, room.width // 3))
    lines = []
    for tile in rows:
        value, note = _clean(f"{tile.value} {tile.unit}".strip()), _clean(tile.note)
        pieces = _break(f"{value}  {note}".strip(), room.width - left, most=room.most_pieces)
        for place, piece in enumerate(pieces):
            label = _clean(tile.label)[: left - 1] if place == 0 else ""
            line = Text().append(f"{label:{left}}", "dim").append(piece)
            if place == 0:
                line.stylize("bold", left, left + len(value))
            lines.append(line)
    return lines


def _write_notes(notes: Sequence[str], room: Room) -> list[Text]:
    return [line for note in notes for line in _wrap(note, room, "yellow", most=room.most_pieces)]


def _write_table(columns: Sequence[Column[RowT]], rows: Sequence[RowT], room: Room) -> list[Text]:
    """Return a table whose lines end at the width, its heads first; nothing where there are no rows."""
    if not rows:
        return []
    # what is known of no row takes no place
    told = [one for one in map(_clean_column, columns) if any(one.cell(row) for row in rows)]
    lines = write_text_table(told, rows, width=room.width, cut=True)
    return [Text(line, "bold" if place == 0 else "") for place, line in enumerate(lines)]


def _clean_column(column: Column[RowT]) -> Column[RowT]:
    return replace(column, cell=lambda row: _clean(str(column.cell(row))))


def _wrap(words: str, room: Room, style: str = "", most: int = 4) -> list[Text]:
    return [Text(piece, style) for piece in _break(_clean(words), room.width, most)]


def _break(words: str, width: int, most: int) -> list[str]:
    """Return at most `most` lines of text, the last one cut where there is more."""
    return textwrap.wrap(words, max(_LEAST_WIDTH, width), max_lines=most, placeholder=" …") or [""]


def _clean(text: str) -> str:
    """Return text that others chose as one line in which nothing acts on a terminal."""
    return make_printable(" ".join(text.split()))


def _share_height(room: Room, taken: int, rows: int) -> tuple[int, int]:
    """Return lines for the chart and for the rows of the table, beside `taken` ones."""
    if room.height is None:
        return _UNBOUNDED_CHART, min(rows, _UNBOUNDED_ROWS)
    free = room.height - taken
    # half and half, but that rows which there are not leave their lines to the chart
    tall = min(_LARGEST_CHART, max(_LEAST_CHART, free - min(rows, free - free // 2)))
    return tall, max(0, min(rows, free - tall))


def _fit(lines: list[Text], room: Room) -> list[Text]:
    """Cut lines to the room."""
    for line in lines:
        if room.plain:
            line.plain = line.plain.translate(_PLAIN).encode("ascii", "replace").decode()
        line.no_wrap = True
        line.truncate(room.width, overflow="crop" if room.plain else "ellipsis")
    return lines if room.height is None else lines[: room.height]
