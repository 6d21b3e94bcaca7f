"""Starts the ranks of one command on this machine, watches them, and starts them again after a fault.

Every rank runs the same command with the variables torchrun would set. The first rank has the terminal. The others write
their errors to files; where one of them is the first to fail, the end of its file is shown. This process computes nothing
and loads no torch: it stays small, and what ends a rank does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.hardware.host import KILLED_FOR_MEMORY, LESS_MEMORY, KillCount, available_cores, is_loopback, passive_waits
from phalanx.launch import heartbeat
from phalanx.launch.collectives import RECORDER_VARIABLES, Collective, read_collectives
from phalanx.launch.faults import (
    Fault,
    NodeEnd,
    RankView,
    blame_silent,
    collect_stacks,
    first_failed,
    name_first,
    silent_ranks,
    timestamp,
    try_report,
    view_rank,
)
from phalanx.launch.parent import GRACE_S, ONE_WISH_S, PARENT, STOP_SIGNALS, STORE_SOCKET, is_ignored
from phalanx.launch.preload import RankCommand, RankProcess, RankTemplate, can_preload, start_interpreter
from phalanx.launch.restart import BAD_USAGE, RankPlaces, RestartPolicy, Restarts
from phalanx.launch.stragglers import OtherRanks, RankTrace, StragglerWatch, read_traces
from phalanx.launch.wall_time import GRACE
from phalanx.node_memory import forget_node_memory
from phalanx.printable import write_stderr

STOPPED_CODES = tuple(128 + number for number in STOP_SIGNALS)
"""Exit codes of a rank that saved and stopped because it was told to; the other ranks are about to do the same."""
CPU_MASKS = "PHALANX_CPU_MASKS"
"""Environment variable with a mask of cores for each device of the node, set by job scripts: ranks run on these."""
LOST = 128 + signal.SIGKILL
"""Exit code after a node is lost: as where a signal killed a rank, so that job scripts begin again."""
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


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks: which of them are on this node, and where all meet."""

    number: int
    """Starts before this one."""
    places: Sequence[int]
    """Place on this machine, the number of a device, of each rank of this node."""
    first_rank: int = 0
    """The first rank of this node; the others follow it."""
    world_size: int = 0
    """Ranks of all nodes; 0 where this is the only one."""
    address: str = "127.0.0.1"
    port: int = 0
    """Where the ranks' store listens; 0 takes a free port of this machine."""
    listener: socket.socket | None = None
    """Listens there, on the node of rank 0."""
    run_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Keys in the store begin with this secret, so that no other user of the machine can write them."""


class OtherNodes(OtherRanks):
    """What a supervisor has to do with those of other nodes: nothing, where its node is the only one."""

    def begin(self, attempt: Attempt, words: Sequence[str]) -> Attempt | None:
        """Have all nodes begin an attempt with `phalanx WORDS`; return this node's part of it, None where none can begin."""
        return attempt

    def look(self) -> bool:
        """Take what other nodes say; return whether the ranks of this node have to end."""
        return False

    def tell_fault(self) -> None:
        """Tell the others that a rank of this node has failed."""

    def collect(self, end: NodeEnd) -> Sequence[NodeEnd]:
        """Return how the attempt ended on each node, once it has on all; end: on this one."""
        return [end]

    def lost_node(self) -> Fault | None:
        """Return the fault of a node that is lost and still has a part in the run, or None."""
        return None

    def explain(self, rank: int) -> None:
        """Have the node of a rank print the last lines of it."""


def launch_ranks(
    arguments: Sequence[str],
    world_size: int,
    module: str = "phalanx",
    *,
    grace_s: float = GRACE_S,
    policy: RestartPolicy | None = None,
    first_device: int = 0,
    preload: Sequence[str] = (),
) -> int:
    """Run `phalanx ARGUMENTS` on `world_size` ranks and return the exit code of the first rank that failed, or 0.

    module: Python module to run in place of `phalanx`. grace_s: seconds after which ranks that were told to stop are killed.
    policy: how ranks with heartbeats are watched, and started again after a fault; None ends after the first fault.
    first_device: number of the first rank's device on this machine; the others have those behind it. preload: modules that
    ranks find loaded where no policy names any.

    Each of STOP_SIGNALS reaches every rank once; ranks then save and stop. When a rank fails, the others are stopped. No
    rank outlives the call. Ranks find this process's number in the variable `parent.PARENT`. Returns GIVEN_UP where ranks
    were started again and again from the same checkpoint.
    """
    places = RankPlaces(world_size, {} if policy is None else policy.layouts, first_device)
    restarts = Restarts(policy or RestartPolicy(), places, lambda place: f"place {place} of this machine")
    with RankProcesses(module, grace_s, policy, preload) as ranks:
        return run_attempts(ranks, restarts, arguments, lambda: Attempt(restarts.done, list(places.used)), OtherNodes())


