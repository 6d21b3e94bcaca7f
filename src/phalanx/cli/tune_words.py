"""What `phalanx tune` says: trials as they begin and end on stderr, then what came out."""

from __future__ import annotations

import sys
from typing import Any

from phalanx.cli.console import wrapped
from phalanx.printable import printable
from phalanx.report.formatting import format_duration, format_number, format_percent
from phalanx.study.trial import FAILURES, INTERRUPTED, Trial

_CLIP = 150
_GIB = 2**30
_MOST_TRIALS = 12
_MOST_DEVICES = 16


def progress(part: Trial, configuration: int) -> None:
    """One line on stderr when a trial begins or goes on, another when it has reached a rung or failed."""
    steps = part.note.get("steps", 0)
    if part.outcome is None:
        values = " ".join(f"{name.partition('.')[2]}={_short(value)}" for name, value in part.values.items())
        expected = part.note.get("expected_s")
        text = f"to step {steps}: {values or 'the run file as it stands'}" + (
            "" if expected is None else f", expected {format_duration(expected)}"
        )
    else:
        text = f"step {steps}: {_ended(part)}"
    sys.stderr.write(printable(f"trial {configuration} {text}") + "\n")


def _ended(part: Trial) -> str:
    assert part.outcome is not None
    cause, said = part.outcome.cause, " ".join(part.outcome.words.split())
    if part.outcome.value is not None:
        return f"{format_number(part.outcome.value)} in {format_duration(part.outcome.seconds)}"
    words = FAILURES.get(cause, "interrupted, may be repeated" if cause == INTERRUPTED else cause)
    return f"{words}: {said[:_CLIP]}" if said else words


def tune_lines(facts: dict[str, Any], width: int) -> list[str]:
    """What came out, in words; a line is at most `width` columns where that is 80 or more."""
    failed = ", ".join(f"{count} {FAILURES.get(cause, cause)}" for cause, count in facts["failures"].items())
    lines = [
        f"{facts['model']}: {len(facts['trials'])} trials, least {facts['metric']} is best"
        + (f"; {facts['why']}" if facts.get("why") else "")
        + (f"; {failed}" if failed else "")
    ]
    lines += _best(facts)
    by_number = {row["number"]: row for row in facts["trials"]}
    lines += [_row(by_number[one]) for one in facts["order"][:_MOST_TRIALS]]
    lines.append(
        "early stopping: "
        + "; ".join(
            f"{row['reached']} reached step {row['steps']}, {row['stopped']} stay there" for row in facts["stopped"]
        )
    )
    lines += _matters(facts) + _devices(facts)
    lines.append(f"study: {facts['study']}")
    # Prose goes on in the next line; rows of a table are cut.
    return [piece for line in lines for piece in _fitted(line, width)]


def _fitted(line: str, width: int) -> list[str]:
    if line.startswith("note: "):
        return wrapped(line, width)
    return [line if len(line) <= width else line[: max(width, 80) - 1] + "…"]


def _best(facts: dict[str, Any]) -> list[str]:
    best, default = facts["best"], facts["default"]
    if best is None:
        return [f"no trial has a score; logs are in {facts['study']}/jobs"]
    steps = f"{best['steps']} of {facts['rungs'][-1]} steps"
    lines = [f"best: trial {best['number']}, {format_number(best['score'])} after {steps}, {best['run_dir']}"]
    lines += [f"      {name} = {_short(value)}" for name, value in best["values"].items()]
    if facts["unfinished"]:
        lines.append(f"note: {facts['unfinished']}")
    if default is not None:
        lines.append(f"the run file as it stands: {format_number(default['score'])} after {default['steps']} steps")
    return lines


def _row(row: dict[str, Any]) -> str:
    values = " ".join(f"{name.partition('.')[2]}={_short(value)}" for name, value in row["values"].items())
    return f"{row['number']:5}  {format_number(row['score']):>10}  step {row['steps']:<7} {values}"


def _matters(facts: dict[str, Any]) -> list[str]:
    found = facts["importance"]
    if found is None:
        return []
    words = ", ".join(
        f"{row['name']} {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in found["importance"][:5]
    )
    return [f"matters by {found['trials']} trials, for the {found['of']}: {words}", f"      {found['caution']}"]


def _devices(facts: dict[str, Any]) -> list[str]:
    devices = facts["devices"]
    lines = [
        f"devices were idle {format_percent(devices['idle'])} of the time (nothing in a training loop), over "
        f"{format_duration(devices['seconds'])} in {devices['sessions']} sessions"
    ]
    without, each = facts["without_packing"], devices["each"]
    if without is not None and any(devices["packing"]):
        lines.append(
            f"  one trial a device, first come first served: {format_percent(without['idle'])} of "
            f"{format_duration(without['seconds'])} (simulated from the times of these trials)"
        )
    lines += [
        f"  {row['device']:>20} |{row['bar']}| idle {format_percent(row['idle'])}" for row in each[:_MOST_DEVICES]
    ]
    if len(each) > _MOST_DEVICES:
        lines.append(f"  and {len(each) - _MOST_DEVICES} more devices")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
