"""Commands that start themselves again as several ranks of this machine."""

from __future__ import annotations

import sys

import typer

from phalanx.errors import ConfigError
from phalanx.launch.local_launch import launch_ranks
from phalanx.layout.mesh import Ranks


def start_again(ranks: Ranks, nproc: int) -> None:
    """Start this very command again as `nproc` ranks, without its `--nproc`. Ends with the code of the first that fails."""
    if ranks.world_size > 1:
        raise ConfigError(f"--nproc {nproc} starts ranks, but torchrun or srun has started them already; leave it out")
    words = sys.argv[1:]
    place = next(index for index, word in enumerate(words) if word.split("=")[0] == "--nproc")
    code = launch_ranks([*words[:place], *words[place + (1 if "=" in words[place] else 2) :]], nproc)
    if code:
        raise typer.Exit(code)
