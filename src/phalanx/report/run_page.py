"""The HTML report of a run: one file that loads nothing and needs no library.

Words and markup are in `page.html`, looks in `page.css`, the read-out under the pointer in `page.js`. The axis choices
work without a script; a content security policy lets no other script than ours run, whatever the run's text holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
from markupsafe import Markup

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import require_replaceable, write_atomically
from phalanx.report import page_parts
from phalanx.report.chart import PLOT_HEIGHT, PLOT_WIDTH, Chart, draw
from phalanx.report.run_charts import FORMATS, Readout, readout, run_charts
from phalanx.report.run_log import RunLog
from phalanx.report.summary import Summary, summarise
from phalanx.report.template import asset, render
from phalanx.report.text import count, duration, number


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run, finished or not, as one HTML file.

    Args:
        run_dir: the directory `phalanx train` wrote; only its `metrics.jsonl` must be there.
        out: the file to write, by default `report.html` in `run_dir`; missing folders are made.

    Returns:
        The path of the page.

    Raises:
        ConfigError: `run_dir` is not a directory, or `out` is one.
        RunLogError: the run's log is missing, empty or altered.
        PhalanxError: the page cannot be written.
    """
    return write_page(RunLog.read(run_dir), out)


def write_page(log: RunLog, out: Path | None = None) -> Path:
    """`write_report` for a log that has been read."""
    page = log.run_dir / "report.html" if out is None else out
    if page.is_dir():
        raise ConfigError(f"{page} is a directory: name the file to write, for example {page / 'report.html'}")
    require_replaceable(page)
    try:
        write_atomically(page, render_page(log, summarise(log)))
    except OSError as error:
        raise PhalanxError(f"cannot write {page}: {error.strerror}; name another file with --out") from error
    return page


def render_page(log: RunLog, summary: Summary) -> str:
    """The page as text."""
    run = run_charts(log)
    script = asset("page.js")
    state, label = page_parts.status(log, summary)
    figures = readout(run)
    return render(
        "page.html",
        ("page.css",),
        name=log.run_dir.resolve().name,
        headline=_headline(summary),
        state={"name": state, "label": label},
        facts=page_parts.facts(log, summary),
        tiles=page_parts.tiles(summary),
        notes=page_parts.notes(log, summary),
        charts=[(chart, draw(chart, run.domains, run.marks)) for chart in run.charts],
        describe=_describe,
        marks={name: len(log.of_kind(kind)) for name, kind in (("resumes", "resume"), ("checkpoints", "checkpoint"))},
        last=figures.last,
        median_step=duration(summary.median_step_seconds),
        time_split=page_parts.time_split(log, summary),
        samples=page_parts.samples(log),
        events=page_parts.event_table(log),
        machine=page_parts.machine_table(log),
        config=page_parts.config_text(log),
        summary=summary,
        event_count=len(log.events),
        plot_width=PLOT_WIDTH,
        plot_height=PLOT_HEIGHT,
        readout=script_json(_readout_value(figures)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _headline(summary: Summary) -> str:
    parts = [f"loss {number(summary.final_loss)}"]
    if summary.validation_step is not None:
        parts.append(f"validation {number(summary.validation_loss)}")
    return ", ".join([*parts, f"{count(summary.tokens)} {summary.unit}"])


def _describe(chart: Chart) -> str:
    """A chart in words, for those who do not see it."""
    show = FORMATS[chart.key]
    sentences = []
    for series in (one for one in chart.series if one.label):
        finite = np.flatnonzero(np.isfinite(series.values))
        if not finite.size:
            sentences.append(f"{series.label}: no finite value.")
            continue
        values, steps = series.values[finite], series.positions.step[finite]
        ends = " ".join(
            f"{word} {show(float(values[i]))} at step {steps[i]:,.0f}{stop}"
            for word, i, stop in (
                ("from", 0, ""),
                ("to", -1, ";"),
                ("lowest", values.argmin(), ","),
                ("highest", values.argmax(), "."),
            )
        )
        sentences.append(f"{series.label} {ends}")
    return " ".join(sentences)


def _readout_value(figures: Readout) -> dict[str, object]:
    columns = {name: "|".join(texts) for name, texts in figures.columns.items()}
    return {"domains": figures.domains, "positions": figures.positions, "columns": columns}


def script_json(value: object) -> Markup:
    """JSON that is safe inside a script element: no character in it can end the element or open a comment.

    Raises ValueError for numbers that JSON cannot hold.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
