"""What `phalanx search` says: trials as they end on stderr, then what came out."""

from __future__ import annotations

import sys
from typing import Any

from phalanx.cli.console import wrapped
from phalanx.printable import printable
from phalanx.report.formatting import format_duration, format_percent
from phalanx.report.study_page import list_search_notes, name_search
from phalanx.study.layouts.space import LayoutSpace
from phalanx.study.trial import FAILURES, INTERRUPTED, Trial

_CLIP = 150
_GIB = 2**30


def progress(trial: Trial, space: LayoutSpace) -> None:
    """One line on stderr when a trial begins, another when it has ended."""
    point = space.find(trial.values)
    words = trial.key if point is None else space.describe(point)
    if trial.outcome is None:
        expected = trial.note.get("expected_s")
        text = f"trial {trial.number}: {words}" + (
            "" if expected is None else f", expected {format_duration(expected)} a step"
        )
    else:
        text = f"trial {trial.number}: {_ended(trial.outcome.cause, trial.outcome.value, trial.outcome.words)}"
    sys.stderr.write(printable(text) + "\n")


def _ended(cause: str, value: float | None, said: str) -> str:
    if value is not None:
        return f"{format_duration(value)} a step"
    words = FAILURES.get(cause, "interrupted, may be repeated" if cause == INTERRUPTED else cause)
    said = " ".join(said.split())
    return f"{words}: {said[:_CLIP]}" if said else words


def search_lines(facts: dict[str, Any], width: int) -> list[str]:
    """What came out, in words; lines are wrapped to `width` columns."""
    trials = facts["trials"]
    failed = ", ".join(f"{count} {FAILURES.get(cause, cause)}" for cause, count in facts["failures"].items())
    lines = [
        f"{name_search(facts)}: {len(trials)} trials of {facts['points']:,} points; {facts['stopped']}"
        + (f"; {failed}" if failed else "")
    ]
    best = facts["best"]
    if best is None:
        lines.append("no trial was good; the logs of trials are beside the study's file")
    else:
        lines.append(f"best: trial {best['number']}, {format_duration(best['step_s'])} a step: {best['words']}")
        if best["planned_s"]:
            lines.append(f"      the planner had expected {format_duration(best['planned_s'])}")
    lines += [f"note: {note}" for note in list_search_notes(facts)]
    lines += [_row(trial) for trial in sorted(trials, key=_order)[:_MOST_TRIALS]]
    lines += _matters(facts)
    lines.append(f"study: {facts['storage']}")
    return [piece for line in lines for piece in wrapped(line, width)]


_MOST_TRIALS = 15


def _order(trial: dict[str, Any]) -> tuple[bool, float]:
    return trial["step_s"] is None, trial["step_s"] or trial["number"]


def _row(trial: dict[str, Any]) -> str:
    memory = "" if trial["memory_bytes"] is None else f"{trial['memory_bytes'] / _GIB:.1f} GiB"
    result = (
        format_duration(trial["step_s"])
        if trial["step_s"] is not None
        else FAILURES.get(trial["state"], trial["state"])
    )
    return f"{trial['number']:4}  {result:>10}  {memory:>9}  {trial['words']}"


def _matters(facts: dict[str, Any]) -> list[str]:
    lines = []
    if planned := facts["planned"]:
        effects = list(planned["shapley_effects"].items())[:5]
        words = ", ".join(f"{name} {format_percent(max(share, 0.0))}" for name, share in effects)
        lines.append(f"matters over {planned['points']:,} layouts that fit (exact Shapley effects): {words}")
    if measured := facts["measured"]:
        rows = measured["importance"][:5]
        words = ", ".join(f"{row['name']} {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in rows)
        lines.append(f"matters by {measured['trials']} measured trials: {words}")
        lines.append(f"      {measured['caution']}")
    return lines
