"""`phalanx search`: the best layout by measurement, and what matters most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.cli.console import open_output, print_json, print_lines, print_warning, write_asked
from phalanx.cli.options.planning import SearchArguments
from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.families.language.config import require_language
from phalanx.formatting import format_duration, format_gibibytes, format_percent
from phalanx.hardware.device import choose_device, device_name
from phalanx.hardware.device_facts import device_kind
from phalanx.hardware.machine import load_machine
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.ranking import Planner, Task, fixed_fields
from phalanx.planner.time.profile import choose_profile
from phalanx.planner.trace.traced_model import bind_planned
from phalanx.printable import wrap_line, write_stderr
from phalanx.report.study_page import (
    MOST_PARAMETERS,
    list_importance,
    list_search_notes,
    name_search,
    render_search,
)
from phalanx.report.table import Column, write_text_table
from phalanx.study.layouts.layout_space import LayoutSpace
from phalanx.study.trial import FAILURES, Trial

Row = dict[str, Any]
MOST_TRIALS = 15
"""Trials that are listed."""


def run_search(asked: SearchArguments) -> None:
    """Run the subcommand."""
    loaded = require_language(load_run(asked.run, asked.overrides or []), "phalanx search")
    machine = load_machine(asked.cluster)
    named = choose_profile(machine, asked.cluster, asked.profile)
    planner = Planner(machine, CostModels(machine, named), least_p=loaded.search.least_p_fits)
    # Optuna and scikit-learn are an extra
    try:
        from phalanx.study.layouts.layout_search import LAYOUT_SAMPLERS, search_layouts  # noqa: PLC0415
        from phalanx.study.samplers import check_sampler  # noqa: PLC0415
    except ImportError as error:
        raise PhalanxError(f'phalanx search needs {error.name}: pip install "phalanx-train[search]"') from None
    check_sampler(asked.engine, LAYOUT_SAMPLERS)
    if asked.where == "local":
        measured = device_kind(device_name(choose_device(loaded.cluster.device)))
        if measured != machine.node.device:
            print_warning(
                f"--cluster {asked.cluster} has {machine.node.device}, but trials with --where local run on this machine, "
                f"which has {measured}: they measure {measured}, and only the planner's order of layouts is that of "
                f"{asked.cluster}"
            )
    done = search_layouts(
        planner,
        Task(bind_planned(loaded), asked.devices, fixed_fields(loaded, asked.overrides or [])),
        loaded.search,
        asked.where,
        asked.storage or Path(f"{asked.run.resolve().name.removesuffix('.yaml')}.search.log"),
        tell=tell_trial,
        sampler_name=asked.engine,
        most=asked.measure,
        seed=asked.seed,
        keep=asked.keep,
    )
    summary = done.summary()
    written = write_asked(run=(asked.write, done.best_run_text), html=(asked.html, lambda: render_search(summary)))
    if asked.json:
        print_json(summary | {"written": written})
        return
    print_lines([*write_search_lines(summary, open_output().width), *(f"wrote {name}" for name in written.values())])


def tell_trial(trial: Trial, space: LayoutSpace) -> None:
    """Write a line to stderr when a trial begins, another when it has ended."""
    point = space.find(trial.values)
    # a point of an earlier study may lie outside the space of this one
    words = trial.key if point is None else space.describe(point)
    if trial.outcome is None:
        expected = trial.note.get("expected_s")
        text = words + ("" if expected is None else f", expected {format_duration(expected)} a step")
    elif trial.outcome.value is not None:
        text = f"{format_duration(trial.outcome.value)} a step"
    else:
        text = trial.outcome.describe_failure()
    write_stderr(f"trial {trial.number}: {text}")


def write_search_lines(summary: Row, width: int) -> list[str]:
    """Return what came out as text; lines are wrapped to `width` columns."""
    trials, best = summary["trials"], summary["best"]
    failed = ", ".join(f"{count} {FAILURES.get(cause, cause)}" for cause, count in summary["failures"].items())
    lines = [
        f"{name_search(summary)}: {len(trials)} trials of {summary['points']:,} points; {summary['stopped']}"
        + (f"; {failed}" if failed else "")
    ]
    if best is None:
        lines.append("no trial was good; the logs of trials are beside the study's file")
    else:
        lines.append(f"best: trial {best['number']}, {format_duration(best['step_s'])} a step: {best['words']}")
        if best["planned_s"]:
            lines.append(f"      the planner had expected {format_duration(best['planned_s'])}")
    lines += [f"note: {note}" for note in list_search_notes(summary)]
    # the fastest first, then those without a time as they came
    ranked = sorted(trials, key=lambda row: (row["step_s"] is None, row["step_s"] or row["number"]))
    if ranked:
        lines += write_text_table(TRIAL_COLUMNS, ranked[:MOST_TRIALS], indent="  ", heads=False)
    if planned := summary["planned"]:
        effects = list(planned["shapley_effects"].items())[:MOST_PARAMETERS]
        words = ", ".join(f"{name} {format_percent(max(share, 0.0))}" for name, share in effects)
        lines.append(f"matters over {planned['points']:,} layouts that fit (exact Shapley effects): {words}")
    if measured := summary["measured"]:
        lines.append(f"matters by {measured['trials']} measured trials: {list_importance(measured)}")
        lines.append(f"      {measured['caution']}")
    lines.append(f"study: {summary['storage']}")
    return [piece for line in lines for piece in wrap_line(line, width)]


TRIAL_COLUMNS: tuple[Column[Row], ...] = (
    Column("trial", lambda row: row["number"]),
    Column(
        "step",
        lambda row: (
            FAILURES.get(row["state"], row["state"]) if row["step_s"] is None else format_duration(row["step_s"])
        ),
    ),
    Column(
        "memory",
        lambda row: "" if row["memory_bytes"] is None else f"{format_gibibytes(row['memory_bytes'])} GiB",
    ),
    Column("choice", lambda row: row["words"], "left"),
)
