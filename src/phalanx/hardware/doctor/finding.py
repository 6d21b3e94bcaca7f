"""Findings of an examination: what is wrong and how to mend it. This module does not know how they are found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Level = Literal["failed", "warning"]
"""failed: training would not start, would stop, or would compute something wrong. warning: training would be slow or
at risk."""

PATIENCE_S = 120.0
"""Seconds that rank 0 waits for the reports of the others, by default."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and its fix."""

    level: Level
    check: str
    """Short name of the check, as `docs/guides/doctor.md` lists it."""
    message: str
    fix: str
    ranks: tuple[int, ...] = ()
    """Ranks that the finding is about, ascending; empty for all ranks."""

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Finding:
        """Return the finding that `dataclasses.asdict` turned into `values`."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with those that several ranks share merged into one; failures first, else in the given order."""
    ranks: dict[Finding, set[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), set()).update(finding.ranks)
    joined = [replace(finding, ranks=tuple(sorted(of))) for finding, of in ranks.items()]
    return sorted(joined, key=lambda finding: finding.level != "failed")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, neighbours as ranges: `ranks 0-3 and 8`."""
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
