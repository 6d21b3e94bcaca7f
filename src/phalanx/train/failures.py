"""What ended training, in words for the user: memory that ran out, or another rank that is gone."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from phalanx.errors import PhalanxError
from phalanx.files import write_atomically
from phalanx.hardware.host import LESS_MEMORY
from phalanx.layout.mesh import Ranks

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


@contextmanager
def explain_failures(ranks: Ranks, stage: str, run_dir: Path, moment: Callable[[], str]) -> Iterator[None]:
    """Turn the two failures above into PhalanxErrors that say where they happened and what to change.

    stage: where this rank is in a pipeline, in words, or empty. moment: what is being done. The traceback goes to a file of
    this rank in `run_dir`.
    """
    try:
        yield
    except PhalanxError:
        raise
    except (RuntimeError, MemoryError) as error:
        no_memory = ran_out_of_memory(error)
        if not no_memory and not (ranks.world_size > 1 and lost_a_rank(error)):
            raise
        where = f"rank {ranks.rank}{stage}" if ranks.world_size > 1 else "training"
        log = run_dir / f"failure-rank-{ranks.rank}.log"
        write_atomically(log, traceback.format_exc())
        said = re.sub(r"^\[[^\]]*\] *", "", (str(error) or type(error).__name__).strip().partition("\n")[0])
        if no_memory:
            raise PhalanxError(
                f"{where} is out of memory in {moment()}: {said}\n{LESS_MEMORY}\ntraceback: {log}"
            ) from error
        raise PhalanxError(
            f"{where} lost another rank in {moment()}: {said}\nthat one, or whoever started it, says what ended it; "
            f"traceback: {log}"
        ) from error
