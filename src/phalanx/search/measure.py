"""A trial's own processes: `python -m phalanx.search launch|rank FOLDER`.

`launch` starts the ranks on this machine; `rank` is one of them, started by that or by srun. A rank trains the few steps of
the run file in FOLDER with the real training step, and leaves there what it measured, or why it could not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from phalanx import compat
from phalanx.cluster.device import choose_device
from phalanx.cluster.local_launch import launch_ranks
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import write_atomically
from phalanx.layout.mesh import Ranks, ranks_from_environment
from phalanx.search.process import PARENT
from phalanx.train.start import train

MEMORY_LIMIT = "PHALANX_TRIAL_MEMORY"
"""Variable that holds the most bytes of host memory that a rank may take."""
RUN_FILE, TRAINED = "run.yaml", "run"
"""Names in a trial's folder: what is run, and the run directory."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""What libraries say of a request for memory that was refused."""


def main(arguments: list[str]) -> int:
    """Run a trial, or one rank of it; returns the exit code."""
    what, folder = arguments[0], Path(arguments[1])
    if what == "launch":
        # The ranks' parent is this process.
        os.environ[PARENT] = str(os.getpid())
        return launch_ranks(["rank", str(folder)], int(arguments[2]), module="phalanx.search")
    return _rank(folder)


def _rank(folder: Path) -> int:
    # Asked to say where it stands, a rank that hangs writes its stacks and ends, without a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGQUIT, chain=True)
    if limit := os.environ.get(MEMORY_LIMIT):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    ranks = ranks_from_environment()
    try:
        run = load_run(folder / RUN_FILE)
        train(run, folder / TRAINED)
        _leave(folder, ranks, {"cause": "ok", "memory_bytes": _peak(run.cluster.device, ranks)})
    except Exception as error:
        # The others may be waiting for this rank inside a collective: what it leaves behind must be written first.
        _leave(folder, ranks, {"cause": cause_of(error), "words": f"rank {ranks.rank}: {error}"})
        if not isinstance(error, PhalanxError):
            traceback.print_exc()
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        # Not an orderly end: groups that were left in the middle of a collective may never let go.
        os._exit(1)
    return 0


def cause_of(error: BaseException) -> str:
    """Why a rank failed, in the words of `search.trials`."""
    if isinstance(error, ConfigError):
        return "refused"
    words = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(said in words for said in _NO_MEMORY):
        return "out_of_memory"
    if isinstance(error, PhalanxError) and "is not finite" in words:
        return "non_finite"
    return "crash"


def _peak(device: str, ranks: Ranks) -> int | None:
    """Most bytes of live tensors so far; None on a CPU, which does not count."""
    return compat.memory_statistics(choose_device(device, ranks.local_rank)).get("peak")


def _leave(folder: Path, ranks: Ranks, found: dict[str, Any]) -> None:
    write_atomically(folder / f"rank-{ranks.rank}.json", json.dumps(found))
