"""Groups that only their members make."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.torch_compat.process_groups import new_group

WORLD_S = 97.0


def settings() -> list[tuple[timedelta, int, int]]:
    """Time-outs, threads and network devices of the default group, one that was made here, and one of PyTorch's making."""
    assert dist.group.WORLD is not None
    groups = (dist.group.WORLD, new_group([0, 1], "pair"), dist.new_group([0, 1], timeout=timedelta(seconds=WORLD_S)))
    found = [group._get_backend(torch.device("cpu")).options for group in groups]
    return [(options._timeout, options._threads, len(options._devices)) for options in found]


def test_members_wait_no_longer_than_all_ranks_do_and_gloo_works_in_order() -> None:
    # One thread: see `run_gloo_in_order`.
    assert run_ranks(settings, 2, timeout_s=WORLD_S) == [[(timedelta(seconds=WORLD_S), 1, 1)] * 3] * 2


def exchange_at_once(rounds: int) -> None:
    """Many collectives on the way at once, of names of different lengths; they take no time, since there is one rank."""
    assert dist.group.WORLD is not None
    name, x = dist.group.WORLD.group_name, torch.ones(4)
    functional = torch.ops._c10d_functional
    for _ in range(rounds):
        results = []
        for _ in range(100):
            results.append(functional.all_gather_into_tensor(x, 1, name))
            results.append(functional.all_reduce(x, "sum", name))
        for result in results:
            functional.wait_tensor(result)


def test_collectives_that_end_at_once_leave_memory_whole() -> None:
    """With gloo's own two threads a group the rank aborts in `malloc` within a second."""
    run_ranks(exchange_at_once, 1, 300)
