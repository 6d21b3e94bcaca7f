"""Commands that start themselves again as several ranks of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import typer

from phalanx.errors import ConfigError
from phalanx.hardware.device import choose_device
from phalanx.launch.local_launch import launch_ranks
from phalanx.layout.mesh import Ranks, join_process_group, ranks_from_environment


def start_ranks(words: Sequence[str], nproc: int) -> None:
    """Run `phalanx WORDS` as `nproc` ranks, and end with the code of the first that fails.

    Raises ConfigError where torchrun or srun has started ranks already.
    """
    require_no_ranks(nproc)
    code = launch_ranks(words, nproc, preload=loaded_modules())
    if code:
        raise typer.Exit(code)


def loaded_modules() -> tuple[str, ...]:
    """Return this program's modules that are loaded: what it took to read a command here it takes in each rank."""
    names = (name for name in sys.modules if name.partition(".")[0] == "phalanx")
    return tuple(name for name in names if not name.endswith("__main__"))


def start_or_join_ranks(nproc: int | None, device: str) -> tuple[Ranks, torch.device]:
    """Join the ranks that torchrun, srun or this very command started; return which this is, and its device.

    nproc: ranks to start; they run the command in place of this process, which ends with them. None: it is a rank itself,
    and leaves the group when its work is done (`leave_process_group`).
    """
    if nproc is not None:
        start_ranks(words_without_nproc(), nproc)
        raise typer.Exit
    ranks = ranks_from_environment()
    own = choose_device(device, ranks.local_rank)
    join_process_group(ranks, own)
    return ranks, own


def require_no_ranks(nproc: int) -> None:
    """Raise ConfigError where torchrun or srun has started ranks already."""
    # ranks that each start ranks would share ports and devices
    if ranks_from_environment().world_size > 1:
        raise ConfigError(f"--nproc {nproc} starts ranks, but torchrun or srun has started them already; leave it out")


def words_without_nproc() -> list[str]:
    """Return the words of this very command without its `--nproc`, which its ranks must not see."""
    words = sys.argv[1:]
    place = next(index for index, word in enumerate(words) if word.split("=")[0] == "--nproc")
    return [*words[:place], *words[place + (1 if "=" in words[place] else 2) :]]
