"""The HTML report of a run: one file that loads nothing and needs no library.

The markup is in `templates/run.html`, the read-out under the pointer in `run.js`. The axis choices work without a script; a
content security policy lets no other script than ours run, whatever the run's text holds.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import numpy as np
from markupsafe import Markup

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import require_replaceable, write_atomically
from phalanx.report import run_sections
from phalanx.report.formatting import format_count, format_duration, format_number
from phalanx.report.interactive_chart import PLOT_HEIGHT, PLOT_WIDTH, Chart, draw_chart
from phalanx.report.page import read_template, render_page, write_script_json
from phalanx.report.run_charts import chart_run, format_value, read_out
from phalanx.report.run_log import RunLog
from phalanx.report.run_summary import summarise_run


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
    """Write the report of a log that has been read, as `write_report` does."""
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


def render_run(log: RunLog) -> str:
    """Return the page as text."""
    run, summary = chart_run(log), summarise_run(log)
    script, figures = read_template("run.js"), read_out(run)
    headline = [f"loss {format_number(summary.final_loss)}"]
    if summary.validation_step is not None:
        headline.append(f"validation {format_number(summary.validation_loss)}")
    headline.append(f"{format_count(summary.tokens)} {summary.unit}")
    state, label = run_sections.describe_status(log, summary)
    # one text a column is half the size of a list of texts
    columns = {name: "|".join(texts) for name, texts in figures.columns.items()}
    return render_page(
        "run.html",
        name=log.run_dir.resolve().name,
        headline=", ".join(headline),
        state={"name": state, "label": label},
        facts=run_sections.list_facts(log, summary),
        tiles=run_sections.make_headline(summary),
        notes=run_sections.list_notes(log, summary),
        charts=[(chart, draw_chart(chart, run.domains, run.marks)) for chart in run.charts],
        describe=_describe_chart,
        marks={name: len(log.of_kind(kind)) for name, kind in (("resumes", "resume"), ("checkpoints", "checkpoint"))},
        last=figures.last,
        median_step=format_duration(summary.median_step_seconds),
        time_split=run_sections.split_time(log, summary),
        samples=run_sections.pick_samples(log),
        events=run_sections.pick_events(log),
        event_columns=run_sections.EVENT_COLUMNS,
        event_style=run_sections.style_event,
        machine=run_sections.list_machine(log),
        config=run_sections.clip_config(log),
        summary=summary,
        event_count=len(log.events),
        plot_width=PLOT_WIDTH,
        plot_height=PLOT_HEIGHT,
        readout=write_script_json({"domains": figures.domains, "positions": figures.positions, "columns": columns}),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
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
