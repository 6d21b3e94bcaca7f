"""A second process that computes beside this one: a copy of it, so that it has loaded what this one has.

It lives as long as the context in which it is wanted, and only ever saves time: whatever it cannot do, this process does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from phalanx.cost.shelf import open_shelf

Task = TypeVar("Task")
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

_second: Connection | None = None
"""To the second process, while there is one."""
_process: BaseProcess | None = None
_wanted = False
"""Whether one may be started: it begins with its first task, as a copy of what this one knows by then."""


@contextlib.contextmanager
def second_process() -> Iterator[None]:
    """Have a second process in here when there is work for it, a core, and this one may be copied."""
    global _wanted
    if _wanted or _process is not None:
        yield
        return
    _wanted = True
    try:
        yield
    finally:
        _wanted = False
        _dismiss()
        _end()


def _end() -> None:
    global _process
    process, _process = _process, None
    if process is not None and process.pid is not None:
        process.kill()
        process.join()


def _present() -> Connection | None:
    """To the second process, which is started where it may be and is not there yet."""
    global _second, _process, _wanted
    if not _wanted:
        return _second
    _wanted = False
    if not _can_copy():
        return None
    mine, theirs = multiprocessing.Pipe()
    _process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs, mine), daemon=True)
    with warnings.catch_warnings():
        # Threads that numeric libraries start when they are loaded hold no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            _process.start()
            _second = mine
        except OSError:
            # No memory or no number for another process.
            mine.close()
    theirs.close()
    return _second


def compute(function: Callable[[Task], Result], here: Sequence[Task], there: Sequence[Task]) -> list[Result]:
    """The results of `here`, computed by this process, then those of `there`, computed by the second one meanwhile.

    Raises what `function` raises. `function` is one of a module, `there` and its results can be pickled.
    """
    second = _present() if there else None
    if second is None:
        return [function(task) for task in (*here, *there)]
    with contextlib.suppress(OSError):
        second.send((function, there))
    try:
        results = [function(task) for task in here]
    except BaseException:
        # Nobody is left to take the answer that is on its way.
        _dismiss()
        raise
    try:
        results += second.recv()
    except (EOFError, OSError):
        # What ended the second process may be a task's own failure, which is raised here then.
        _dismiss()
        results += [function(task) for task in there]
    return results


class SharedMemo(Generic[Key, Result]):
    """A slow function's results, each computed once, by either process, or found on the shelf that is open."""

    def __init__(
        self,
        function: Callable[[Key], Result],
        group: Callable[[Key], Hashable],
        effort: Callable[[Key, bool], int],
        prepare: Callable[[], None] = lambda: None,
        *,
        shelved: bool = True,
    ) -> None:
        """group: tasks of one group share work that each process would have to do anew; None stands alone. effort: what a
        task takes, and whether it is the first of its group. prepare: what all tasks need, done before the first. shelved:
        whether results are worth a file each."""
        self.function = function
        self.known: dict[Key, Result] = {}
        self._group = group
        self._effort = effort
        self._prepare = prepare
        self._shelved = shelved
        self._owners: dict[Hashable, int] = {}
        """The process that did the common work of a group: 0 for this one, 1 for the second."""

    def __call__(self, task: Key) -> Result:
        """Its result."""
        if task not in self.known:
            self.compute([task])
        return self.known[task]

    def compute(self, tasks: Iterable[Key]) -> None:
        """Compute those that are not known yet, in both processes at once."""
        missing = [task for task in dict.fromkeys(tasks) if task not in self.known]
        kept = open_shelf() if self._shelved else None
        if kept is not None and missing:
            self.known.update(kept.find(missing))
            missing = [task for task in missing if task not in self.known]
        if not missing:
            return
        # Before there is a second process, which then need not do the same.
        self._prepare()
        here, there = self._dealt(missing) if _present() else (missing, [])
        found = dict(zip((*here, *there), compute(self.function, here, there), strict=True))
        self.known.update(found)
        if kept is not None:
            kept.keep(found)

    def _dealt(self, tasks: Sequence[Key]) -> tuple[list[Key], list[Key]]:
        """(tasks for this process, tasks for the second one): groups go where they are known, what takes longest first."""
        lots: dict[Hashable, list[Key]] = {}
        for task in tasks:
            group = self._group(task)
            lots.setdefault(task if group is None else group, []).append(task)
        owned = {name: self._owners[name] for name in lots if name in self._owners}
        efforts = {
            name: sum(self._effort(task, name not in owned and place == 0) for place, task in enumerate(lot))
            for name, lot in lots.items()
        }
        dealt = deal(efforts, owned)
        self._owners |= {name: place for name, place in dealt.items() if self._group(lots[name][0]) is not None}
        here, there = ([task for name in lots if dealt[name] == place for task in lots[name]] for place in (0, 1))
        return here, there


def deal(efforts: dict[Any, int], owned: dict[Any, int] | None = None) -> dict[Any, int]:
    """Which of two processes does what, 0 or 1, so that both take about equally long. owned: where that is settled."""
    dealt = dict(owned or {})
    sums = [sum(efforts[name] for name, place in dealt.items() if place == each) for each in (0, 1)]
    for name in sorted((name for name in efforts if name not in dealt), key=lambda name: -efforts[name]):
        dealt[name] = int(sums[1] < sums[0])
        sums[dealt[name]] += efforts[name]
    return dealt


def _dismiss() -> None:
    global _second
    if _second is not None:
        _second.close()
    _second = None


def _serve(connection: Connection, other: Connection) -> None:
    """The second process: answers until nobody asks any more, or a task fails."""
    global _second, _process
    _second = _process = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    other.close()
    with contextlib.suppress(Exception):
        while True:
            function, tasks = connection.recv()
            connection.send([function(task) for task in tasks])


def _can_copy() -> bool:
    """Whether there is a second core, and no other thread of ours that a copy of the process would lack."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1
