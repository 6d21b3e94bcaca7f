"""`phalanx.launch.fork_server` with the modules that tests import loaded in advance as well.

A process has one fork server, and what is loaded there in advance is decided when it starts. So there is one list, with all
that ranks of any test use: else each of them would load it again. And it starts before the first test, since what tests call
may start one with a list of its own.
"""

import gc
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any

from phalanx.launch import fork_server as local_ranks

PRELOADED = (
    "pytest",
    *local_ranks.PRELOADED,
    "e3nn.o3",
    "phalanx.cli.main",
    "phalanx.cli.train",
    "phalanx.planner.dryrun.run_step",
    "phalanx.families.language.trained",
    "phalanx.families.materials.bound",
    "phalanx.families.weather.bound",
    "phalanx.verification.verify_run",
)

fork_server = partial(local_ranks.fork_server, PRELOADED)


def start_fork_server() -> None:
    """Start the process that ranks are forked of; it loads its modules beside what the caller does next."""
    fork_server()
    forkserver.ensure_running()


def run_ranks(work: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    """See `local_ranks.run_ranks`."""
    return local_ranks.run_ranks(_frozen, world_size, work, *arguments, preload=PRELOADED, **options)


def _frozen(work: Callable[..., Any], *arguments: Any) -> Any:
    # What modules hold is not looked through for garbage: dry runs collect it several times each.
    gc.freeze()
    return work(*arguments)
