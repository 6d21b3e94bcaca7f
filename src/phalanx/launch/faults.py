"""Faults of the ranks of a node: found from their heartbeats and exit codes, told apart, and written into one report.

What this module knows of a rank is its process and the files of its folder of heartbeats. It starts and ends nothing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import PhalanxError
from phalanx.files import JsonLines, require_own, write_atomically
from phalanx.launch.collectives import Collective, absent_ranks
from phalanx.launch.heartbeat import (
    STACK_SIGNAL,
    Beat,
    beat_file,
    error_file,
    read_beat,
    stack_file,
)
from phalanx.printable import make_printable

Cause = Literal["signal", "out of memory", "exception", "refused", "hang", "stopped", "lost link", "exit", "lost node"]
CAUSES: dict[Cause, str] = {
    "signal": "a signal ended it",
    "out of memory": "memory ran out",
    "exception": "it raised an exception",
    "refused": "it ended with a message for the user",
    "hang": "it gave no sign of life",
    "stopped": "it was suspended (SIGSTOP)",
    "lost link": "it lost another rank",
    "exit": "it ended before the others",
    "lost node": "the supervisor of its node is gone",
}
"""Why ranks fail, in the words of the report."""

FAULT_FILE, FAULT_TEXT, FAULT_LOG = "fault.json", "fault.txt", "faults.jsonl"
"""Files of a run directory: the last fault, the same as text with all stacks, and one line for each fault so far."""
FAILED_NODES = "failed_nodes.txt"
"""File of a run directory with the node of each fault that a node may be the reason of, one a line; job scripts read it."""
_NOT_OF_NODES: tuple[Cause, ...] = ("lost link", "out of memory", "refused")

GONE = 256
"""Stands for the exit code of a process that is gone, where only its parent knows it."""

_STACK_WAIT_S = 0.6
_STACK_CHARACTERS = 20_000


@dataclass(frozen=True)
class RankView:
    """A rank as the process that watches it sees it at one moment."""

    rank: int
    pid: int
    code: int | None
    """Exit code, negative for a signal; None while it runs."""
    state: str
    """Letter of the process's state in /proc (T is stopped); empty where it cannot be told."""
    beat: Beat | None
    error: Mapping[str, Any] | None
    """What the rank said it failed of."""
    started: float = 0.0
    """When it was started, by `time.monotonic`."""

    @property
    def heard(self) -> float:
        """When it gave its last sign of life."""
        return self.started if self.beat is None else self.beat.since

    @property
    def stopped(self) -> bool:
        """Whether the process is suspended."""
        return self.state in ("T", "t")


def view_rank(folder: Path, rank: int, pid: int, code: int | None, started: float) -> RankView:
    """Return what can be seen of a rank now. folder: of its heartbeats."""
    error = None
    with suppress(OSError, ValueError):
        error = json.loads(error_file(folder, rank).read_text())
    state = process_state(pid) if code is None else ""
    return RankView(rank, pid, code, state, read_beat(beat_file(folder, rank)), error, started)


def process_state(pid: int) -> str:
    """Return the letter of a process's state; empty where there is no such process or no /proc."""
    try:
        # The command's name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class Limits:
    """How long a rank may be silent."""

    heartbeat_s: float = 60.0
    """In an ordinary phase of a step."""
    slow_s: float = 1800.0
    """In a phase whose time nobody knows: start, compilation, checkpoint, evaluation."""


def silent_ranks(views: Sequence[RankView], limits: Limits, now: float, since: float) -> list[RankView]:
    """Return the ranks that gave no sign of life within their limits.

    since: moment from which silence counts: a process that was itself suspended saw nothing before it went on.
    """
    return [view for view in views if view.code is None and _is_silent(view, limits, now, since)]


def _is_silent(view: RankView, limits: Limits, now: float, since: float) -> bool:
    # A process that is suspended does nothing, whatever its phase.
    if view.stopped:
        limit = limits.heartbeat_s
    else:
        # Before its first sign of life a rank loads its libraries.
        limit = limits.slow_s if view.beat is None else view.beat.limit_s(limits.heartbeat_s, limits.slow_s)
    return now - max(view.heard, since) > limit


