"""Why a trial's processes failed, from what each rank left behind and how the command ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.hardware.host import KILLED_FOR_MEMORY
from phalanx.study.trials.process import Ended
from phalanx.study.trials.trial import INTERRUPTED, Outcome

_ORDER = ("refused", "out_of_memory", "non_finite", "crash")
_SHOWN_LINES = 12
_KILLED = (-9, 137)
_KILLED_BY_SLURM = ("oom_kill", "oom-kill", "oom killed")
"""What Slurm says in a log of a step from which the kernel took a process for want of memory."""


def rank_reports(folder: Path, ranks: int) -> list[dict[str, Any] | None]:
    """What each rank left in a trial's folder; None for those that left nothing."""
    return [_read(folder / f"rank-{rank}.json") for rank in range(ranks)]


def failure(found: Sequence[dict[str, Any]], ended: Ended, said: str) -> Outcome:
    """Of ranks that failed: the cause that explains the others' failures, if one does. said: the end of the log."""
    if ended.timed_out:
        return Outcome("hang", seconds=ended.seconds, words=f"after {ended.seconds:.0f} s: {said}")
    causes = sorted((one for one in found if one["cause"] in _ORDER), key=lambda one: _ORDER.index(one["cause"]))
    if ended.code in _KILLED and not (causes and causes[0]["cause"] == "out_of_memory"):
        # What the other ranks say follows from it.
        if ended.memory_ran_out or any(words in said.lower() for words in _KILLED_BY_SLURM):
            words = f"a process was {KILLED_FOR_MEMORY} (signal 9)"
            return Outcome("out_of_memory", seconds=ended.seconds, words=words)
        return Outcome(INTERRUPTED, seconds=ended.seconds, words="a process was killed from outside (signal 9)")
    if causes:
        return Outcome(causes[0]["cause"], seconds=ended.seconds, words=str(causes[0]["words"])[-1000:])
    stopped = next((one for one in found if one["cause"] == INTERRUPTED), None)
    if stopped is not None:
        return Outcome(INTERRUPTED, seconds=ended.seconds, words=str(stopped["words"]))
    return Outcome("crash", seconds=ended.seconds, words=f"exit code {ended.code}: {said}")


def log_tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])


def _read(file: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found
