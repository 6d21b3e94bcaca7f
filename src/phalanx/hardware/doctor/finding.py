"""What an examination found: one line each, with what to do about it. Knows nothing of how it was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Level = Literal["failed", "warning"]
"""failed: training would not start, would stop, or would compute something wrong. warning: it would be slow, or at risk."""

PATIENCE_S = 120.0
"""Seconds in which another rank has to say something."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    level: Level
    check: str
    """Short name of what was looked at, as `docs/doctor.md` lists it."""
    message: str
    fix: str
    ranks: tuple[int, ...] = ()
    """Who it is about, ascending; all ranks where it is empty."""

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Finding:
        """From what `dataclasses.asdict` made and JSON carried."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


def together(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that several ranks have alike as one, failures first, else in the order in which they came."""
    ranks: dict[Finding, set[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), set()).update(finding.ranks)
    joined = [replace(finding, ranks=tuple(sorted(of))) for finding, of in ranks.items()]
    return sorted(joined, key=lambda finding: finding.level != "failed")


def rank_words(ranks: Iterable[int]) -> str:
    """`ranks 0-3 and 8`: neighbours as ranges."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"