def blame_silent(
    collectives: Mapping[int, Sequence[Collective]], silent: Sequence[RankView], views: Sequence[RankView]
) -> tuple[RankView, list[str]]:
    """Return the rank that the others wait for, and sentences on the collectives that say so.

    A rank that hangs outside a collective holds up all others in theirs: they are as silent as it is. collectives: the last
    ones of each rank.
    """
    absent, sentences = absent_ranks(collectives)
    stopped = [view for view in silent if view.stopped]
    # Not only of the silent: the one that all wait for may have given its last sign of life a moment after them.
    missing = [view for view in views if view.rank in absent and view.code is None]
    # Of several the one that went silent first; a rank that waits went silent when it came to the collective.
    found = min(stopped or missing or silent, key=lambda view: (view.heard, view.rank))
    return found, sentences


def first_failed(views: Sequence[RankView], quiet_codes: Sequence[int]) -> RankView | None:
    """Return the failed rank that tells most of those that ended: never one that only lost another, if there is a choice.

    quiet_codes: exit codes of ranks that ended in good order.
    """
    failed = [view for view in views if view.code]

    def importance(view: RankView) -> tuple[bool, bool, bool, float, int]:
        code = view.code or 0
        said = view.error or {}
        victim = _lost_link(view)
        # Least first: those that ended in good order tell least, then those that only lost a link, then bare exit codes
        # without a word; of equals, the first.
        return code in quiet_codes, victim, code > 0 and not said, float(said.get("time", 0.0)), view.rank

    return min(failed, key=importance, default=None)


def timestamp() -> str:
    """Return the present time as reports write it, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def host_name() -> str:
    """Return the name of this node by which its scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


@dataclass(frozen=True)
class Fault:
    """What is known of one fault: the first rank to fail, and what all ranks of the node were doing."""

    rank: int
    cause: Cause
    detail: str
    """One line: the exception, the signal, how long it was silent."""
    step: int | None
    phase: str | None
    host: str = field(default_factory=host_name)
    """The node, by the name that its scheduler knows it by."""
    time: str = field(default_factory=timestamp)
    """When it was found."""
    attempt: int = 0
    """Times that the ranks were restarted before."""
    silent_s: float | None = None
    """Of a hang: seconds since its last sign of life."""
    collectives: tuple[str, ...] = ()
    ranks: tuple[dict[str, Any], ...] = ()
    """Each rank of the node: pid, exit code, step, phase and its seconds, state, error."""
    stacks: dict[int, str] = field(default_factory=dict)
    action: str = ""
    """What is done about it."""

    def headline(self) -> str:
        """Return the fault in one line."""
        where = "" if self.phase is None else f" in {self.phase}"
        where += "" if self.step is None else f" of step {self.step:,}"
        return f"rank {self.rank} on {self.host} failed{where}: {CAUSES[self.cause]}: {self.detail}"

    def summary(self) -> str:
        """Return the lines for the terminal: first rank and why, collectives, what the others did, what happens now."""
        lines = [f"fault: {self.headline()}"]
        lines += [f"  {sentence}" for sentence in self.collectives[:4]]
        others = [f"rank {row['rank']} {_row_in_words(row)}" for row in self.ranks if row["rank"] != self.rank]
        if others:
            more = f" and {len(others) - 7} more" if len(others) > 7 else ""
            lines.append(f"  others: {'; '.join(others[:7])}{more}")
        if self.action:
            lines.append(f"  {self.action}")
        return "\n".join(lines)

    def text(self) -> str:
        """Return the whole report, stacks and tracebacks included."""
        parts = [f"{self.time}\n{self.summary()}"]
        for row in self.ranks:
            if row["error"]:
                parts.append(f"--- rank {row['rank']}: traceback ---\n{row['error'].get('traceback', '')}")
        parts += [f"--- rank {rank}: stacks ---\n{stacks}" for rank, stacks in self.stacks.items()]
        return make_printable("\n\n".join(parts)) + "\n"


def _row_in_words(row: Mapping[str, Any]) -> str:
    if row["phase"] is None:
        return "had not begun" if row["code"] is None else f"ended with {row['code']}"
    step = "" if row["step"] is None else f" of step {row['step']}"
    return f"in {row['phase']}{step} for {row['phase_seconds']:.1f} s"


