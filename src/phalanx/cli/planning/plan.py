"""`phalanx plan`: which layouts are worth running on a cluster, how fast they are, whether they fit, and why."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.cli.console import open_output, print_json, print_lines, write_asked
from phalanx.cli.options.planning import PlanArguments
from phalanx.cli.planning.plan_text import fold_command, write_plan_lines
from phalanx.config.load import load_run, parse_overrides
from phalanx.config.model import LanguageModel, Model
from phalanx.errors import ConfigError
from phalanx.formatting import format_duration
from phalanx.hardware.machine import load_machine, machine_names
from phalanx.hardware.reliability import MTBF_HOURS
from phalanx.planner.measured.check_predictions import CheckedGroup, CheckedRun, check, summarise_check
from phalanx.planner.measured.runs import read_runs
from phalanx.planner.plan.budget import Reliability
from phalanx.planner.plan.make_plan import Plan, Wishes, make_plan, make_smallest_plan
from phalanx.planner.plan.plan_summary import summarise_plan
from phalanx.planner.plan.scaling import parse_scale
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import CHOSEN, write_overrides, write_planned_run
from phalanx.planner.rank.ranking import Planner, Task, fixed_fields
from phalanx.planner.time.profile import choose_profile
from phalanx.planner.trace.expert_loads import ExpertLoads, read_loads
from phalanx.planner.trace.traced_model import bind_planned
from phalanx.report.page_sections import list_loads
from phalanx.report.plan_page import render_plan
from phalanx.report.run_log import RunLog, summarise_run
from phalanx.report.table import Column, write_text_table

_UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
_COMMAND_WIDTH = 100
"""Columns of the longest line of a command on a page."""


def run_plan(asked: PlanArguments) -> None:
    """Run the subcommand."""
    if asked.check is not None:
        checked = check_table(asked.check)
        print_json(list_checked_runs(*checked)) if asked.json else print_checked_groups(*checked)
        return
    if asked.run is None or asked.cluster is None:
        raise ConfigError("give a run file and --cluster NAME|FILE, or --check RUNS.csv alone")
    if (asked.devices is None) is not asked.fit:
        raise ConfigError("give --devices N, or --fit for the smallest number that fits (one of the two)")
    words = asked.overrides or []
    loaded = load_run(asked.run, words)
    model = bind_planned(loaded)
    model.loads = _find_loads(asked.expert_loads, asked.run, loaded.model) or model.loads
    machine = load_machine(asked.cluster)
    planner = Planner(machine, CostModels(machine, choose_profile(machine, asked.cluster, asked.profile)), asked.p_fits)
    wishes = Wishes(
        best=asked.best,
        why=tuple(asked.why or ()),
        scale=() if asked.scale is None else tuple(parse_scale(asked.scale)),
        amount=None if asked.tokens is None else _parse_amount(asked.tokens),
        reliability=Reliability(
            asked.mtbf_hours or machine.mtbf_hours or MTBF_HOURS, asked.restart_minutes, asked.checkpoint_gb_s
        ),
        critical_batch=_find_critical_batch(asked.critical_batch, asked.run),
        working_w=_find_watts(asked.watts, machine.node.device),
    )
    task = Task(model, asked.devices or machine.node.devices, fixed_fields(loaded, words, everything=asked.fix))
    made = make_smallest_plan(planner, task, wishes) if asked.fit else make_plan(planner, task, wishes)

    # the planner has chosen these fields anew: in the command they stand with their new values
    chosen = {(name,) for name in CHOSEN}
    changes = [word for word in words if parse_overrides([word])[0].path[1:] not in chosen]
    command = make_run_command(
        made, asked.write or asked.run, [] if asked.write else changes, asked.cluster, fixed=asked.write is not None
    )
    written = write_asked(
        run=(asked.write, lambda: _write_run(made)),
        html=(asked.html, lambda: render_plan(made, "\n".join(fold_command(command, _COMMAND_WIDTH)))),
    )
    if asked.json:
        print_json(summarise_plan(made) | {"written": written})
        return

    width = open_output().width
    print_lines(write_plan_lines(made, width))
    if file := written.get("run"):
        print_lines([f"wrote {file}   next: phalanx verify {file}, {shlex.join(command)}"])
    else:
        # wider lines are hard to copy
        print_lines(["\nto run 1:", *fold_command(command, min(width, 120))])
    if file := written.get("html"):
        print_lines([f"wrote {file}"])


def _write_run(made: Plan) -> str:
    """Return the run file with the best layout."""
    seconds = format_duration(float(made.best.times.total[0]))
    note = f"Planned for {made.task.devices} devices of {made.planner.machine.name}: {seconds} a step expected.\n"
    return write_planned_run(made.task.run, made.best.layouts.row(0), note)


def make_run_command(made: Plan, file: Path, changes: list[str], cluster: str, *, fixed: bool) -> list[str]:
    """Return the command that runs the best layout, word by word.

    Args:
        made: the plan.
        file: the run file.
        changes: fields outside the layout that were changed for the plan.
        cluster: the cluster's name, or the file that describes it.
        fixed: whether the file has the layout already.
    """
    devices, per_node = made.task.devices, made.planner.machine.node.devices
    words = [*changes, *([] if fixed else write_overrides(made.task.run, made.best.layouts.row(0)))]
    if cluster in machine_names() and devices % per_node == 0:
        return ["phalanx", "launch", str(file), "--cluster", cluster, "--nodes", str(devices // per_node), *words]
    if devices <= per_node:
        return ["phalanx", "train", str(file), "--nproc", str(devices), *words]
    ranks = ["--nnodes", str(-(-devices // per_node)), "--nproc-per-node", str(per_node)]
    return ["torchrun", *ranks, "-m", "phalanx", "train", str(file), *words]


def _parse_amount(words: str) -> int:
    """Return how many tokens or samples `words` such as 300B or 3e11 say. Raises ConfigError for what says none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)([MBT]?)", words)
    count = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 1 <= count < 1e18:
        raise ConfigError(f"--tokens {words}: write a number, such as 300B, 1.4T or 3e11")
    return round(count)


