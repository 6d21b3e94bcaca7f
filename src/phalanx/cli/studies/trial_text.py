"""What both kinds of studies say of their trials."""

from __future__ import annotations

from typing import Any

from phalanx.study.trial import FAILURES, INTERRUPTED, Outcome

MOST_PARAMETERS = 5
"""Parameters that are listed by what they matter."""
_LONGEST = 150
"""Characters that are shown of what a trial said last."""


def describe_failure(outcome: Outcome) -> str:
    """Return why a trial has no value, and what it said last."""
    cause = outcome.cause
    words = FAILURES.get(cause, "interrupted, may be repeated" if cause == INTERRUPTED else cause)
    # on one line, whatever a traceback looked like
    said = " ".join(outcome.words.split())
    return f"{words}: {said[:_LONGEST]}" if said else words


def list_importance(found: dict[str, Any]) -> str:
    """Return what matters most by trials, with the bounds around it."""
    rows = found["importance"][:MOST_PARAMETERS]
    return ", ".join(f"{row['name']} {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in rows)
