"""`phalanx search`: the best layout by measurement, and what matters most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cli.console import output, print_json, print_warning, write_file
from phalanx.cli.search_words import progress, search_lines
from phalanx.config.load import load_run
from phalanx.config.search import Search
from phalanx.errors import PhalanxError
from phalanx.families.language.config import require_language
from phalanx.hardware.device import choose_device, device_kind, device_name
from phalanx.hardware.machine import load_machine
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.judge import Planner, Task, fixed_fields
from phalanx.planner.time.profile import choose_profile
from phalanx.report.study_page import render_search


def search(
    *,
    run: Path,
    cluster: str,
    devices: int,
    overrides: list[str] | None,
    measure: int,
    engine: str,
    where: str,
    storage: Path | None,
    profile: str | None,
    seed: int,
    keep: bool,
    write: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.search` declares its arguments."""
    asked = _asked(run, cluster, devices, overrides or [], profile)
    if where == "local":
        _warn_of_other_devices(asked, cluster)
    path = storage or Path(f"{run.resolve().name.removesuffix('.yaml')}.search.log")
    done = _run_search(asked, where, path, engine=engine, most=measure, seed=seed, keep=keep)
    facts = done.summary()
    written = {}
    for kind, file, text in (("run", write, done.best_run_text), ("html", html, lambda: render_search(facts))):
        if file is not None:
            write_file(file, text())
            written[kind] = str(file)
    if json:
        print_json(facts | {"written": written})
        return
    console = output()
    for line in [*search_lines(facts, console.width), *(f"wrote {name}" for name in written.values())]:
        console.print(line, soft_wrap=True)


def _warn_of_other_devices(asked: _Asked, cluster: str) -> None:
    planned = asked.planner.machine.node.device
    measured = device_kind(device_name(choose_device(asked.task.run.cluster.device)))
    if measured != planned:
        print_warning(
            f"--cluster {cluster} has {planned}, but trials with --where local run on this machine, which has {measured}: "
            f"they measure {measured}, and only the planner's order of layouts is that of {cluster}"
        )


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
        from phalanx.study.layouts.study import run_search  # noqa: PLC0415
    except ImportError as error:
        raise PhalanxError(f'phalanx search needs {error.name}: pip install "phalanx-train[search]"') from None
    return run_search(asked.planner, asked.task, asked.search, where, path, tell=progress, **options)