def describe_rank(view: RankView, now: float) -> dict[str, Any]:
    """Return what a report says of one rank, ready for JSON."""
    beat = view.beat
    return {
        "rank": view.rank,
        "pid": view.pid,
        "code": view.code,
        "state": view.state,
        "step": _step_of(beat),
        "phase": None if beat is None else beat.phase,
        "phase_seconds": None if beat is None else round(now - beat.since, 3),
        "error": None if view.error is None else dict(view.error),
    }


def _step_of(beat: Beat | None) -> int | None:
    return None if beat is None or beat.step < 0 else beat.step


def name_fault(
    view: RankView,
    views: Sequence[RankView],
    *,
    attempt: int,
    now: float,
    out_of_memory: bool = False,
    silent: bool = False,
    collectives: Sequence[str] = (),
    stacks: dict[int, str] | None = None,
) -> Fault:
    """Return the fault of the rank `view`, the first that failed. silent: whether it was found by its silence."""
    cause, detail = _name_cause(view, now, out_of_memory=out_of_memory, silent=silent)
    return Fault(
        rank=view.rank,
        cause=cause,
        detail=detail,
        step=_step_of(view.beat),
        phase=None if view.beat is None else view.beat.phase,
        attempt=attempt,
        silent_s=round(now - view.heard, 3) if silent else None,
        collectives=tuple(collectives),
        ranks=tuple(describe_rank(one, now) for one in views),
        stacks=stacks or {},
    )


def _name_cause(view: RankView, now: float, *, out_of_memory: bool, silent: bool) -> tuple[Cause, str]:
    """Return why a rank failed, and what tells it."""
    # A rank that has said what it fails of, and is silent while it closes what it holds, does not hang.
    if silent and view.error is None:
        seconds = f"{now - view.heard:.1f} s"
        if view.stopped:
            return "stopped", f"its process {view.pid} has not run for {seconds}"
        return "hang", f"nothing for {seconds}"
    code = view.code or 0
    if out_of_memory:
        return "out of memory", f"signal {-code} from the kernel"
    # Before the code: a rank that has said why it ends may be killed on its way out.
    if view.error is not None:
        kind: Cause = view.error["kind"] if view.error.get("kind") in CAUSES else "exception"
        first = str(view.error.get("message", "")).strip().partition("\n")[0]
        return kind, f"{view.error.get('error')}: {first}"
    if code == GONE:
        return "exit", "its process is gone: killed, or ended by whoever started it"
    if code < 0:
        return "signal", f"{-code} ({signal.strsignal(-code) or 'no name'})"
    return "exit", f"exit code {code}"


