"""The run file with the layout that was planned filled in: it starts as it is on that many devices."""

from __future__ import annotations

from typing import Any

import yaml

from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.planner.layouts.candidates import Candidates
from phalanx.planner.layouts.enumerate import CHOSEN


def planned_run(run: Run, candidates: Candidates, index: int = 0) -> Run:
    """`run` with one candidate as its layout; `layout.resolve.resolve_layout` makes that candidate of it again."""
    layout = candidates.layout(index)
    chosen: dict[str, Any] = {name: getattr(layout, name) for name in CHOSEN if name != "recompute"}
    chosen["recompute"] = candidates.recompute_of(index)
    if layout.pp == 1:
        # The schedule has no effect then, and a number of stages would not go with all of them.
        chosen["stages_per_rank"] = "auto"
    return run.model_copy(update={"layout": run.layout.model_copy(update=chosen)})


def planned_text(run: Run, candidates: Candidates, note: str, index: int = 0) -> str:
    """The run file as text, under a comment."""
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    return comment + dump_run(planned_run(run, candidates, index))


def planned_words(run: Run, candidates: Candidates, index: int = 0) -> list[str]:
    """What turns the run file into `planned_run`, as overrides of a command: the chosen fields of the layout."""
    layout = planned_run(run, candidates, index).layout.model_dump(mode="json", include=set(CHOSEN))
    return [f"{name}={str(layout[name]).lower()}" for name in CHOSEN]


def planned_layout(run: Run, candidates: Candidates, index: int = 0) -> str:
    """The chosen fields of the layout as YAML, to be put into a run file."""
    layout = planned_run(run, candidates, index).layout.model_dump(mode="json", include=set(CHOSEN))
    return yaml.safe_dump({"layout": {name: layout[name] for name in CHOSEN}}, sort_keys=False)
