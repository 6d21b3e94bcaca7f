"""Training of members: real runs, as `phalanx train` starts them, several side by side. Does not know what they train.

A run that was stopped resumes from its newest checkpoint when the same command is given again; a finished one is left alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phalanx.errors import PhalanxError
from phalanx.launch.parent import PARENT

LOG = "train.log"
_POLL_S = 0.1
_ORDERLY_S = 600.0
"""Seconds that runs have to write a checkpoint once they were told to stop."""
_SHOWN_LINES = 8
"""Last lines of a failed member's log that an error message shows."""


@dataclass(frozen=True)
class Recipe:
    """How one member is trained."""

    name: str
    run: Path
    """Run file, or folder of a run."""
    words: tuple[str, ...]
    """Changes of its fields, as "section.field=value"."""
    folder: Path
    """Run directory of the member."""


@dataclass
class _Training:
    recipe: Recipe
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def train_side_by_side(
    recipes: Sequence[Recipe],
    jobs: int,
    threads: int,
    tell: Callable[[str], None] = lambda words: None,
    *,
    devices: int = 0,
) -> None:
    """Train all members, `jobs` at a time, each on a device of its own where there are as many devices; else they share.

    threads: threads of each member on the host. devices: accelerators here; 0 for the CPU. tell: called as members begin
    and end. On Ctrl-C and SIGTERM all members write a checkpoint and stop. Raises PhalanxError with the end of the log of a
    member that failed, when the others have been stopped.
    """
    waiting, running = list(recipes), dict[int, _Training]()
    # SIGTERM as Ctrl-C: both then pass through `finally`, which lets members write checkpoints.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            # A place is kept from one member to the next, and with it the device.
            for place in range(jobs):
                if waiting and place not in running:
                    recipe = waiting.pop(0)
                    running[place] = _start_training(recipe, place % devices if devices else 0, threads)
                    tell(f"{recipe.name}: training in {recipe.folder}")
            for place, training in list(running.items()):
                code = training.process.poll()
                if code is None:
                    continue
                del running[place]
                training.log.close()
                if code:
                    log = training.recipe.folder / LOG
                    said = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
                    raise PhalanxError(
                        f"{training.recipe.name} ended with exit code {code} ({log}); give the command again to go on\n"
                        f"{said}"
                    )
                tell(f"{training.recipe.name}: trained")
            time.sleep(_POLL_S)
    finally:
        left = list(running.values())
        for training in left:
            if training.process.poll() is None:
                training.process.send_signal(signal.SIGTERM)
        # All are told before any is waited for: they write their checkpoints at the same time.
        deadline = time.monotonic() + _ORDERLY_S
        for training in left:
            try:
                training.process.wait(max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                training.process.kill()
                training.process.wait()
            training.log.close()
        signal.signal(signal.SIGTERM, previous)


def _start_training(recipe: Recipe, device: int, threads: int) -> _Training:
    recipe.folder.mkdir(parents=True, exist_ok=True)
    log = (recipe.folder / LOG).open("ab")
    command = [sys.executable, "-m", "phalanx", "train", str(recipe.run), *recipe.words, "--run-dir"]
    # A run on one rank, which ends when this process is killed: it would otherwise lock its folder against the next try.
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": str(device),
        "OMP_NUM_THREADS": str(threads),
        PARENT: str(os.getpid()),
    }
    process = subprocess.Popen(
        [*command, str(recipe.folder)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **alone},
        # A group of its own: Ctrl-C in a terminal then reaches this process alone, which stops its members in order.
        process_group=0,
    )
    return _Training(recipe, process, log)