def run_attempts(
    ranks: RankProcesses,
    restarts: Restarts,
    arguments: Sequence[str],
    next_attempt: Callable[[], Attempt],
    others: OtherNodes,
) -> int:
    """Start `ranks`, and again after each fault as `restarts` decides; return the exit code of the command."""
    code: int | None = None
    while code is None:
        words = [*arguments, *restarts.words]
        attempt = others.begin(next_attempt(), words)
        ends = [] if attempt is None else others.collect(ranks.run(words, attempt, others))
        code = _conclude(ranks, restarts, ends, others)
    if code:
        ranks.forget_copies()
    return code


def _conclude(ranks: RankProcesses, restarts: Restarts, ends: Sequence[NodeEnd], others: OtherNodes) -> int | None:
    """Report what failed in an attempt; return the exit code of the command, or None once ranks may be started again."""
    fault, code = others.lost_node(), LOST
    if fault is None and all(view.code == 0 for end in ends for view in end.last):
        # Nothing began because somebody asked for the end, or all has ended well.
        return 0 if ends else 128 + ranks.asked
    if fault is None:
        failed = first_failed([view for end in ends for view in end.views], STOPPED_CODES)
        if ranks.watched and (failed is None or failed.code not in STOPPED_CODES):
            fault, failed = name_first(ends, STOPPED_CODES, restarts.done)
        assert failed is not None
        ranks.explain(failed.rank)
        others.explain(failed.rank)
        code = _shell_code(failed)
        # Ranks that ended because somebody asked for it have no fault.
        if fault is None or code in STOPPED_CODES or code == 128 + ranks.asked:
            return code
    resumed = max((view.beat.resumed for end in ends for view in end.views if view.beat is not None), default=-1)
    action, decided = restarts.decide(fault, code, resumed, asked=bool(ranks.asked))
    _report(replace(fault, action=action), restarts.policy.run_dir)
    if decided is not None:
        return decided
    deadline = time.monotonic() + restarts.backoff_s
    while time.monotonic() < deadline and not ranks.asked:
        others.look()
        time.sleep(_POLL_S)
    # Nothing runs that could save, and what was saved last stays.
    return 128 + ranks.asked if ranks.asked else None


def _shell_code(failed: RankView) -> int:
    """Return the exit code of a command whose rank `failed` first, as a shell has it."""
    # A suspended rank that was woken for its stacks may have come to its end before it was ended: it did not end well.
    code = failed.code or 1
    # Nor is one that said what it fails of and was ended, with the others, while it closed what it holds.
    if code < 0 and failed.error is not None:
        code = 1
    # A process ended by a signal has its negative number here, and 128 + the number in a shell.
    return code if code >= 0 else 128 - code


def _report(fault: Fault, run_dir: Path | None) -> None:
    # What a rank said to the user itself needs no second telling.
    if fault.cause != "refused":
        write_stderr(fault.summary())
    problem = try_report(fault, run_dir)
    if problem is not None:
        write_stderr(f"warning: {problem}")


