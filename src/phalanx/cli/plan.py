"""`phalanx plan`: which layouts are worth running on a cluster, how fast they are, whether they fit, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.arguments import Json, complete_override
from phalanx.cli.console import output, print_json
from phalanx.cli.plan_check import check_facts, print_check
from phalanx.cli.plan_words import plan_lines
from phalanx.cluster.machine import described_names, load_machine, machine_names
from phalanx.config.families import require_language
from phalanx.config.load import load_run
from phalanx.config.override import parse_overrides
from phalanx.config.schema import LanguageRun, Layout
from phalanx.cost.enumerate import CHOSEN
from phalanx.cost.profile import load_profile, profile_beside, profile_for
from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import write_atomically
from phalanx.plan.budget import CHECKPOINT_GB_S, MTBF_HOURS, RESTART_MINUTES, Reliability
from phalanx.plan.cost_models import CostModels
from phalanx.plan.facts import plan_facts
from phalanx.plan.judge import Planner, Task
from phalanx.plan.plan import Plan, Wishes, fit_plan, make_plan
from phalanx.plan.scaling import parse_scale
from phalanx.plan.write import planned_text
from phalanx.report.plan_page import render_plan

_UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def plan(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"{', '.join(described_names())}, or the path of a description of your own.",
            autocompletion=lambda: list(described_names()),
        ),
    ] = None,
    devices: Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices to plan for.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields of the layout to keep, e.g. tp=8 recompute=full; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Plan on the smallest number of devices that fits.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Keep what the run file says of the layout, too.")] = False,
    why: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Say what another choice would cost, e.g. tp=8; may be repeated."),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="LOW..HIGH", help="Strong and weak scaling over numbers of devices.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens to train on, e.g. 300B; by default those of training.steps.")
    ] = None,
    best: Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to list.")] = 10,
    p_fits: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least probability of fitting into memory.")] = 0.9,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="How fast the device is, from phalanx calibrate; by default CLUSTER.profile.yaml, if there is one.",
        ),
    ] = None,
    mtbf_hours: Annotated[float, typer.Option(min=1.0, help="Mean hours between failures of a node.")] = MTBF_HOURS,
    restart_minutes: Annotated[float, typer.Option(min=0.0, help="From a failure to the next step.")] = RESTART_MINUTES,
    checkpoint_gb_s: Annotated[
        float, typer.Option(min=1e-3, help="GB/s at which a node writes checkpoints.")
    ] = CHECKPOINT_GB_S,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as one HTML page.")] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="RUNS.csv", help="Compare predictions with measured runs instead.")
    ] = None,
    json: Json = False,
) -> None:
    """Say which layouts are worth running, from the costs of the real model, in seconds and without any device.

    Every legal layout is judged; those that fit are ranked by the time of a step. Fields of the layout given here stay as
    given, all others are chosen.
    """
    if check is not None:
        print_json(check_facts(check)) if json else print_check(check)
        return
    if run is None or cluster is None:
        raise ConfigError("give a run file and --cluster NAME|FILE, or --check RUNS.csv alone")
    if (devices is None) is not fit:
        raise ConfigError("give --devices N, or --fit for the smallest number that fits (one of the two)")
    machine = load_machine(cluster)
    words = [_as_override(word) for word in overrides or []]
    loaded = require_language(load_run(run, words), "phalanx plan")
    found = profile or profile_beside(machine, cluster)
    named = profile_for(machine) if found is None else load_profile(_path(found))
    planner = Planner(machine, CostModels(machine, named), p_fits)
    wishes = Wishes(
        best=best,
        why=tuple(why or ()),
        scale=() if scale is None else tuple(parse_scale(scale)),
        tokens=None if tokens is None else _tokens(tokens),
        reliability=Reliability(mtbf_hours, restart_minutes, checkpoint_gb_s),
    )
    task = Task(loaded, devices or machine.node.devices, _fixed(loaded, words, everything=fix))
    made = fit_plan(planner, task, wishes) if fit else make_plan(planner, task, wishes)
    written: dict[str, str] = {}
    for kind, file, text in (("run", write, _run_file), ("html", html, render_plan)):
        if file is not None:
            _write(file, text(made))
            written[kind] = str(file)
    if json:
        print_json(plan_facts(made) | {"written": written})
    else:
        _print(made, written, cluster)


def _write(file: Path, text: str) -> None:
    """Raises PhalanxError where the file cannot be written."""
    try:
        write_atomically(file, text)
    except OSError as error:
        raise PhalanxError(f"cannot write {file}: {error.strerror}; name another file") from error


def _print(made: Plan, written: dict[str, str], cluster: str) -> None:
    console = output()
    for line in plan_lines(made, console.width):
        console.print(line, soft_wrap=True)
    if file := written.get("run"):
        nodes = made.task.devices // made.planner.machine.node.devices
        launch = f", phalanx launch {file} --cluster {cluster} --nodes {nodes}" if cluster in machine_names() else ""
        console.print(f"wrote {file}   next: phalanx verify {file}{launch}", soft_wrap=True)
    if file := written.get("html"):
        console.print(f"wrote {file}", soft_wrap=True)


def _path(found: str | Path) -> str:
    """A profile's name as it is, or its path so that it cannot be taken for a name."""
    return found if isinstance(found, str) else str(found.absolute())


def _as_override(word: str) -> str:
    """`tp=2` stands for `layout.tp=2`."""
    name, equals, _ = word.partition("=")
    return f"layout.{word}" if equals and name in Layout.model_fields else word


def _fixed(run: LanguageRun, words: list[str], *, everything: bool) -> dict[str, Any]:
    """The fields of the layout that are not to be chosen: those of the command line, or of the run file as well."""
    stated = {str(change.path[-1]) for change in parse_overrides(words) if change.path[0] == "layout"}
    if everything:
        stated |= run.layout.model_fields_set
    values = {name: getattr(run.layout, name) for name in CHOSEN if name in stated}
    return {name: value for name, value in values.items() if value != "auto"}


def _tokens(words: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)([MBT]?)", words)
    count = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= count < 1e18:
        raise ConfigError(f"--tokens {words}: write a number of tokens, such as 300B, 1.4T or 3e11")
    return round(count)


def _run_file(made: Plan) -> str:
    seconds, task = float(made.best.times.total[0]), made.task
    note = f"Planned for {task.devices} devices of {made.planner.machine.name}: {seconds:.3g} s a step expected.\n"
    return planned_text(task.run, made.best.candidates, note)