def _find_critical_batch(words: str | None, run: Path) -> float | None:
    """Return samples of the critical batch: as given, or as a run measured it; None where nobody says it.

    Raises ConfigError for words that are neither a number nor such a run.
    """
    if words is None:
        # A run that is planned anew may have measured it before.
        has_log = run.is_dir() and (run / "metrics.jsonl").exists()
        found = summarise_run(RunLog.read(run)).critical_batch if has_log else math.nan
        return found if math.isfinite(found) else None
    if re.fullmatch(r"\d{1,12}(\.\d+)?", words) and float(words) > 0:
        return float(words)
    found = summarise_run(RunLog.read(Path(words))).critical_batch
    if not math.isfinite(found):
        raise ConfigError(
            f"--critical-batch {words}: the run has measured none; train some steps of it with training.noise_scale_every=10"
        )
    return found


def _find_watts(words: str | None, device: str) -> float | None:
    """Return the watts of a device that trains: as given, or as a run on the planned kind of device measured them.

    Raises ConfigError for words that are neither a number nor such a run.
    """
    if words is None:
        return None
    if re.fullmatch(r"\d{1,6}(\.\d+)?", words) and float(words) > 0:
        return float(words)
    log = RunLog.read(Path(words))
    found = summarise_run(log).device_watts
    if not math.isfinite(found):
        raise ConfigError(f"--watts {words}: the run has counted no energy; give the watts of a device")
    kind = str((log.machine or {}).get("device_kind"))
    if kind != device:
        raise ConfigError(f"--watts {words}: the run was on {kind}, and the plan is for {device}; give a run on that")
    return found


def _find_loads(logged: Path | None, run: Path, model: Model | None) -> ExpertLoads | None:
    """Return the loads of experts that a run has logged: the one given, else the planned run; None where it has none.

    Raises ConfigError where the run given tells of no such experts.
    """
    source = logged or run
    if logged is None and not (run.is_dir() and (run / "metrics.jsonl").exists()):
        return None
    experts = model.experts if isinstance(model, LanguageModel) else None
    if experts is None:
        if logged is not None:
            raise ConfigError(f"--expert-loads {logged}: the model to plan has no experts; leave it out")
        return None
    rows = list_loads(RunLog.read(source).experts)
    # Loads of another number of experts say nothing of these, nor do layers that saw no token.
    same = [row for row in rows if len(row) == experts.count and sum(row) > 0]
    if not same and logged is not None:
        found = f"loads of {len(rows[0])} experts a layer" if rows else "no loads of experts"
        raise ConfigError(
            f"--expert-loads {logged}: the run has logged {found}, and model.experts.count={experts.count}; give a run of a "
            "mixture of as many"
        )
    return read_loads(same) if same else None


_RENAMED = {
    "predicted_tokens_per_s": "predicted_tokens_per_s_per_gpu",
    "measured_tokens_per_s": "measured_tokens_per_s_per_gpu",
}


def _format_share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


GROUP_COLUMNS: tuple[Column[CheckedGroup], ...] = (
    Column("group", lambda group: group.group, "left"),
    Column("rows", lambda group: group.rows),
    Column("median", lambda group: _format_share(group.median)),
    Column("95%", lambda group: _format_share(group.p95)),
    Column("rank corr.", lambda group: "" if group.rank_correlation is None else f"{group.rank_correlation:.2f}"),
    Column("top-3 regret", lambda group: _format_share(group.top3_regret)),
    Column("memory rows", lambda group: group.memory_rows or ""),
    Column("median", lambda group: _format_share(group.memory_median)),
    Column("95%", lambda group: _format_share(group.memory_p95)),
    Column("said to fit", lambda group: group.said_to_fit or ""),
    Column("false", lambda group: _format_share(group.false_fits)),
)


def check_table(table: Path) -> tuple[list[CheckedRun], list[CheckedGroup]]:
    """Predict every row of a table of runs and summarise the errors. Raises DataError for a bad table."""
    runs = read_runs(table)
    rows = check(runs)
    return rows, summarise_check(rows, runs)


def list_checked_runs(rows: Sequence[CheckedRun], groups: Sequence[CheckedGroup]) -> dict[str, Any]:
    """Return every row with its prediction, and the errors by group, as `--json` prints them."""
    return {
        "rows": [{_RENAMED.get(name, name): value for name, value in asdict(row).items()} for row in rows],
        "groups": [asdict(group) for group in groups],
    }


def print_checked_groups(rows: Sequence[CheckedRun], groups: Sequence[CheckedGroup]) -> None:
    """Print the errors by group, one line each, and how many rows could not be predicted."""
    print_lines(write_text_table(GROUP_COLUMNS, groups))
    print_lines([f"{sum(not row.used for row in rows)} of {len(rows)} rows could not be predicted; --json says why"])
