"""`phalanx plan`: which layouts are worth running on a cluster, how fast they are, whether they fit, and why."""

from __future__ import annotations

import atexit
import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path

from phalanx.cli.arguments import Json
from phalanx.cli.console import output, print_json, write_file
from phalanx.cli.plan_check import check_facts, print_check
from phalanx.cli.plan_options import (
    Best,
    Check,
    CheckpointGbS,
    Cluster,
    Devices,
    Fit,
    Fix,
    Html,
    MtbfHours,
    Overrides,
    PFits,
    ProfileName,
    RestartMinutes,
    RunFile,
    Scale,
    Tokens,
    Whys,
    Write,
)
from phalanx.cli.plan_words import plan_lines
from phalanx.cluster.machine import load_machine, machine_names
from phalanx.config.load import load_run
from phalanx.cost.family import require_planned
from phalanx.cost.profile import choose_profile
from phalanx.errors import ConfigError
from phalanx.plan.budget import CHECKPOINT_GB_S, MTBF_HOURS, RESTART_MINUTES, Reliability
from phalanx.plan.cost_models import CostModels
from phalanx.plan.facts import plan_facts
from phalanx.plan.judge import Planner, Task, fixed_fields
from phalanx.plan.plan import Plan, Wishes, fit_plan, make_plan
from phalanx.plan.scaling import parse_scale
from phalanx.plan.write import planned_text

_UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def plan(
    run: RunFile = None,
    cluster: Cluster = None,
    devices: Devices = None,
    overrides: Overrides = None,
    fit: Fit = False,
    fix: Fix = False,
    why: Whys = None,
    scale: Scale = None,
    tokens: Tokens = None,
    best: Best = 10,
    p_fits: PFits = 0.9,
    profile: ProfileName = None,
    mtbf_hours: MtbfHours = MTBF_HOURS,
    restart_minutes: RestartMinutes = RESTART_MINUTES,
    checkpoint_gb_s: CheckpointGbS = CHECKPOINT_GB_S,
    write: Write = None,
    html: Html = None,
    check: Check = None,
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
    words = overrides or []
    loaded = load_run(run, words)
    require_planned(loaded.model)
    planner = _planner(cluster, profile, p_fits)
    wishes = Wishes(
        best=best,
        why=tuple(why or ()),
        scale=() if scale is None else tuple(parse_scale(scale)),
        amount=None if tokens is None else _tokens(tokens),
        reliability=Reliability(mtbf_hours, restart_minutes, checkpoint_gb_s),
    )
    task = Task(loaded, devices or planner.machine.node.devices, fixed_fields(loaded, words, everything=fix))
    with _libraries_at_rest():
        made = fit_plan(planner, task, wishes) if fit else make_plan(planner, task, wishes)
    written = _write_all(made, write, html)
    if json:
        print_json(plan_facts(made) | {"written": written})
    else:
        _print(made, written, cluster)


@contextlib.contextmanager
def _libraries_at_rest() -> Iterator[None]:
    """Let the garbage collector leave alone what is there already: else tracing makes it look through all of PyTorch again
    and again. Likewise when this process ends, which takes more than a second otherwise."""
    atexit.register(gc.freeze)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _planner(cluster: str, profile: str | None, p_fits: float) -> Planner:
    """The planner of a cluster: by the profile that is named, else the one beside it, else the best known."""
    machine = load_machine(cluster)
    return Planner(machine, CostModels(machine, choose_profile(machine, cluster, profile)), p_fits)


def _write_all(made: Plan, run: Path | None, html: Path | None) -> dict[str, str]:
    """Write what was asked for; what it is, and the path of each."""
    written: dict[str, str] = {}
    for kind, file, text in (("run", run, _run_file), ("html", html, _page)):
        if file is not None:
            write_file(file, text(made))
            written[kind] = str(file)
    return written


def _print(made: Plan, written: dict[str, str], cluster: str) -> None:
    console = output()
    for line in plan_lines(made, console.width):
        console.print(line, soft_wrap=True)
    if file := written.get("run"):
        nodes, rest = divmod(made.task.devices, made.planner.machine.node.devices)
        known = cluster in machine_names() and not rest
        launch = f", phalanx launch {file} --cluster {cluster} --nodes {nodes}" if known else ""
        console.print(f"wrote {file}   next: phalanx verify {file}{launch}", soft_wrap=True)
    if file := written.get("html"):
        console.print(f"wrote {file}", soft_wrap=True)


def _tokens(words: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)([MBT]?)", words)
    count = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= count < 1e18:
        raise ConfigError(f"--tokens {words}: write a number, such as 300B, 1.4T or 3e11")
    return round(count)


def _page(made: Plan) -> str:
    from phalanx.report.plan_page import render_plan  # noqa: PLC0415  (templates are loaded for pages alone)

    return render_plan(made)


def _run_file(made: Plan) -> str:
    seconds, task = float(made.best.times.total[0]), made.task
    note = f"Planned for {task.devices} devices of {made.planner.machine.name}: {seconds:.3g} s a step expected.\n"
    return planned_text(task.run, made.best.candidates, note)
