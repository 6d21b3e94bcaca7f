"""The run file with a planned layout filled in: it starts as it is on that many devices."""

from __future__ import annotations

import yaml

from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.layouts.enumerate import CHOSEN


def run_with_layout(run: Run, layout: ResolvedLayout) -> Run:
    """Return `run` with a planned layout; `layout.resolve.resolve_layout` makes the same layout of it again."""
    chosen = {name: getattr(layout, name) for name in CHOSEN}
    if layout.pp == 1:
        # The schedule has no effect then, and a number of stages would not go with all of them.
        chosen["stages_per_rank"] = "auto"
    return run.model_copy(update={"layout": run.layout.model_copy(update=chosen)})


def write_planned_run(run: Run, layout: ResolvedLayout, note: str) -> str:
    """Return the run file as text, under a comment."""
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    return comment + dump_run(run_with_layout(run, layout))


def write_overrides(run: Run, layout: ResolvedLayout) -> list[str]:
    """Return the overrides of a command that turn the run file into `run_with_layout`: the chosen fields of the layout."""
    fields = run_with_layout(run, layout).layout.model_dump(mode="json", include=set(CHOSEN))
    return [f"{name}={str(fields[name]).lower()}" for name in CHOSEN]


def write_section(run: Run, layout: ResolvedLayout) -> str:
    """Return the chosen fields of the layout as YAML, to be put into a run file."""
    fields = run_with_layout(run, layout).layout.model_dump(mode="json", include=set(CHOSEN))
    return yaml.safe_dump({"layout": {name: fields[name] for name in CHOSEN}}, sort_keys=False)
