"""`phalanx plan`: which layouts are worth running on a cluster, how fast they are, whether they fit, and why."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from phalanx.cli.console import output, print_json, write_file
from phalanx.cli.plan_check import check_facts, check_table, print_check
from phalanx.cli.plan_words import command_lines, plan_lines
from phalanx.config.load import load_run
from phalanx.config.override import parse_overrides
from phalanx.errors import ConfigError
from phalanx.hardware.machine import load_machine, machine_names
from phalanx.planner.explain.reliability import Reliability
from phalanx.planner.explain.scaling import parse_scale
from phalanx.planner.layouts.enumerate import CHOSEN
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.plan import Plan, Wishes, make_plan, make_smallest_plan
from phalanx.planner.rank.ranking import Planner, Task, fixed_fields
from phalanx.planner.rank.summary import summarize_plan
from phalanx.planner.rank.write import write_overrides, write_planned_run
from phalanx.planner.time.profile import choose_profile
from phalanx.planner.trace.family import require_planned
from phalanx.report.formatting import format_duration

_UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def plan(
    *,
    run: Path | None,
    cluster: str | None,
    devices: int | None,
    overrides: list[str] | None,
    fit: bool,
    fix: bool,
    why: list[str] | None,
    scale: str | None,
    tokens: str | None,
    best: int,
    p_fits: float,
    profile: str | None,
    mtbf_hours: float,
    restart_minutes: float,
    checkpoint_gb_s: float,
    write: Path | None,
    html: Path | None,
    check: Path | None,
    json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.plan` declares its arguments."""
    if check is not None:
        checked = check_table(check)
        print_json(check_facts(*checked)) if json else print_check(*checked)
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
    made = make_smallest_plan(planner, task, wishes) if fit else make_plan(planner, task, wishes)
    changes = [word for word in words if parse_overrides([word])[0].path[1:] not in {(name,) for name in CHOSEN}]
    command = run_command(made, write or run, [] if write else changes, cluster, fixed=write is not None)
    written = _write_all(made, write, html, command)
    if json:
        print_json(summarize_plan(made) | {"written": written})
    else:
        _print(made, written, command)


def _planner(cluster: str, profile: str | None, p_fits: float) -> Planner:
    """The planner of a cluster: by the profile that is named, else the one beside it, else the best known."""
    machine = load_machine(cluster)
    return Planner(machine, CostModels(machine, choose_profile(machine, cluster, profile)), p_fits)


def run_command(made: Plan, file: Path, changes: list[str], cluster: str, *, fixed: bool) -> list[str]:
    """The command that runs the best layout, word by word.

    file: the run file. changes: fields outside the layout that were changed for the plan. fixed: whether the file has the
    layout already.
    """
    devices, per_node = made.task.devices, made.planner.machine.node.devices
    words = [*changes, *([] if fixed else write_overrides(made.task.run, made.best.layouts.row(0)))]
    if cluster in machine_names() and devices % per_node == 0:
        return ["phalanx", "launch", str(file), "--cluster", cluster, "--nodes", str(devices // per_node), *words]
    if devices <= per_node:
        return ["phalanx", "train", str(file), "--nproc", str(devices), *words]
    ranks = ["--nnodes", str(-(-devices // per_node)), "--nproc-per-node", str(per_node)]
    return ["torchrun", *ranks, "-m", "phalanx", "train", str(file), *words]


def _write_all(made: Plan, run: Path | None, html: Path | None, command: list[str]) -> dict[str, str]:
    """Write what was asked for; what it is, and the path of each."""
    written: dict[str, str] = {}
    if run is not None:
        write_file(run, _run_file(made))
        written["run"] = str(run)
    if html is not None:
        write_file(html, _page(made, command))
        written["html"] = str(html)
    return written


def _print(made: Plan, written: dict[str, str], command: list[str]) -> None:
    console = output()
    for line in plan_lines(made, console.width):
        console.print(line, soft_wrap=True)
    if file := written.get("run"):
        console.print(f"wrote {file}   next: phalanx verify {file}, {shlex.join(command)}", soft_wrap=True)
    else:
        console.print("\nto run 1:", soft_wrap=True)
        for line in command_lines(command, min(console.width, 120)):
            console.print(line, soft_wrap=True)
    if file := written.get("html"):
        console.print(f"wrote {file}", soft_wrap=True)


def _tokens(words: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)([MBT]?)", words)
    count = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= count < 1e18:
        raise ConfigError(f"--tokens {words}: write a number, such as 300B, 1.4T or 3e11")
    return round(count)


def _page(made: Plan, command: list[str]) -> str:
    from phalanx.report.plan_page import render_plan  # noqa: PLC0415  (templates are loaded for pages alone)

    return render_plan(made, "\n".join(command_lines(command, 100)))


def _run_file(made: Plan) -> str:
    seconds, task = float(made.best.times.total[0]), made.task
    expected = f"{format_duration(seconds)} a step expected"
    note = f"Planned for {task.devices} devices of {made.planner.machine.name}: {expected}.\n"
    return write_planned_run(task.run, made.best.layouts.row(0), note)
