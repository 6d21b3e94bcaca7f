"""Starts the ranks of one command on this machine, watches them, and starts them again after a fault.

Every rank runs the same command with the variables torchrun would set. The first rank has the terminal. The others write
their errors to files; where one of them is the first to fail, the end of its file is shown. This process computes nothing
and loads no torch: it stays small, and what ends a rank does not reach it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.hardware.host import KILLED_FOR_MEMORY, LESS_MEMORY, KillCount, available_cores, passive_waits
from phalanx.launch import heartbeat
from phalanx.launch.faults import (
    Fault,
    RankView,
    blame_silent,
    collect_stacks,
    first_failed,
    name_fault,
    silent_ranks,
    timestamp,
    try_report,
    view_rank,
)
from phalanx.launch.parent import GRACE_S, ONE_WISH_S, PARENT, STOP_SIGNALS, STORE_SOCKET, is_ignored
from phalanx.launch.preload import RankCommand, RankProcess, RankTemplate, can_preload, start_interpreter
from phalanx.launch.restart import (
    GIVEN_UP,
    RankPlaces,
    RestartCount,
    RestartPolicy,
    is_worth_restart,
    read_memory_limit,
)
from phalanx.launch.stragglers import StragglerWatch
from phalanx.launch.wall_time import GRACE
from phalanx.node_memory import forget_node_memory
from phalanx.printable import write_stderr

_STOPPED = tuple(128 + number for number in STOP_SIGNALS)
"""Exit codes of a rank that saved and stopped because it was told to; the other ranks are about to do the same."""
_BAD_USAGE = 2
"""Exit code of a command whose arguments or run file are wrong; every rank then finds the same."""
_PASSED_ON = (*STOP_SIGNALS, signal.SIGQUIT)
_LAST_WORDS_S = 2.0
"""Seconds in which ranks may fail by themselves after another failed, and may end after a second request to stop."""
_WATCHED_LAST_WORDS_S = 1.0
"""The same for ranks with heartbeats: over gloo one that lost another says so in half a second, over NCCL it never does."""
_DYING_S = 30.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped because another failed."""
_CLOSING_S = 3.0
"""The same for ranks with heartbeats that have said what they fail of, and close what they hold."""
_STOPPING_S = 10.0
"""Most seconds without a sign of life, in an ordinary phase, of ranks that were told to stop."""
_POLL_S = 0.05
_LOOK_S = 0.25
"""Seconds between two looks at heartbeats."""
_ASLEEP_S = 2.0
"""A longer pause between two looks means that this process did not run itself, and saw nothing of its ranks."""
_SHOWN_LINES = 20


def launch_ranks(
    arguments: Sequence[str],
    world_size: int,
    module: str = "phalanx",
    *,
    grace_s: float = GRACE_S,
    policy: RestartPolicy | None = None,
    first_device: int = 0,
) -> int:
    """Run `phalanx ARGUMENTS` on `world_size` ranks and return the exit code of the first rank that failed, or 0.

    module: Python module to run in place of `phalanx`. grace_s: seconds after which ranks that were told to stop are killed.
    policy: how ranks with heartbeats are watched, and started again after a fault; None ends after the first fault.
    first_device: number of the first rank's device on this machine; the others have those behind it.

    Each of STOP_SIGNALS reaches every rank once; ranks then save and stop. When a rank fails, the others are stopped. No
    rank outlives the call. Ranks find this process's number in the variable `parent.PARENT`. Returns GIVEN_UP where ranks
    were started again and again from the same checkpoint.
    """
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder,
        RankProcesses(Path(folder), module, grace_s, policy, world_size, first_device) as ranks,
    ):
        words = list(arguments)
        while True:
            ranks.start_all(words)
            failed = ranks.wait()
            if failed is None:
                return 0
            ranks.explain(failed)
            code = ranks.end_attempt(failed)
            if code is not None:
                break
            words = [*arguments, *(policy.words if policy is not None else ()), *ranks.places.words]
    # Nobody starts them again: copies of their state would only take memory.
    if policy is not None and policy.run_dir is not None:
        forget_node_memory(policy.run_dir)
    return code


