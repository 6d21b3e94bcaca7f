"""The ranks that save and load together, and the few exchanges between them that saving and loading need.

Every method is called by all ranks of the group, in the same order. Only rank 0 ever holds something of every rank (save for
the flags of `any`), so that the memory of the other ranks does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import CheckpointDamaged, CheckpointError

T = TypeVar("T")


class RankGroup:
    """This process among the ranks of a process group; a group of one where torch.distributed is not in use."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.first = self.rank == 0
        """Whether this process is rank 0."""

    @classmethod
    def default(cls) -> RankGroup:
        """Return the ranks of the default process group, which exchange through that group itself."""
        return cls(dist.group.WORLD if _several_ranks() else None)

    @classmethod
    def own(cls, timeout_s: float) -> RankGroup:
        """Return the same ranks in a gloo group of their own.

        So exchanges of a background thread and those of training, which run at the same time, cannot meet each other.
        timeout_s: seconds that the fastest rank waits for the slowest, within one exchange.
        """
        if not _several_ranks():
            return cls(None)
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order, on rank 0; an empty list elsewhere."""
        if self._group is None:
            return [value]
        # Gloo fills a list that is as long as there are ranks, and takes none from the others.
        values: list[T] | None = [value] * self.size if self.first else None
        with _explain_lost_rank():
            dist.gather_object(value, values, group=self._group, group_dst=0)
        return values or []

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order, on every rank."""
        values = self.gather(value)
        return self.from_first(lambda: values)

    def send(self, memory: Tensor, rank: int) -> Callable[[], None]:
        """Begin to send a tensor on the CPU to `rank`, which receives it; return what waits until it is sent."""
        assert self._group is not None
        with _explain_lost_rank():
            work = dist.isend(memory, group=self._group, group_dst=rank)

        def wait() -> None:
            with _explain_lost_rank():
                if work is not None:
                    work.wait()

        return wait

    def receive(self, memory: Tensor, rank: int) -> None:
        """Fill a tensor on the CPU with what `rank` sends."""
        assert self._group is not None
        with _explain_lost_rank():
            dist.recv(memory, group=self._group, group_src=rank)

    def scatter(self, values: list[T]) -> T:
        """Return the entry for this rank of rank 0's `values`."""
        if self._group is None:
            return values[0]
        received: list[T | None] = [None]
        with _explain_lost_rank():
            dist.scatter_object_list(received, values if self.first else None, group=self._group, group_src=0)
        (value,) = received
        return value  # type: ignore[return-value]

    def any(self, flags: Tensor) -> Tensor:
        """Return the element-wise maximum of `flags` (uint8, any shape, the same on all ranks) over the ranks."""
        if self._group is not None:
            with _explain_lost_rank():
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return flags

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Have rank 0 do `work`; return its result on rank 0 and None elsewhere. Where it raises, all ranks raise."""
        # Through a list of rank 0's: a result such as a tensor of bytes need not travel to the other ranks.
        results: list[T] = []
        self.from_first(lambda: results.append(work()))
        return results[0] if self.first else None

    def from_first(self, work: Callable[[], T]) -> T:
        """Have rank 0 do `work`; return its result on every rank. Where it raises, all ranks raise a CheckpointError."""
        outcome: tuple[T | None, CheckpointError | None] = (None, None)
        if self.first:
            try:
                outcome = (work(), None)
            except Exception as error:
                # Any error: a rank that ended here with another one would leave the others waiting for the broadcast.
                failure = as_checkpoint_error(error)
                # The others wait for an answer: they hear of the failure before this rank raises it.
                self._broadcast((None, failure))
                if failure is error:
                    raise
                raise failure from error
        value, refusal = self._broadcast(outcome)
        if refusal is not None:
            raise refusal
        return value  # type: ignore[return-value]

    def agree(self, error: Exception | None) -> None:
        """Raise one error on every rank if any rank has one: the lowest rank's, and damage only if there is no other."""
        # Damage makes the ranks resume from an older checkpoint, which is right only if nothing else is wrong.
        # A byte a rank first: errors are rare, and gathering objects is many times slower.
        failed = self.any(torch.tensor([error is not None], dtype=torch.uint8))
        if not failed.item():
            return
        found = self.gather(None if error is None else as_checkpoint_error(error))
        try:
            self.on_first(lambda: _raise_worst(found))
        except CheckpointError as agreed:
            if agreed is error:
                raise
            raise agreed from error

    def _broadcast(self, value: T) -> T:
        if self._group is None:
            return value
        values = [value]
        with _explain_lost_rank():
            dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """Return `error` itself if it is meant for the user, else a CheckpointError that says what happened."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.strerror:
        return CheckpointError(f"{error.strerror} ({error.filename})" if error.filename else error.strerror)
    return CheckpointError(f"{type(error).__name__}: {error}")


@contextmanager
def _explain_lost_rank() -> Iterator[None]:
    # Gloo says with a RuntimeError that a peer is gone or silent.
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"contact with another rank was lost: {error}") from error


def _raise_worst(found: list[CheckpointError | None]) -> None:
    errors = [(rank, error) for rank, error in enumerate(found) if error is not None]
    # See `agree`: an older checkpoint helps against damage alone.
    not_damage = [entry for entry in errors if not isinstance(entry[1], CheckpointDamaged)]
    rank, worst = (not_damage or errors)[0]
    if len(found) == 1:
        raise worst
    others = f" ({len(errors) - 1} more ranks failed)" if len(errors) > 1 else ""
    raise type(worst)(f"rank {rank}: {worst}{others}")


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