class RankProcesses:
    """The processes of all ranks, and the signals that reach them through this process.

    Each rank has a process group of its own. A terminal, or `timeout`, signals the whole group of a command: ranks
    in it would be signalled twice, directly and by this process, and the second signal ends a rank without a checkpoint.
    """

    def __init__(self, module: str, grace_s: float, policy: RestartPolicy | None, preload: Sequence[str] = ()) -> None:
        """Begin without any. See `launch_ranks`."""
        self._module = module
        self._modules = preload if policy is None else policy.preload
        self._grace_s = grace_s
        self._policy = policy
        # The kernel counts its kills for memory; a rank's exit code says only that it was signal 9.
        self._kills = KillCount()
        self._out_of_patience = False
        self._processes: dict[int, RankProcess] = {}
        self._started: dict[int, float] = {}
        self._template: RankTemplate | None = None
        self._attempts = 0
        self._previous: dict[int, Any] = {}
        self.asked = 0
        """Number of the signal that asked the run to stop last; 0 before."""
        self._asked_at = 0.0
        self._signalled = False
        self.insisted = False
        """Whether it came twice: ranks are then ended at once."""
        self._listener: socket.socket | None = None
        self._seen: list[RankView] = []
        """All ranks when the fault was found."""
        self._seen_at, self._found = 0.0, ""
        self._stacks: dict[int, str] = {}
        self._silent: list[int] = []
        self._stragglers: StragglerWatch | None = None
        self._looked_at = 0.0
        self._awake_since = 0.0

    @property
    def watched(self) -> bool:
        """Whether ranks have heartbeats."""
        return self._policy is not None

    def __enter__(self) -> RankProcesses:
        self._temporary = tempfile.TemporaryDirectory(prefix="phalanx-ranks-")
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
        self._temporary.cleanup()

    def run(self, arguments: Sequence[str], attempt: Attempt, others: OtherNodes) -> NodeEnd:
        """Start the ranks of this node with `phalanx ARGUMENTS` and wait until they have ended, or those of `others` do."""
        self._start(arguments, attempt, others)
        self._attempts += 1
        return self._wait(others)

    def _start(self, arguments: Sequence[str], attempt: Attempt, others: OtherNodes) -> None:
        """Start all ranks. What was left of earlier ones, such as where they met, is of no use to these and not found."""
        on_node = len(attempt.places)
        ranks = range(attempt.first_rank, attempt.first_rank + on_node)
        self._place = Path(self._temporary.name) / f"attempt-{attempt.number}"
        self._place.mkdir()
        self._kills = KillCount()
        self._processes, self._started = {}, {}
        self._seen, self._seen_at, self._found, self._stacks, self._silent = [], 0.0, "", {}, []
        # Where the first rank is, all are compared.
        compares = self.watched and attempt.first_rank == 0
        self._stragglers = StragglerWatch(self._place, ranks, attempt.world_size, others) if compares else None
        self._looked_at = self._awake_since = time.monotonic()
        if not attempt.port:
            # Bound here, so that no other process takes the port before rank 0, in which the store lives, listens there. By
            # itself it would listen at all addresses of this machine, where anybody who reaches it may read and write.
            listener = socket.create_server((attempt.address, 0), backlog=socket.SOMAXCONN)
            attempt = replace(attempt, port=listener.getsockname()[1], listener=listener)
        self._preload(on_node)
        if self._listener is not None:
            self._listener.close()
        self._listener = attempt.listener
        for rank, place in zip(ranks, attempt.places, strict=True):
            self._start_rank(rank, place, arguments, attempt)

    def _start_rank(self, rank: int, place: int, arguments: Sequence[str], attempt: Attempt) -> None:
        on_node = len(attempt.places)
        # What torchrun would set, over defaults which the user's own variables go before. LOCAL_RANK is the number of the
        # device: where a place was left out it is not the rank's own.
        wanted = _rank_defaults(on_node)
        if is_loopback(attempt.address) and "lo" in (name for _, name in socket.if_nameindex()):
            wanted["GLOO_SOCKET_IFNAME"] = "lo"
        environment = {
            **wanted,
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(place),
            "WORLD_SIZE": str(attempt.world_size or on_node),
            "LOCAL_WORLD_SIZE": str(on_node),
            "MASTER_ADDR": attempt.address,
            "MASTER_PORT": str(attempt.port),
            PARENT: str(os.getpid()),
            GRACE: f"{self._grace_s:g}",
            "TORCHELASTIC_RUN_ID": attempt.run_id,
        }
        if self.watched:
            environment[heartbeat.FOLDER] = str(self._place)
        if rank == 0:
            assert attempt.listener is not None
            environment[STORE_SOCKET] = str(attempt.listener.fileno())
        self._started[rank] = time.monotonic()
        # One rank on the terminal: the words of all would be as many copies of the same.
        command = RankCommand(self._module, arguments, environment, str(self._log(rank)) if rank else None)
        process: RankProcess | None = None
        if self._template is not None:
            process = self._template.start(command, lambda: bool(self.asked))
        if process is None:
            self._template = None
            process = start_interpreter(command)
        self._processes[rank] = process
        _bind(process.pid, place)
        if self.asked:
            process.send_signal(self.asked)

    def _preload(self, world_size: int) -> None:
        """Have a process load what ranks need, if that is known and it has not yet for as many ranks."""
        if self._template is not None and self._template.ranks != world_size:
            # Libraries have read by now how many cores a rank has.
            self._template.close()
            self._template = None
        elif self._attempts and self._template is None:
            # It has failed before.
            return
        if self._template is None and self._modules and can_preload():
            environment = {**_rank_defaults(world_size), **os.environ}
            self._template = RankTemplate(self._modules, environment, world_size)

    def _wait(self, others: OtherNodes) -> NodeEnd:
        """Wait for all ranks; once one has failed, here or on another node, stop the others. Return how they ended."""
        while (failed := self._first_failed()) is None:
            if all(process.returncode == 0 for process in self._processes.values()):
                return self._end()
            # Patience counts from the last request: a second kind of signal grants the time anew.
            self._out_of_patience = bool(self.asked) and time.monotonic() - self._asked_at > self._grace_s
            # Ranks may hang in a collective whose other end is gone: no signal that Python handles reaches them there.
            if self.insisted or self._out_of_patience:
                self._wait_for_all(_LAST_WORDS_S)
                self._signal(signal.SIGKILL)
            elif others.look():
                # What hangs on this node has been silent for nearly as long as what another node found.
                return self._end_silent(self._silent_ranks(share=0.5))
            elif silent := self._look():
                others.tell_fault()
                return self._end_silent(silent)
            time.sleep(_POLL_S)
        if self._processes[failed].poll() in STOPPED_CODES:
            # Another rank may have failed to write the checkpoint, which is then the failure to report.
            self._wait_for_all(self._grace_s)
            return self._end()
        others.tell_fault()
        if not self._found:
            # At once: the others are about to end too, and what they were doing would be lost.
            self._note_fault(self._view())
        # This line comes before those of the other ranks, which can only report a lost connection.
        self._say_who_was_killed(failed)
        self._stop_others()
        return self._end()

    def _end(self) -> NodeEnd:
        """Return how the ranks ended."""
        last = tuple(self._view())
        return NodeEnd(
            views=tuple(self._seen) or last,
            last=last,
            seen_at=self._seen_at or time.monotonic(),
            found=self._found or timestamp(),
            silent=tuple(self._silent),
            killed_for_memory=self._kills.grew(),
            stacks=self._stacks,
            collectives=self._last_collectives() if self.watched else {},
        )

    def _last_collectives(self) -> dict[int, list[Collective]]:
        return {rank: read_collectives(self._place, rank) for rank in self._processes}

    def read_traces(self, most: int) -> dict[int, RankTrace]:
        """Return what the ranks of this node did last. most: collectives of each."""
        return read_traces(self._place, list(self._processes), most) if self._processes else {}

    def _note_fault(self, views: list[RankView]) -> None:
        """Keep what all ranks do now that one of them fails."""
        self._seen, self._seen_at, self._found = views, time.monotonic(), timestamp()
        self._stacks = collect_stacks(self._place, views) if self.watched else {}

    def _look(self) -> list[RankView]:
        """Look at the heartbeats, if there are any; return the ranks that are silent for too long."""
        now = time.monotonic()
        if not self.watched or now - self._looked_at < _LOOK_S:
            return []
        if now - self._looked_at > _ASLEEP_S:
            self._awake_since = now
        self._looked_at = now
        if self._stragglers is not None:
            self._stragglers.look()
        views = self._view()
        # Its process may take seconds to end.
        if not self._found and any(view.error is not None for view in views):
            self._note_fault(views)
        return self._silent_ranks()

    def _silent_ranks(self, share: float = 1.0) -> list[RankView]:
        """Return the ranks that gave no sign of life within this share of their limits."""
        assert self._policy is not None
        limits = self._policy.limits
        if self.asked:
            limits = replace(limits, heartbeat_s=min(limits.heartbeat_s, _STOPPING_S))
        limits = replace(limits, heartbeat_s=share * limits.heartbeat_s)
        return silent_ranks(self._view(), limits, time.monotonic(), self._awake_since)

    def _end_silent(self, silent: Sequence[RankView]) -> NodeEnd:
        """End all ranks, some of which are `silent`. The one that hangs goes first: the others then end by themselves."""
        self._silent = [view.rank for view in silent]
        self._note_fault(self._view())
        if silent:
            hung, _ = blame_silent(self._last_collectives(), silent, self._seen)
            self._processes[hung.rank].kill()
        self._stop_others()
        return self._end()

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

    def _view(self) -> list[RankView]:
        return [
            view_rank(self._place, rank, process.pid, process.poll(), self._started[rank])
            for rank, process in self._processes.items()
        ]

    def _end_all(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def explain(self, failed: int) -> None:
        """Print the last lines of a rank that failed, if it is of this node, unless they are on the terminal already."""
        code = self._processes[failed].poll() if failed in self._processes else None
        if not code or code in STOPPED_CODES or code == -self.asked:
            return
        # A wrong run file is wrong on every rank alike: the first has said so.
        if failed and not (code == BAD_USAGE and 0 in self._processes and self._processes[0].poll() == BAD_USAGE):
            last_lines = self._log(failed).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            if last_lines:
                write_stderr("\n".join([f"rank {failed} failed:", *last_lines]))

    def _say_who_was_killed(self, failed: int) -> None:
        code = self._processes[failed].poll()
        assert code
        if code > 0 or code == -self.asked:
            return
        words = f"rank {failed} was ended by signal {-code} ({signal.strsignal(-code)})"
        if self._out_of_patience:
            words = f"rank {failed} did not stop within {self._grace_s:g} s and was killed; the last checkpoint stays"
        elif -code == signal.SIGKILL and self._kills.grew():
            words = f"rank {failed} was {KILLED_FOR_MEMORY} (signal 9); {LESS_MEMORY}"
        write_stderr(words)

    def _first_failed(self) -> int | None:
        """Return the failed rank that tells most of those that ended at once: killed before failed before stopped."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        failed = [rank for rank, code in codes.items() if code]
        return min(failed, key=lambda rank: (codes[rank] in STOPPED_CODES, (codes[rank] or 0) > 0), default=None)

    def _wait_for_all(self, seconds: float, *, heard: bool = False) -> None:
        """Wait `seconds`, or until all ranks have ended. heard: or have said what they fail of."""
        deadline = time.monotonic() + seconds
        while any(
            process.poll() is None and not (heard and heartbeat.error_file(self._place, rank).exists())
            for rank, process in self._processes.items()
        ):
            if self.insisted:
                deadline = min(deadline, self._asked_at + _LAST_WORDS_S)
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        signalled, self._signalled = self._signalled, True
        again = number == self.asked
        # Where another node has asked already, a scheduler's signal to this one is the same wish, however late it comes.
        if not again or (signalled and time.monotonic() - self._asked_at >= ONE_WISH_S):
            self.ask(number, insist=again)

    def ask(self, number: int, *, insist: bool) -> None:
        """Ask all ranks by the signal `number` to save and stop. insist: they were asked before, and are to end at once."""
        self.insisted = self.insisted or insist
        self.asked, self._asked_at = number, time.monotonic()
        self._signal(number)
        # A rank suspended by SIGSTOP has to continue before it can act on the signal.
        self._signal(signal.SIGCONT)

    def forget_copies(self) -> None:
        """Free the memory that copies of the ranks' state take on this node: nobody starts them again."""
        if self._policy is not None and self._policy.run_dir is not None:
            forget_node_memory(self._policy.run_dir)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Suspend the ranks with this process (Ctrl-Z) and continue them with it."""
        self._signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal(signal.SIGCONT)
        # Nobody gave a sign of life meanwhile.
        self._awake_since = time.monotonic()

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def _log(self, rank: int) -> Path:
        return self._place / f"rank-{rank}.log"


def _rank_defaults(world_size: int) -> dict[str, str]:
    """Return variables for libraries that read them as they are loaded."""
    threads = str(max(1, available_cores() // world_size))
    return {"OMP_NUM_THREADS": threads, **passive_waits(os.environ), **RECORDER_VARIABLES}


def _bind(pid: int, place: int) -> None:
    """Have a rank that was just started run on the cores of its place, where a job script names them."""
    masks = os.environ.get(CPU_MASKS, "").split(",")
    if masks[0] and place < len(masks) and hasattr(os, "sched_setaffinity"):
        mask = int(masks[place], 16)
        # A job that has not got these cores trains all the same, on those that it has.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, {core for core in range(mask.bit_length()) if mask >> core & 1})
