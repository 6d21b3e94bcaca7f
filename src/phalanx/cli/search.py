"""`phalanx search`: the best layout by measurement, and what matters most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.arguments import Json, complete_override
from phalanx.cli.console import output, print_json, write_file
from phalanx.cli.search_words import progress, search_lines
from phalanx.cluster.machine import described_names, load_machine
from phalanx.config.families import require_language
from phalanx.config.load import load_run
from phalanx.config.search import Search
from phalanx.cost.profile import choose_profile
from phalanx.errors import PhalanxError
from phalanx.plan.cost_models import CostModels
from phalanx.plan.judge import Planner, Task, fixed_fields
from phalanx.report.search_page import render_search


def search(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run file, or folder of a run.")],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"What the planner takes the devices to be: {', '.join(described_names())}, or the path of a description.",
            autocompletion=lambda: list(described_names()),
        ),
    ],
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Devices of a trial.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="Fields of the layout to keep, e.g. tp=8; other fields as section.field=value.",
            autocompletion=complete_override,
        ),
    ] = None,
    measure: Annotated[
        int, typer.Option(metavar="K", min=1, help="Trials of the study, those done before included.")
    ] = 10,
    engine: Annotated[
        str, typer.Option(help="planner, optuna-tpe, optuna-gp, deephyper, random or exhaustive.")
    ] = "planner",
    where: Annotated[
        str, typer.Option(help="local: this machine; slurm: the allocation this runs in; simulated: no devices at all.")
    ] = "local",
    storage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Optuna journal of the study; by default RUN.search.log.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Measured constants of the device, from phalanx calibrate.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of engines that draw at random, and of the simulated truth.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep run directories of trials.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the study as one HTML page.")] = None,
    json: Json = False,
) -> None:
    """Measure the layouts that the planner thinks best, learn from each, and say which one is best and what matters.

    Every trial is a short training run in processes of its own. One that runs out of memory, hangs, crashes or gives another
    loss is recorded and not repeated. A killed search goes on when it is started again; several may share one file.
    """
    asked = _asked(run, cluster, devices, overrides or [], profile)
    path = storage or Path(f"{run.resolve().name.removesuffix('.yaml')}.search.log")
    done = _run_search(asked, where, path, engine=engine, most=measure, seed=seed, keep=keep)
    facts = done.facts()
    written = {}
    for kind, file, text in (("run", write, done.run_text), ("html", html, lambda: render_search(facts))):
        if file is not None:
            write_file(file, text())
            written[kind] = str(file)
    if json:
        print_json(facts | {"written": written})
        return
    console = output()
    for line in [*search_lines(facts, console.width), *(f"wrote {name}" for name in written.values())]:
        console.print(line, soft_wrap=True)


@dataclass(frozen=True)
class _Asked:
    """What is searched."""

    planner: Planner
    task: Task
    search: Search


def _asked(file: Path, cluster: str, devices: int, words: list[str], profile: str | None) -> _Asked:
    run = require_language(load_run(file, words), "phalanx search")
    section = run.search
    machine = load_machine(cluster)
    named = choose_profile(machine, cluster, profile)
    planner = Planner(machine, CostModels(machine, named), least_p=section.least_p_fits)
    return _Asked(planner, Task(run, devices, fixed_fields(run, words)), section)


def _run_search(asked: _Asked, where: str, path: Path, **options: Any) -> Any:
    try:
        from phalanx.search.study import run_search  # noqa: PLC0415
    except ImportError as error:
        raise PhalanxError(f'phalanx search needs {error.name}: pip install "phalanx-train[search]"') from None
    return run_search(asked.planner, asked.task, asked.search, where, path, tell=progress, **options)
