"""When ranks that failed are started again, and when that has become pointless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.launch.faults import Fault, Limits, RankView

GIVEN_UP = 93
"""Exit code after restarts in vain: the same command would fail again, so a scheduler should not run it again."""

_LONGEST_BACKOFF_S = 300.0
_NEVER = frozenset({"refused", "exit"})
"""Causes that a restart cannot mend: what was said is meant for the user, or nobody knows what it was."""


@dataclass(frozen=True)
class RestartPolicy:
    """How ranks are watched, and what happens after a fault."""

    most: int = 0
    """Restarts in a row that may begin from the same checkpoint; 0 restarts never."""
    backoff_s: float = 5.0
    """Seconds before the second of them; each further one waits twice as long."""
    limits: Limits = field(default_factory=Limits)
    run_dir: Path | None = None
    """Where reports go."""
    words: tuple[str, ...] = ()
    """Added to the command of a restart."""


class RestartCount:
    """Counts restarts without progress. Progress is a checkpoint that is newer than the one ranks began from before."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.restarts = 0
        """All restarts so far."""
        self.vain = 0
        """Faults since the ranks last began from a newer checkpoint."""
        self._newest = -1

    def note_fault(self, views: Sequence[RankView]) -> None:
        """Count a fault of ranks that had begun where `views` say."""
        resumed = max((view.beat.resumed for view in views if view.beat is not None), default=-1)
        if resumed > self._newest:
            self._newest, self.vain = resumed, 0
        self.vain += 1

    @property
    def pointless(self) -> bool:
        """Whether restarts have led to no newer checkpoint for too long."""
        return self.vain > self._policy.most

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next restart: none before the first from a checkpoint, then twice as long each time."""
        doubled = self._policy.backoff_s * 2.0 ** min(30, self.vain - 2)
        return 0.0 if self.vain < 2 else min(_LONGEST_BACKOFF_S, doubled)


MEMORY_FILE = "memory.json"
"""File of a run directory: what a rank that ran out of memory left for the next start; see
`training.safeguards.memory_limit`."""


def read_memory_limit(run_dir: Path | None) -> str | None:
    """Return what ranks left in `run_dir` after they ran out of memory, as text to compare; None where there is nothing."""
    try:
        return None if run_dir is None else (run_dir / MEMORY_FILE).read_text()[:4096]
    except (OSError, UnicodeDecodeError):
        return None


def is_worth_restart(fault: Fault, *, needs_less: bool = False) -> bool:
    """Return whether ranks that began anew could get past `fault`.

    needs_less: whether they would take less memory than those that failed.
    """
    if fault.cause in _NEVER:
        return False
    # Memory that ran out before a step was done runs out again, unless less is taken.
    return needs_less or fault.cause != "out of memory" or fault.phase not in ("start", "compile", None)
