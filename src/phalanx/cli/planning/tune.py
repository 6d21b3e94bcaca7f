"""`phalanx tune`: the best hyperparameters by training, of any family of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.cli.console import open_output, print_json, print_lines, write_asked
from phalanx.cli.options.planning import TuneArguments
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.formatting import format_duration, format_number, format_percent
from phalanx.hardware.machine import load_machine
from phalanx.launch.job_script import Job, parse_walltime
from phalanx.printable import wrap_line, write_stderr
from phalanx.report.study_page import list_importance, render_tune
from phalanx.report.table import Column, cut_line, write_text_table
from phalanx.study.trial import FAILURES, Trial

Row = dict[str, Any]
MOST_TRIALS = 12
"""Trials that are listed."""
MOST_DEVICES = 16
"""Devices that are listed."""
NARROWEST = 80
"""Columns that a line may have on any terminal."""


def run_tune(asked: TuneArguments) -> None:
    """Run the subcommand."""
    if asked.show is not None and (asked.run is not None or asked.out is not None):
        raise ConfigError("--show DIR reports on a study that there is; leave RUN and --out away")
    # A study is shown as it stands, while others may be working on it
    folder = asked.out if asked.show is None else asked.show
    if folder is None or (asked.show is None and asked.run is None):
        raise ConfigError("give RUN --out DIR to tune a run file, or --show DIR to report on a study")
    # Optuna and scikit-learn are an extra
    try:
        from phalanx.study.hyperparameters.study_summary import summarise_study  # noqa: PLC0415
        from phalanx.study.hyperparameters.tuner import best_run_text, run_tuning  # noqa: PLC0415
    except ImportError as error:
        raise PhalanxError(f'phalanx tune needs {error.name}: pip install "phalanx-train[search]"') from None
    stopped = ""
    if asked.run is not None:
        # options of the command are shorthand for fields of the tune section
        changes = {"tune.trials": asked.trials, "tune.engine": asked.engine, "tune.slots": asked.slots}
        changes["tune.nproc"] = asked.nproc
        words = [f"{name}={value}" for name, value in changes.items() if value is not None]
        loaded = load_run(asked.run, [*(asked.overrides or []), *words])
        machine = None if asked.cluster is None else load_machine(asked.cluster)
        stopped = run_tuning(
            loaded,
            folder,
            where=asked.where,
            devices=asked.devices,
            machine=machine,
            job=_describe_job(asked, asked.run, folder),
            packing=asked.packing,
            tell=tell_trial,
        )
    summary = summarise_study(folder) | {"why": stopped}
    written = write_asked(
        run=(asked.write, lambda: best_run_text(folder, summary)), html=(asked.html, lambda: render_tune(summary))
    )
    if asked.json:
        print_json(summary | {"written": written})
        return
    print_lines([*write_tune_lines(summary, open_output().width), *(f"wrote {name}" for name in written.values())])


def _describe_job(asked: TuneArguments, run: Path, folder: Path) -> Job | None:
    """Return account, time and folder of trials that are jobs; None where they are not. Raises ConfigError."""
    given = {"time": asked.time, "account": asked.account, "partition": asked.partition, "setup": asked.setup}
    if asked.where != "sbatch":
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"--{name} is of jobs that are submitted; give --where sbatch, or leave it out")
        return None
    return Job(
        run=run,
        nodes=1,
        directory=Path.cwd(),
        run_dir=folder,
        seconds=None if asked.time is None else parse_walltime(asked.time),
        account=asked.account,
        partition=asked.partition,
        setup=tuple(asked.setup or ()),
    )


def tell_trial(part: Trial, configuration: int) -> None:
    """Write a line to stderr when a trial begins or resumes, another when it has reached a rung or failed."""
    steps = part.note.get("steps", 0)
    if part.outcome is None:
        expected = part.note.get("expected_s")
        text = f"to step {steps}: {_write_values(part.values) or 'the run file as it stands'}"
        text += "" if expected is None else f", expected {format_duration(expected)}"
    elif part.outcome.value is not None:
        text = f"step {steps}: {format_number(part.outcome.value)} in {format_duration(part.outcome.seconds)}"
    else:
        text = f"step {steps}: {part.outcome.describe_failure()}"
    write_stderr(f"trial {configuration} {text}")


def write_tune_lines(summary: Row, width: int) -> list[str]:
    """Return what came out as text; a line is at most `width` columns where that is 80 or more."""
    best, default, found = summary["best"], summary["default"], summary["importance"]
    failed = ", ".join(f"{count} {FAILURES.get(cause, cause)}" for cause, count in summary["failures"].items())
    lines = [
        f"{summary['model']}: {len(summary['trials'])} trials, least {summary['metric']} is best"
        + (f"; {summary['why']}" if summary.get("why") else "")
        + (f"; {failed}" if failed else "")
    ]
    if best is None:
        lines.append(f"no trial has a score; logs are in {summary['study']}/jobs")
    else:
        steps = f"{best['steps']} of {summary['rungs'][-1]} steps"
        lines.append(f"best: trial {best['number']}, {format_number(best['score'])} after {steps}, {best['run_dir']}")
        lines += [f"      {name} = {_write_value(value)}" for name, value in best["values"].items()]
        if summary["unfinished"]:
            lines.append(f"note: {summary['unfinished']}")
        if default is not None:
            score = format_number(default["score"])
            lines.append(f"the run file as it stands: {score} after {default['steps']} steps")
    by_number = {row["number"]: row for row in summary["trials"]}
    ranked = [by_number[number] for number in summary["order"][:MOST_TRIALS]]
    if ranked:
        lines += write_text_table(TRIAL_COLUMNS, ranked, indent="  ", heads=False)
    rungs = (f"{row['reached']} reached step {row['steps']}, {row['stopped']} stay there" for row in summary["stopped"])
    lines.append("early stopping: " + "; ".join(rungs))
    if found is not None:
        lines.append(f"matters by {found['trials']} trials, for the {found['of']}: {list_importance(found)}")
        lines.append(f"      {found['caution']}")
    devices, without = summary["devices"], summary["without_packing"]
    lines.append(
        f"devices were idle {format_percent(devices['idle'])} of the time (nothing in a training loop), over "
        f"{format_duration(devices['seconds'])} in {devices['sessions']} sessions"
    )
    if without is not None and any(devices["packing"]):
        lines.append(
            f"  one trial a device, first come first served: {format_percent(without['idle'])} of "
            f"{format_duration(without['seconds'])} (simulated from the times of these trials)"
        )
    each = devices["each"]
    lines += [f"  {row['device']:>20} |{row['bar']}| idle {format_percent(row['idle'])}" for row in each[:MOST_DEVICES]]
    if len(each) > MOST_DEVICES:
        lines.append(f"  and {len(each) - MOST_DEVICES} more devices")
    lines.append(f"study: {summary['study']}")
    # prose goes on in the next line; rows of a table are cut
    return [
        piece
        for line in lines
        for piece in (wrap_line(line, width) if line.startswith("note: ") else [cut_line(line, max(width, NARROWEST))])
    ]


TRIAL_COLUMNS: tuple[Column[Row], ...] = (
    Column("trial", lambda row: row["number"]),
    Column("score", lambda row: format_number(row["score"])),
    Column("reached", lambda row: f"step {row['steps']}", "left"),
    Column("choice", lambda row: _write_values(row["values"]), "left"),
)


def _write_values(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name.partition('.')[2]}={_write_value(value)}" for name, value in values.items())


def _write_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
