"""Watches the ranks of a node that torchrun or srun started; `start_watch` starts it as a process of its own.

The first rank of a node starts it beside itself. It names faults as the supervisor of `phalanx train --nproc` does, and ends
a rank that hangs, so that whoever started the ranks sees that one of them is gone. It starts none: that is the launcher's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.launch.collectives import read_collectives
from phalanx.launch.faults import (
    GONE,
    Fault,
    Limits,
    RankView,
    blame_silent,
    collect_stacks,
    name_fault,
    process_state,
    silent_ranks,
    try_report,
    view_rank,
)
from phalanx.launch.heartbeat import beat_file, read_beat
from phalanx.launch.stragglers import StragglerWatch
from phalanx.printable import write_stderr

_POLL_S = 0.25
_ASLEEP_S = 2.0
"""A longer pause between two looks means that this process did not run itself."""
_LAST_WORDS_S = 1.0
"""Seconds in which ranks may say what they failed of, after one of them is gone."""
_BEGINNING_S = 120.0
"""Seconds in which all ranks of the node have to begin their heartbeats."""
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
_STEP = ("SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def make_node_folder() -> Path | None:
    """Return the folder of heartbeats that the ranks of this node share, made if need be; None where another user has it.

    Its name follows from where the ranks meet and from the attempt, which are the same for all of them and for no others.
    """
    said = "\n".join(os.environ.get(name, "") for name in (*_MEETING, *_STEP))
    name = f"phalanx-{os.getuid()}-{hashlib.sha256(said.encode()).hexdigest()[:24]}"
    folder = Path(tempfile.gettempdir()) / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    # In a folder for everybody, somebody else may have been there first.
    return folder if status.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink() else None


def started_by_launcher() -> bool:
    """Return whether torchrun or srun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ


def start_watch(folder: Path, run_dir: Path, ranks: Sequence[int], limits: Limits) -> None:
    """Start the process that watches `ranks`, whose heartbeats are in `folder`. It ends when they have."""
    words = [str(folder), str(run_dir), ",".join(map(str, ranks)), str(limits.heartbeat_s), str(limits.slow_s)]
    # A session of its own: what ends the ranks' process group must leave it the time to say so.
    subprocess.Popen(
        [sys.executable, "-m", "phalanx.launch.watch", *words], stdin=subprocess.DEVNULL, start_new_session=True
    )


class NodeWatch:
    """Looks at ranks that other processes started; what it knows of them is their heartbeats and whether they are there."""

    def __init__(self, folder: Path, run_dir: Path, ranks: Sequence[int], limits: Limits) -> None:
        self._folder = folder
        self._run_dir = run_dir
        self._ranks = ranks
        self._limits = limits
        self._started = time.monotonic()
        self._stragglers = StragglerWatch(folder, ranks)

    def run(self) -> None:
        """Watch until all ranks have ended, or one has failed and is named."""
        looked_at = awake_since = self._started
        while True:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - looked_at > _ASLEEP_S:
                awake_since = now
            looked_at = now
            views = self._view()
            if len(views) < len(self._ranks):
                if views and all(view.code is not None for view in views):
                    # Those that have yet to begin will find nobody.
                    self._name_gone()
                    return
                if now - self._started > _BEGINNING_S:
                    return
                continue
            gone = [view for view in views if view.code is not None]
            failed = [view for view in gone if view.beat is None or view.beat.phase != "end"]
            if failed:
                self._name_gone()
                return
            if len(gone) == len(views):
                return
            self._stragglers.look()
            silent = silent_ranks(views, self._limits, now, awake_since)
            if silent and self._end_silent(silent, views, now):
                return

    def _view(self) -> list[RankView]:
        views = []
        for rank in self._ranks:
            beat = read_beat(beat_file(self._folder, rank))
            if beat is None:
                continue
            gone = process_state(beat.pid) in ("", "Z", "X")
            views.append(view_rank(self._folder, rank, beat.pid, GONE if gone else None, self._started))
        return views

    def _name_gone(self) -> None:
        """Name the rank that is gone before its end, once the others had time to say what they know."""
        seen, now = self._view(), time.monotonic()
        stacks = collect_stacks(self._folder, seen)
        time.sleep(_LAST_WORDS_S)
        later = {view.rank: view for view in self._view()}
        gone = [later[view.rank] for view in seen if view.code is not None]
        first = min(gone, key=lambda view: ((view.error or {}).get("kind") == "lost link", view.rank))
        rows = [later[view.rank] for view in seen]
        self._report(name_fault(first, rows, attempt=_read_attempt(), now=now, stacks=stacks))

    def _end_silent(self, silent: Sequence[RankView], views: Sequence[RankView], now: float) -> bool:
        """Name and end the rank that the others wait for; return whether there is one on this node."""
        collectives = {view.rank: read_collectives(self._folder, view.rank) for view in views}
        hung, sentences = blame_silent(collectives, silent, views)
        world_size = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 0)
        alone = hung.stopped or bool(sentences) or len(views) == len(self._ranks) == world_size
        # Where all ranks of this node wait, the one that hangs may be on another: the watch there has as long again.
        if not alone and now - hung.heard < 2.0 * self._limits.heartbeat_s:
            return False
        stacks = collect_stacks(self._folder, views)
        fault = name_fault(
            hung, views, attempt=_read_attempt(), now=now, silent=True, collectives=sentences, stacks=stacks
        )
        self._report(fault)
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung.pid, signal.SIGKILL)
        return True

    def _report(self, fault: Fault) -> None:
        # What a rank said to the user itself needs no second telling.
        if fault.cause != "refused":
            write_stderr(fault.summary())
        if problem := try_report(fault, self._run_dir):
            write_stderr(f"warning: {problem}")


def _read_attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0)


def main(words: Sequence[str]) -> None:
    """Watch the ranks that `start_watch` names, and remove what they leave behind."""
    folder, run_dir, ranks, heartbeat_s, slow_s = words
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Whoever ends the ranks signals all processes of the job; this one ends after them.
        signal.signal(number, signal.SIG_IGN)
    place = Path(folder)
    limits = Limits(float(heartbeat_s), float(slow_s))
    try:
        NodeWatch(place, Path(run_dir), [int(one) for one in ranks.split(",")], limits).run()
    finally:
        for file in place.iterdir():
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            place.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