@dataclass(frozen=True)
class NodeEnd:
    """What the supervisor of a node saw of its ranks as an attempt ended. Times are those of its host's `time.monotonic`."""

    views: tuple[RankView, ...]
    """All ranks when the first of them was seen to fail, or when all had ended."""
    last: tuple[RankView, ...]
    """The same ranks once all had ended."""
    seen_at: float
    """When `views` were taken."""
    found: str = field(default_factory=timestamp)
    """The same by the clock of the host, as reports write it."""
    silent: tuple[int, ...] = ()
    """Ranks that had given no sign of life within their limits."""
    killed_for_memory: bool = False
    """Whether the kernel killed processes of this host for lack of memory meanwhile."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Sequence[Collective]] = field(default_factory=dict)
    """The last ones of each rank."""
    host: str = field(default_factory=host_name)


def name_first(ends: Sequence[NodeEnd], quiet_codes: Sequence[int], attempt: int) -> tuple[Fault, RankView]:
    """Return the fault of the first rank to fail on any node, and that rank as it was seen last.

    quiet_codes: exit codes of ranks that ended in good order.
    """
    pairs = [pair for end in ends for pair in zip(end.views, end.last, strict=True)]
    seen = {view.rank: view for view, _ in pairs}
    last = {view.rank: view for _, view in pairs}
    # Those that ended after the fault was found were ended by it, unless they say of something worse.
    ended = [after for before, after in pairs if before.code is not None or after.error is not None]
    first = first_failed(ended, quiet_codes)
    silent = [seen[rank] for end in ends for rank in end.silent]
    sentences: list[str] = []
    hangs = bool(silent) and (first is None or first.code in quiet_codes or _lost_link(first))
    if hangs:
        records = {rank: records for end in ends for rank, records in end.collectives.items()}
        first, sentences = blame_silent(records, silent, list(seen.values()))
    # Without any of them, the one that ended first of those that were ended.
    first = first or first_failed(list(last.values()), ()) or pairs[0][1]
    end = next(end for end in ends if any(view.rank == first.rank for view in end.last))
    fault = name_fault(
        first,
        list(seen.values()) if hangs else [replace(seen[r], error=last[r].error, code=last[r].code) for r in seen],
        attempt=attempt,
        now=end.seen_at,
        out_of_memory=first.code == -signal.SIGKILL and end.killed_for_memory,
        silent=hangs,
        collectives=sentences,
        stacks={rank: text for one in (end, *ends) for rank, text in one.stacks.items()},
    )
    return replace(fault, host=end.host, time=end.found), last[first.rank]


def _lost_link(view: RankView) -> bool:
    return (view.error or {}).get("kind") == "lost link"


def collect_stacks(folder: Path, views: Sequence[RankView]) -> dict[int, str]:
    """Return the stacks of all living ranks that can give them.

    A signal makes each rank write its own, even where Python's lock is held by a thread that never gives it back. A
    suspended rank does so when it is woken, which this does. Where a rank does not answer, py-spy is asked, if it is there.
    """
    asked = [view for view in views if view.code is None and stack_file(folder, view.rank).exists()]
    if STACK_SIGNAL is None:
        return {}
    for view in asked:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, STACK_SIGNAL)
    # Woken last: all have their signal before one of them can go on.
    for view in asked:
        if view.stopped:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(view.pid, signal.SIGCONT)
    deadline, pids = time.monotonic() + _STACK_WAIT_S, [view.pid for view in asked]
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, sizes = sizes, {view.rank: _file_size(stack_file(folder, view.rank)) for view in asked}
        # Whole when nothing is added any more. One that lost another may have ended before it came to its answer.
        if sizes == before and all(size or _has_ended(pid) for pid, size in zip(pids, sizes.values(), strict=True)):
            break
    found = {}
    for view in asked:
        text = ""
        with suppress(OSError):
            text = stack_file(folder, view.rank).read_text(errors="replace")
        if text := text or ("" if _has_ended(view.pid) else _ask_py_spy(view.pid)):
            found[view.rank] = text[-_STACK_CHARACTERS:]
    return found


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return True
    return process_state(pid) in ("Z", "X")


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _ask_py_spy(pid: int) -> str:
    found = shutil.which("py-spy")
    if found is None:
        return ""
    try:
        done = subprocess.run(
            [found, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def write_report(fault: Fault, run_dir: Path) -> None:
    """Write `fault` to a run directory, in each of the files above. A folder that is not there is left alone.

    Raises PhalanxError for a link in the place of one of them, and OSError where they cannot be written.
    """
    if not run_dir.is_dir():
        return
    for name in (FAULT_FILE, FAULT_TEXT, FAULT_LOG, FAILED_NODES):
        require_own(run_dir / name, folder=False)
    record = asdict(fault)
    write_atomically(run_dir / FAULT_FILE, json.dumps(record, indent=1) + "\n")
    write_atomically(run_dir / FAULT_TEXT, fault.text())
    log = JsonLines(run_dir / FAULT_LOG)
    log.append({key: value for key, value in record.items() if key not in ("stacks", "ranks")})
    log.close()
    if fault.cause not in _NOT_OF_NODES:
        with (run_dir / FAILED_NODES).open("a") as nodes:
            nodes.write(f"{fault.host}\n")


def try_report(fault: Fault, run_dir: Path | None) -> str | None:
    """Write `fault` as `write_report` does; return why that was not possible, or None. Reporting never ends a run."""
    if run_dir is None:
        return None
    try:
        write_report(fault, run_dir)
    except (OSError, PhalanxError) as error:
        return f"{run_dir / FAULT_FILE} could not be written: {error}"
    return None