class RankProcesses:
    """The processes of all ranks, and the signals that reach them through this process.

    Each rank has a process group of its own. A terminal, or `timeout`, signals the whole group of a command: ranks
    in it would be signalled twice, directly and by this process, and the second signal ends a rank without a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        module: str,
        grace_s: float,
        policy: RestartPolicy | None,
        world_size: int,
        first_device: int = 0,
    ) -> None:
        self._folder = folder
        self._module = module
        self._grace_s = grace_s
        self._policy = policy
        self._count = RestartCount(policy or RestartPolicy())
        self.places = RankPlaces(world_size, {} if policy is None else policy.layouts, first_device)
        self._memory_limit = read_memory_limit(None if policy is None else policy.run_dir)
        # The kernel counts its kills for memory; a rank's exit code says only that it was signal 9.
        self._kills = KillCount()
        self._out_of_patience = False
        self._processes: list[RankProcess] = []
        self._template: RankTemplate | None = None
        self._started: list[float] = []
        self._previous: dict[int, Any] = {}
        self._asked = 0
        self._asked_at = 0.0
        self._insisted = False
        self._listener: socket.socket | None = None
        self._fault: Fault | None = None
        self._seen: list[RankView] = []
        """All ranks when the fault was found."""
        self._seen_at, self._found = 0.0, ""
        self._stacks: dict[int, str] = {}
        self._stragglers: StragglerWatch | None = None
        self._looked_at = 0.0
        self._awake_since = 0.0
        self._left_out: int | None = None
        """A place that the next start leaves out, to be told."""

    def __enter__(self) -> RankProcesses:
        for number in _PASSED_ON:
            # nohup ignores SIGHUP for the ranks as well.
            if not is_ignored(number):
                self._previous[number] = signal.signal(number, self._pass_on)
        self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        if self._template is not None:
            self._template.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start_all(self, arguments: Sequence[str]) -> None:
        """Start all ranks. What was left of earlier ones, such as where they met, is of no use to these and not found."""
        places = self.places.used
        world_size = len(places)
        self._place = self._folder / f"attempt-{self._count.restarts}"
        self._place.mkdir()
        self._kills = KillCount()
        self._fault, self._seen, self._found, self._stacks = None, [], "", {}
        self._stragglers = StragglerWatch(self._place, range(world_size)) if self._policy is not None else None
        self._looked_at = self._awake_since = time.monotonic()
        # Bound here, so that no other process takes the port before rank 0, in which the store lives, listens there. By
        # itself it would listen at all addresses of this machine, where anybody who reaches it may read and write.
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        self._listener = listener
        # Keys in the store begin with this secret, so that no other user of the machine can write them.
        run_id = secrets.token_hex(16)
        self._preload(world_size)
        for rank, place in enumerate(places):
            # What torchrun would set, over defaults for ranks of one machine, which the user's own variables go before.
            # LOCAL_RANK is the number of the device: where a place was left out it is not the rank's own.
            wanted = _rank_defaults(world_size)
            if "lo" in (name for _, name in socket.if_nameindex()):
                wanted["GLOO_SOCKET_IFNAME"] = "lo"
            environment = {
                **wanted,
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(place),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._listener.getsockname()[1]),
                PARENT: str(os.getpid()),
                GRACE: f"{self._grace_s:g}",
                "TORCHELASTIC_RUN_ID": run_id,
            }
            if self._policy is not None:
                environment[heartbeat.FOLDER] = str(self._place)
            self._started.append(time.monotonic())
            if rank == 0:
                assert self._listener is not None
                environment[STORE_SOCKET] = str(self._listener.fileno())
            # One rank on the terminal: the words of all would be as many copies of the same.
            command = RankCommand(self._module, arguments, environment, str(self._log(rank)) if rank else None)
            process: RankProcess | None = None
            if self._template is not None:
                process = self._template.start(command, lambda: bool(self._asked))
            if process is None:
                self._template = None
                process = start_interpreter(command)
            self._processes.append(process)
            if self._asked:
                process.send_signal(self._asked)

    def _preload(self, world_size: int) -> None:
        """Have a process load what ranks need, if the policy names it and it has not yet for as many ranks."""
        if self._template is not None and self._template.ranks != world_size:
            # Libraries have read by now how many cores a rank has.
            self._template.close()
            self._template = None
        elif self._count.restarts and self._template is None:
            # It has failed before.
            return
        if self._template is None and self._policy is not None and self._policy.preload and can_preload():
            environment = {**_rank_defaults(world_size), **os.environ}
            self._template = RankTemplate(self._policy.preload, environment, world_size)

    def code(self, rank: int) -> int | None:
        """Return the exit code of a rank, the negative number of the signal that ended it, or None while it runs."""
        return self._processes[rank].poll()

    def wait(self) -> int | None:
        """Wait for all ranks; return the first that failed, once the others are stopped, or None where all succeeded."""
        while (failed := self._first_failed()) is None:
            if all(process.returncode == 0 for process in self._processes):
                return None
            # Patience counts from the last request: a second kind of signal grants the time anew.
            self._out_of_patience = bool(self._asked) and time.monotonic() - self._asked_at > self._grace_s
            # Ranks may hang in a collective whose other end is gone: no signal that Python handles reaches them there.
            if self._insisted or self._out_of_patience:
                self._wait_for_all(_LAST_WORDS_S)
                self._signal(signal.SIGKILL)
            elif self._policy is not None and (hung := self._look(self._policy)) is not None:
                return hung
            time.sleep(_POLL_S)
        if self.code(failed) in _STOPPED:
            self._wait_for_all(self._grace_s)
            # Another rank may have failed to write the checkpoint, which is then the failure to report.
            worst = self._first_failed()
            assert worst is not None
            return worst
        if self._policy is not None and not self._found:
            # At once: the others are about to end too, and what they were doing would be lost.
            self._note_fault(self._view())
        # This line comes before those of the other ranks, which can only report a lost connection.
        self._say_who_was_killed(failed)
        self._stop_others()
        if self._policy is None:
            return failed
        # Those that ended after the fault was found were ended by it, unless they say of something worse.
        seen = {view.rank: view for view in self._seen}
        ended = [view for view in self._view() if seen[view.rank].code is not None or view.error is not None]
        first = first_failed(ended, _STOPPED) or seen[failed]
        out_of_memory = first.code == -signal.SIGKILL and self._kills.grew()
        rows = [replace(seen[view.rank], error=view.error, code=view.code) for view in self._view()]
        named = name_fault(
            first,
            rows,
            attempt=self._count.restarts,
            now=self._seen_at,
            out_of_memory=out_of_memory,
            stacks=self._stacks,
        )
        self._fault = replace(named, time=self._found)
        return self._fault.rank

    def _note_fault(self, views: list[RankView]) -> None:
        """Keep what all ranks do now that one of them fails."""
        self._seen, self._seen_at, self._found = views, time.monotonic(), timestamp()
        self._stacks = collect_stacks(self._place, views)

    def _look(self, policy: RestartPolicy) -> int | None:
        """Look at the heartbeats; return the rank that hangs, once it is named and all are ended, or None."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return None
        if now - self._looked_at > _ASLEEP_S:
            self._awake_since = now
        self._looked_at = now
        assert self._stragglers is not None
        self._stragglers.look()
        limits = policy.limits
        if self._asked:
            limits = replace(limits, heartbeat_s=min(limits.heartbeat_s, _STOPPING_S))
        views = self._view()
        # Its process may take seconds to end.
        if not self._found and any(view.error is not None for view in views):
            self._note_fault(views)
        silent = silent_ranks(views, limits, now, self._awake_since)
        if not silent:
            return None
        hung, sentences = blame_silent(self._place, silent, views)
        self._fault = name_fault(
            hung,
            views,
            attempt=self._count.restarts,
            now=now,
            silent=True,
            collectives=sentences,
            stacks=collect_stacks(self._place, views),
        )
        self._seen = views
        write_stderr(self._fault.headline())
        # The one that hangs first: it would not end by itself, and the others end as soon as it is gone.
        self._processes[hung.rank].kill()
        self._stop_others()
        return hung.rank

    def _stop_others(self) -> None:
        """End the ranks that are left after a fault."""
        if self._policy is None:
            # Another rank may know the reason: it gets time to print it.
            self._wait_for_all(_LAST_WORDS_S)
            # They may be writing a checkpoint: killed at once they could not clean up.
            self._signal(signal.SIGTERM)
            self._wait_for_all(_DYING_S)
            return
        self._wait_for_all(_WATCHED_LAST_WORDS_S, heard=True)
        views = [view for view in self._view() if view.code is None]
        saving = {view.rank for view in views if view.beat is not None and view.beat.phase == "checkpoint"}
        for view in views:
            # It waits for the rank that is gone, on a device perhaps, where no signal that Python handles reaches it.
            if view.error is None and view.rank not in saving:
                self._processes[view.rank].kill()
        self._signal(signal.SIGTERM)
        self._wait_for_all(_DYING_S if saving else _CLOSING_S)
        self._end_all()

    def end_attempt(self, failed: int) -> int | None:
        """Report the fault; return the exit code of the command, or None once the ranks may be started again."""
        # A suspended rank that was woken for its stacks may have come to its end before it was ended: it did not end well.
        code = self.code(failed) or 1
        # Nor is one that said what it fails of and was ended, with the others, while it closed what it holds.
        if code < 0 and heartbeat.error_file(self._place, failed).exists():
            code = 1
        # A process ended by a signal has its negative number here, and 128 + the number in a shell.
        code = code if code >= 0 else 128 - code
        # Ranks that ended because somebody asked for it have no fault.
        asked_for = code in _STOPPED or code == 128 + self._asked
        if self._policy is None or self._fault is None or asked_for:
            return code
        self._count.note_fault(self._seen, self.places.used[self._fault.rank])
        backoff_s = self._count.backoff_s
        before, self._memory_limit = self._memory_limit, read_memory_limit(self._policy.run_dir)
        worth = is_worth_restart(self._fault, needs_less=self._memory_limit != before)
        again = self._policy.most > 0 and not self._asked and code != _BAD_USAGE and worth
        if again and self._count.pointless:
            code = GIVEN_UP
            action = (
                f"given up (exit code {GIVEN_UP}): {self._policy.most} restarts in a row have led to no newer checkpoint; "
                "the same command starts again"
            )
        elif again and not self._leave_place(self._fault):
            again = False
            action = "not restarted: no layout is legal for the ranks that are left; the last checkpoint stays"
        elif again:
            after = f" after {backoff_s:g} s" if backoff_s else ""
            who = self._who_begins()
            action = f"restart {self._count.restarts + 1}: {who} again from the newest whole checkpoint{after}"
        else:
            action = "not restarted; the last checkpoint stays"
        fault = replace(self._fault, action=action)
        assert self._policy is not None
        # What a rank said to the user itself needs no second telling.
        if fault.cause != "refused":
            write_stderr(fault.summary())
        problem = try_report(fault, self._policy.run_dir)
        if problem is not None:
            write_stderr(f"warning: {problem}")
        if not again or code == GIVEN_UP:
            return code
        self._processes, self._started = [], []
        if self._listener is not None:
            self._listener.close()
        self._count.restarts += 1
        deadline = time.monotonic() + backoff_s
        while time.monotonic() < deadline and not self._asked:
            time.sleep(_POLL_S)
        # Nothing runs that could save, and what was saved last stays.
        return 128 + self._asked if self._asked else None

    def _leave_place(self, fault: Fault) -> bool:
        """Leave out the place of the rank that failed, where it has failed before; return whether ranks can begin again."""
        assert self._policy is not None
        # With fewer ranks each takes more memory, so that is no way out of having none.
        if not self._policy.layouts or not self._count.same_place or fault.cause == "out of memory":
            return True
        self._left_out = self.places.used[fault.rank]
        return self.places.leave_out(fault.rank)

    def _who_begins(self) -> str:
        if self._left_out is None:
            return "all ranks begin"
        place, self._left_out = self._left_out, None
        layout = " ".join(word.removeprefix("layout.") for word in self.places.words if not word.endswith("=1"))
        return (
            f"place {place} of this machine has failed twice in a row and is left out, {len(self.places.used)} ranks"
            f"{f' ({layout})' if layout else ''} begin"
        )

    def _view(self) -> list[RankView]:
        return [
            view_rank(self._place, rank, process.pid, process.poll(), started)
            for rank, (process, started) in enumerate(zip(self._processes, self._started, strict=True))
        ]

    def _end_all(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def explain(self, failed: int) -> None:
        """Print the last lines of the failed rank, unless they are on the terminal already."""
        code = self.code(failed)
        if not code or code in _STOPPED or code == -self._asked:
            return
        # A wrong run file is wrong on every rank alike: the first has said so.
        if failed and not code == self.code(0) == _BAD_USAGE:
            last_lines = self._log(failed).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            if last_lines:
                write_stderr("\n".join([f"rank {failed} failed:", *last_lines]))

    def _say_who_was_killed(self, failed: int) -> None:
        code = self.code(failed)
        assert code
        if code > 0 or code == -self._asked:
            return
        words = f"rank {failed} was ended by signal {-code} ({signal.strsignal(-code)})"
        if self._out_of_patience:
            words = f"rank {failed} did not stop within {self._grace_s:g} s and was killed; the last checkpoint stays"
        elif -code == signal.SIGKILL and self._kills.grew():
            words = f"rank {failed} was {KILLED_FOR_MEMORY} (signal 9); {LESS_MEMORY}"
        write_stderr(words)

    def _first_failed(self) -> int | None:
        """Return the failed rank that tells most of those that ended at once: killed before failed before stopped."""
        codes = [process.poll() for process in self._processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        return min(failed, key=lambda rank: (codes[rank] in _STOPPED, (codes[rank] or 0) > 0), default=None)

    def _wait_for_all(self, seconds: float, *, heard: bool = False) -> None:
        """Wait `seconds`, or until all ranks have ended. heard: or have said what they fail of."""
        deadline = time.monotonic() + seconds
        while any(
            process.poll() is None and not (heard and heartbeat.error_file(self._place, rank).exists())
            for rank, process in enumerate(self._processes)
        ):
            if self._insisted:
                deadline = min(deadline, self._asked_at + _LAST_WORDS_S)
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number == self._asked
        if again and now - self._asked_at < ONE_WISH_S:
            return
        self._insisted = self._insisted or again
        self._asked, self._asked_at = number, now
        self._signal(number)
        # A rank suspended by SIGSTOP has to continue before it can act on the signal.
        self._signal(signal.SIGCONT)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Suspend the ranks with this process (Ctrl-Z) and continue them with it."""
        self._signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal(signal.SIGCONT)
        # Nobody gave a sign of life meanwhile.
        self._awake_since = time.monotonic()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _log(self, rank: int) -> Path:
        return self._place / f"rank-{rank}.log"


def _rank_defaults(world_size: int) -> dict[str, str]:
    """Return variables for libraries that read them as they are loaded."""
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // world_size)), **passive_waits(os.environ)}
