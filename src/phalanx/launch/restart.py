"""When ranks that failed are started again, and when that has become pointless."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.launch.faults import Fault, Limits

BAD_USAGE = 2
"""Exit code of a command whose arguments or run file are wrong; every rank then finds the same."""
GIVEN_UP = 93
"""Exit code after restarts in vain: the same command would fail again, so a scheduler should not run it again."""

END_FILE = "exit_code.txt"
"""File of a run directory that the first of several supervisors leaves as it ends: its exit code, which job scripts go by.
Of all tasks of a step srun tells the largest code, be it that of a supervisor which was killed and left out."""

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
    layouts: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Added to the command of a restart on fewer ranks, by their number; empty where a run keeps its layout."""
    preload: tuple[str, ...] = ()
    """Modules that ranks find loaded, at each start; without any, each rank loads everything itself."""


class RestartCount:
    """Counts restarts without progress. Progress is a checkpoint that is newer than the one ranks began from before."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.vain = 0
        """Faults since the ranks last began from a newer checkpoint."""
        self.same_place = False
        """Whether the last two faults were of the same place, with no newer checkpoint in between."""
        self._newest = -1
        self._blamed: tuple[int, int] | None = None
        """Place of the last fault, and the newest checkpoint at that time."""

    def note_fault(self, resumed: int, place: int) -> None:
        """Count a fault of ranks that began from the checkpoint of step `resumed`. place: of the rank that failed first."""
        if resumed > self._newest:
            self._newest, self.vain = resumed, 0
        self.vain += 1
        # What is written by now, and not where ranks began: the first fault may come long after the last checkpoint.
        blamed = (place, _newest_step(self._policy.run_dir))
        self.same_place, self._blamed = self._blamed == blamed, blamed

    @property
    def pointless(self) -> bool:
        """Whether restarts have led to no newer checkpoint for too long."""
        return self.vain > self._policy.most

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next restart: none before the first from a checkpoint, then twice as long each time."""
        doubled = self._policy.backoff_s * 2.0 ** min(30, self.vain - 2)
        return 0.0 if self.vain < 2 else min(_LONGEST_BACKOFF_S, doubled)


def _newest_step(run_dir: Path | None) -> int:
    """Return the step of the newest checkpoint in a run directory, by its folder's name; -1 without any."""
    try:
        names = [] if run_dir is None else [path.name for path in (run_dir / "checkpoints").iterdir()]
    except OSError:
        return -1
    found = [re.fullmatch(r"step-(\d{8,18})", name) for name in names]
    return max((int(match[1]) for match in found if match), default=-1)


class RankPlaces:
    """The places that ranks may have, each rank's own and spare ones: devices of one machine, or nodes with equal ranks."""

    def __init__(self, world_size: int, layouts: Mapping[int, Sequence[str]], first: int = 0) -> None:
        """Begin with a place for each of `world_size` ranks, from number `first` on. layouts: see `RestartPolicy`.

        Where places are nodes, they take the part of ranks, here and in `layouts`.
        """
        self._layouts = layouts
        self._usable = list(range(first, first + world_size))
        self.used = list(self._usable)
        """Place of each rank."""

    @property
    def words(self) -> list[str]:
        """Changes of the run file for as many ranks as there are now."""
        return list(self._layouts.get(len(self.used), ()))

    def leave_out(self, rank: int) -> bool:
        """Leave out the place of a rank, and take as many of the others as a layout has use for; return whether any has.

        Where as many places are left as there are ranks, one of them was spare: the layout stays.
        """
        lost = self.used[rank]
        left = [place for place in self._usable if place != lost]
        wanted = len(self.used)
        size = wanted if len(left) >= wanted else max((n for n in self._layouts if n <= len(left)), default=0)
        if size:
            self._usable, self.used = left, left[:size]
        return size > 0


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


class Restarts:
    """What is decided after each fault of a run: whether ranks begin again, in which places, and when."""

    def __init__(
        self,
        policy: RestartPolicy,
        places: RankPlaces,
        name_place: Callable[[int], str],
        *,
        ranks_each: int = 1,
        fixed: int | None = None,
    ) -> None:
        """Begin with all `places`. name_place: names one for a person. ranks_each: ranks of a place. fixed: the place that
        is never left out."""
        self.policy = policy
        self._count = RestartCount(policy)
        self._name_place = name_place
        self._ranks_each = ranks_each
        self._fixed = fixed
        self._memory_limit = read_memory_limit(policy.run_dir)
        self.places = places
        self.done = 0
        """Restarts so far."""
        self.backoff_s = 0.0
        """Seconds to wait before the restart that was decided last."""

    @property
    def words(self) -> list[str]:
        """Words to add to the command of the next attempt."""
        return [*(self.policy.words if self.done else ()), *self.places.words]

    def decide(self, fault: Fault, code: int, resumed: int, *, asked: bool) -> tuple[str, int | None]:
        """Return what is done about `fault` as a sentence, and the exit code of the command; None where ranks begin again.

        code: exit code of the rank that failed first. resumed: step of the checkpoint that the ranks began from; -1 where
        that is not known. asked: whether somebody asked the run to stop.
        """
        index = fault.rank // self._ranks_each
        self._count.note_fault(resumed, self.places.used[index])
        self.backoff_s = self._count.backoff_s
        before, self._memory_limit = self._memory_limit, read_memory_limit(self.policy.run_dir)
        worth = is_worth_restart(fault, needs_less=self._memory_limit != before)
        if self.policy.most == 0 or asked or code == BAD_USAGE or not worth:
            return "not restarted; the last checkpoint stays", code
        if self._count.pointless:
            return (
                f"given up (exit code {GIVEN_UP}): {self.policy.most} restarts in a row have led to no newer checkpoint; "
                "the same command starts again"
            ), GIVEN_UP
        who = self._leave_place(fault, index)
        if who is None:
            left = "no layout is legal for the ranks that are left"
            if not self.policy.layouts:
                left = "restart.layout is same, which needs all nodes"
            return f"not restarted: {left}; the last checkpoint stays", code
        self.done += 1
        after = f" after {self.backoff_s:g} s" if self.backoff_s else ""
        return f"restart {self.done}: {who} again from the newest whole checkpoint{after}", None

    def _leave_place(self, fault: Fault, index: int) -> str | None:
        """Leave out a place that is lost, or whose rank has failed before; return who begins again, or None."""
        place = self.places.used[index]
        lost = fault.cause == "lost node"
        # With fewer ranks each takes more memory, so that is no way out of having none.
        wanted = self.policy.layouts and self._count.same_place and fault.cause != "out of memory"
        if not lost and (not wanted or place == self._fixed):
            return "all ranks begin"
        if not self.places.leave_out(index):
            return None
        layout = " ".join(word.removeprefix("layout.") for word in self.places.words if not word.endswith("=1"))
        why = "is lost and" if lost else "has failed twice in a row and"
        return (
            f"{self._name_place(place)} {why} is left out, {len(self.places.used) * self._ranks_each} ranks"
            f"{f' ({layout})' if layout else ''} begin"
        )
