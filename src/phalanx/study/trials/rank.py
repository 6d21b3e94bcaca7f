"""A trial's own processes: `python -m phalanx.study.trials launch|rank FOLDER`.

`launch` starts the ranks on this machine (see `study.trials.__main__`); `rank` is one of them, started by that or by
srun. A rank
trains the run file in FOLDER with the real trainer, all of it or up to some step, and leaves there what it measured, or why
it could not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.config.load import load_run
from phalanx.errors import ConfigError, Interrupted, PhalanxError
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device
from phalanx.layout.mesh import Ranks, ranks_from_environment
from phalanx.torch_compat import common as compat
from phalanx.train.start import train
from phalanx.train.stopping import ran_out_of_memory

MEMORY_LIMIT = "PHALANX_TRIAL_MEMORY"
"""Variable that holds the most bytes of host memory that a rank may take."""
CORES = "PHALANX_TRIAL_CORES"
"""Variable that holds the numbers of the CPU cores that a rank may use, with commas between."""
RUN_FILE, TRAINED, PART_FILE = "run.yaml", "run", "part.json"
"""Names in a trial's folder: what is run, the run directory, and which part of the run it is."""


@dataclass(frozen=True)
class Part:
    """Which part of a run a trial's processes train, where it is not all of it in a folder of its own."""

    run_dir: str
    until: int
    """Step to end at."""

    def write(self, folder: Path) -> None:
        """Leave word of it in a trial's folder."""
        write_atomically(folder / PART_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Part | None:
        """What `write` left; None where it did not."""
        file = folder / PART_FILE
        return cls(**json.loads(file.read_text())) if file.exists() else None


def main(folder_name: str) -> int:
    """Run one rank of the trial in this folder; returns the exit code."""
    folder = Path(folder_name)
    # Asked to say where it stands, a rank that hangs writes its stacks and ends, without a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGQUIT, chain=True)
    if limit := os.environ.get(MEMORY_LIMIT):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    ranks = ranks_from_environment()
    try:
        run, part = load_run(folder / RUN_FILE), Part.read(folder)
        train(run, folder / TRAINED if part is None else Path(part.run_dir), until=part.until if part else None)
        _leave(folder, ranks, {"cause": "ok", **_memory(run.cluster.device, ranks)})
    except Interrupted as stopped:
        _leave(folder, ranks, {"cause": "interrupted", "words": str(stopped)})
        return stopped.exit_code
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
    """Why a rank failed, in the words of `study.trials.trial`."""
    if isinstance(error, ConfigError):
        return "refused"
    if ran_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, PhalanxError) and "is not finite" in str(error):
        return "non_finite"
    return "crash"


def _memory(device: str, ranks: Ranks) -> dict[str, int | None]:
    """Most bytes of live tensors on the device so far, None on a CPU, which does not count; and of this process."""
    peak = compat.memory_statistics(choose_device(device, ranks.local_rank)).get("peak")
    # Linux counts in units of 1024 bytes.
    return {"memory_bytes": peak, "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _leave(folder: Path, ranks: Ranks, found: dict[str, Any]) -> None:
    write_atomically(folder / f"rank-{ranks.rank}.json", json.dumps({**found, "ended": time.time()}))
