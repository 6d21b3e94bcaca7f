"""Groups that only their members make."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.torch_compat.groups import new_group

WORLD_S = 97.0


def time_outs() -> list[timedelta]:
    """Of the default group and of one that was made here."""
    assert dist.group.WORLD is not None
    made = new_group([0, 1], "pair")
    return [group._get_backend(torch.device("cpu")).options._timeout for group in (dist.group.WORLD, made)]


def test_members_wait_no_longer_than_all_ranks_do() -> None:
    assert run_ranks(time_outs, 2, timeout_s=WORLD_S) == [[timedelta(seconds=WORLD_S)] * 2] * 2
