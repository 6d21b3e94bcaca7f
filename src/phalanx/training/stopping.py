"""How training ends before its last step: in good order after a signal, or with a failure explained to the user."""

from __future__ import annotations

import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import Interrupted, PhalanxError
from phalanx.files import write_atomically
from phalanx.hardware.host import LESS_MEMORY
from phalanx.launch.faults import Cause
from phalanx.launch.heartbeat import Heartbeat
from phalanx.launch.parent import ONE_WISH_S, STOP_SIGNALS, is_ignored
from phalanx.layout.mesh import Ranks

DIRECTORY_GONE = 1000
"""Stands for a signal's number where the run directory is gone and no further step can be kept. Outranks signals."""
TIME_IS_UP = 999
"""Stands for a signal's number where the wall time leaves room for the last checkpoint alone. Outranks signals too."""


class StopRequest:
    """Turns the first of `STOP_SIGNALS` into a request to stop after the current step; a second one stops at once.

    Signals within `ONE_WISH_S` seconds of the first count as the same request: launchers send several.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        """The request, by a signal's number or what stands for one; 0 while there is none."""
        self._asked_at: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread set handlers; elsewhere (a trial in a thread) nobody can ask.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if not is_ignored(number):
                    self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            # The run may have asked itself by now: a scheduler's signal behind that is no second wish.
            self.signal_number, self._asked_at = self.signal_number or number, now
        elif now - self._asked_at >= ONE_WISH_S:
            # The handler from before ends the process at once, which is what a repeated signal asks for.
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)

    def agree(self, device: torch.device) -> int:
        """Return the signal that any rank was sent, or 0; the same answer on every rank."""
        if not dist.is_initialized():
            return self.signal_number
        # The largest number wins, so that all ranks name the same signal; what stands for one is above all of them.
        flag = torch.tensor(self.signal_number, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag)


_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""What libraries say of a request for memory that was refused."""
_NO_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
)
"""What gloo and the store say when another rank has ended or does not answer."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is a request for memory that was refused, on a device or on the host."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(said in words for said in _NO_MEMORY)


def lost_a_rank(error: BaseException) -> bool:
    """Return whether `error` is a connection to another rank that broke or stayed silent."""
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _NO_PEER)


def name_failure(error: BaseException) -> Cause:
    """Return the kind of failure that `error` is, by itself or by what it was raised from."""
    chain = _chain_causes(error)
    if any(ran_out_of_memory(one) for one in chain):
        return "out of memory"
    # Of the store too, which the first rank takes with it: its errors are all of one kind.
    if any(lost_a_rank(one) or isinstance(one, dist.DistError) for one in chain):
        return "lost link"
    return "refused" if isinstance(error, PhalanxError) else "exception"


def _chain_causes(error: BaseException) -> list[BaseException]:
    """Return `error` and what it was raised from, the last cause last."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    return chain


@contextmanager
def report_failure(heartbeat: Heartbeat) -> Iterator[None]:
    """Have whoever watches this rank know at once what it fails of: its process may take seconds to end."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        heartbeat.fail(name_failure(error), error)
        raise


@contextmanager
def explain_failures(
    ranks: Ranks,
    stage: str,
    run_dir: Path,
    moment: Callable[[], str],
    save_memory: Callable[[], str] = lambda: LESS_MEMORY,
) -> Iterator[None]:
    """Turn lack of memory and a lost rank into PhalanxErrors that say where they happened and what to change.

    stage: where this rank is in a pipeline, in words, or empty. moment: says what is being done. save_memory: does something
    about lack of memory, and says what. The traceback goes to a file of this rank in `run_dir`.
    """
    try:
        yield
    # A message that is meant for the user already needs no explanation.
    except PhalanxError:
        raise
    except (RuntimeError, MemoryError) as error:
        # A pipeline wraps what its stages raise.
        cause = next((one for one in _chain_causes(error) if ran_out_of_memory(one)), error)
        no_memory = ran_out_of_memory(cause)
        if not no_memory and not (ranks.world_size > 1 and lost_a_rank(error)):
            raise
        where = f"rank {ranks.rank}{stage}" if ranks.world_size > 1 else "training"
        log = write_traceback(run_dir, ranks.rank)
        # PyTorch's messages begin with the place in its own sources, and go on with a C++ stack.
        said = re.sub(r"^\[[^\]]*\] *", "", (str(cause) or type(cause).__name__).strip().partition("\n")[0])
        # Both messages name the traceback's file: the terminal shows the reason alone.
        if no_memory:
            raise PhalanxError(
                f"{where} is out of memory in {moment()}: {said}\n{save_memory()}\ntraceback: {log}"
            ) from error
        raise PhalanxError(
            f"{where} lost another rank in {moment()}: {said}\nthat one, or whoever started it, says what ended it; "
            f"traceback: {log}"
        ) from error


def write_traceback(run_dir: Path, rank: int) -> Path:
    """Write the traceback of the exception being handled to a file of this rank in `run_dir`; return its path."""
    log = run_dir / f"failure-rank-{rank}.log"
    write_atomically(log, traceback.format_exc())
    return log
