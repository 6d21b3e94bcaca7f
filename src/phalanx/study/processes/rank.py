"""One rank of a trial: trains the run file in the trial's folder and reports what it measured, or why it failed.

The rank runs the real trainer, for the whole run or up to a step. `python -m phalanx.study.processes rank FOLDER` runs it.
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
from pathlib import Path
from typing import Any

import torch

from phalanx.config.load import load_run
from phalanx.errors import ConfigError, Interrupted, PhalanxError
from phalanx.files import write_atomically
from phalanx.hardware.device import choose_device
from phalanx.layout.mesh import ranks_from_environment
from phalanx.printable import write_stderr
from phalanx.study.processes.trial_files import CORES, FIRST_DEVICE, MEMORY_LIMIT, RUN_FILE, TRAINED, Part
from phalanx.torch_compat import common as compat
from phalanx.training.start import train
from phalanx.training.stopping import ran_out_of_memory


def run_rank(folder_name: str) -> int:
    """Run one rank of the trial in this folder. Returns the exit code."""
    folder = Path(folder_name)
    # A rank that hangs is sent SIGQUIT at the time limit: it writes its stacks and ends, without a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGQUIT, chain=True)
    # Allocations then fail in this rank, with an error that says so, before the kernel kills some process of the host.
    if limit := os.environ.get(MEMORY_LIMIT):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    take_device()
    ranks = ranks_from_environment()
    # The rank's report is a file and no message: whoever started it may be gone when it is written.

    def report(**found: Any) -> None:
        write_atomically(folder / f"rank-{ranks.rank}.json", json.dumps({**found, "ended": time.time()}))

    try:
        run, part = load_run(folder / RUN_FILE), Part.read(folder)
        train(run, folder / TRAINED if part is None else Path(part.run_dir), until=part.until if part else None)
        statistics = compat.memory_statistics(choose_device(run.cluster.device, ranks.local_rank))
        # Linux counts resident memory in units of 1024 bytes. A CPU has no statistics of live tensors.
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report(cause="ok", memory_bytes=statistics.get("peak"), host_bytes=resident)
    except Interrupted as stopped:
        report(cause="interrupted", words=str(stopped))
        return stopped.exit_code
    except Exception as error:
        # Other ranks may be waiting for this one inside a collective: the report must be written before the process ends.
        report(cause=classify_error(error), words=f"rank {ranks.rank}: {error}")
        if not isinstance(error, PhalanxError):
            traceback.print_exc()
        write_stderr(f"{type(error).__name__}: {error}")
        # An orderly exit would destroy process groups, which may wait forever for a collective that was left in the middle.
        os._exit(1)
    return 0


def take_device() -> None:
    """Name this rank by its device, where the ranks of a Slurm step take some of the devices that they all see."""
    first = os.environ.get(FIRST_DEVICE)
    if first is not None:
        rank, world, on_node = (os.environ[f"SLURM_{name}"] for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        os.environ |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": str(int(first) + int(on_node))}


def classify_error(error: BaseException) -> str:
    """Return why a rank failed: one of `study.trial.FAILURES`."""
    if isinstance(error, ConfigError):
        return "refused"
    if ran_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, PhalanxError) and "is not finite" in str(error):
        return "non_finite"
    return "crash"


def print_devices(requested: str) -> None:
    """Print the type of the devices that PyTorch sees here and the bytes of each, as one JSON object."""
    # In a process of its own: one that asks an accelerator for its memory keeps a context there.
    kind = choose_device(requested).type
    memory = []
    if kind != "cpu":
        module = torch.get_device_module(kind)
        memory = [module.get_device_properties(index).total_memory for index in range(torch.accelerator.device_count())]
    json.dump({"kind": kind, "memory": memory}, sys.stdout)
