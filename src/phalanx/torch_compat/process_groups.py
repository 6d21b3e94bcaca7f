"""Process groups that only their members make, under names that all members agree on; and gloo's threads.

PyTorch names such a group after its ranks and the number of groups that the calling rank is in. Where members are in
different numbers of groups (the two ends of a pipeline share one more), they wait for each other under different names, for
ever. Here the name follows from the ranks, a given name and how many such groups there were before. Private names are used
in this file alone.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class _GlooInOrder(dist.ProcessGroupGloo):
    """A gloo group with one thread, which does its collectives one after the other."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        # The type stubs know them under other names.
        options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009
        # As PyTorch chooses them.
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
        options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def run_gloo_in_order() -> None:
    """Have gloo groups of this process do one collective at a time. Call before the first process group is made.

    By default a group has two threads, and each writes the name of what it has done to one string of the group, without a
    lock (`lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, PyTorch 2.13). Where both are done at once and one of the
    names is long, one thread writes to memory that the other has freed: a rank of a long run then aborts in `malloc`.
    """
    distributed_c10d.ProcessGroupGloo = _GlooInOrder  # type: ignore[misc]


class _Made:
    """How many groups of a name and ranks this process has made under one default group."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.counts: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def number(self, name: str, ranks: tuple[int, ...]) -> int:
        if self.world is not dist.group.WORLD:
            self.world = dist.group.WORLD
            self.counts.clear()
        self.counts[name, ranks] += 1
        return self.counts[name, ranks]


_made = _Made()


def new_group(ranks: list[int], name: str) -> dist.ProcessGroup:
    """Make a group of `ranks`, global ranks, each of which calls this in the same order as the others of the group.

    Its ranks wait for each other as long as those of the default group do: PyTorch would let gloo wait for 30 minutes.
    """
    # Counted: a group of the same ranks and name, made again after the first was destroyed, must not find its keys.
    number = _made.number(name, tuple(ranks))
    text = "_".join([name, *map(str, ranks), f"number {number}"])
    with _use_group_name(hashlib.sha256(text.encode()).hexdigest()):
        # Groups of fake ranks have no time-out: they wait for nobody.
        assert dist.group.WORLD is not None
        options = getattr(dist.group.WORLD._get_backend(torch.device("cpu")), "options", None)
        group = dist.new_group(
            ranks, None if options is None else options._timeout, use_local_synchronization=True, group_desc=name
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def exchanges_nothing(group: dist.ProcessGroup) -> bool:
    """Return whether `group` is one of fake ranks, as a dry run has: what the others would send never comes."""
    return dist.get_backend(group) == "fake"


@contextmanager
def _use_group_name(name: str) -> Iterator[None]:
    # PyTorch names a group by its ranks alone, which two groups of the same ranks would share.
    usual = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = usual
