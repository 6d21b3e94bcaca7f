"""Batches of one rank: what every family's batches have in common, and reading them step after step, ahead of need.

A family hands over a reader of samples by global sample number; everything about steps, ranks and threads stands here.
"""

from __future__ import annotations

import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx.config.check import BatchSizes
from phalanx.data.sample_order import Int64Array


class Batch(Protocol):
    """Samples of one rank."""

    @property
    def sample_indices(self) -> Tensor:
        """Return the global sample numbers, int64 [B]."""

    def to(self, device: torch.device) -> Self:
        """Return the batch on `device`, copied asynchronously where it lies in pinned memory."""

    def pinned(self) -> Self:
        """Return a copy in pinned memory, from which an accelerator copies without the CPU."""

    def split(self, parts: int) -> Iterator[Self]:
        """Yield `parts` micro-batches, in order; or as many as the batch was planned with, the same number on every rank."""

    def target_counts(self) -> Tensor:
        """Return how many targets each task has in these samples, [T]: the divisors of the summed losses of `T` tasks."""

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the input of the first stage, and the inputs that every stage takes besides, by name."""


@dataclass(frozen=True)
class TensorBatch:
    """Samples of one rank as tensors, each with the samples along its first dim; None for a part that is left out."""

    def to(self, device: torch.device) -> Self:
        """Return the batch on `device`, copied asynchronously where it lies in pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """Return a copy in pinned memory, from which an accelerator copies without the CPU."""
        return self._map(Tensor.pin_memory)

    def split(self, parts: int) -> Iterator[Self]:
        """Yield `parts` micro-batches of equal size, in order."""
        samples = len(self._tensors()["sample_indices"])
        # Of one shape: compiled programs and pipelines take no other.
        assert samples % parts == 0, (samples, parts)
        for start in range(0, samples, samples // parts):
            yield self._map(itemgetter(slice(start, start + samples // parts)))

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, **{name: change(tensor) for name, tensor in self._tensors().items()})


class BatchStream(Protocol):
    """This rank's share of each global batch, step after step."""

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for streams that read the same samples in the same order."""

    def seek(self, step: int) -> None:
        """Continue after `step`, the last step that is done."""

    def next(self) -> Batch:
        """Return the batch of the next step."""

    def close(self) -> None:
        """Stop reading ahead."""


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)


class Reader(Protocol[BatchT_co]):
    """Reads samples by global sample number, from any thread."""

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for readers that give the same sample for every number."""

    def read(self, numbers: Int64Array) -> BatchT_co:
        """Read the samples with these global numbers, int64 [n], in order."""


class SteppedStream(ABC, Generic[BatchT]):
    """This rank's batches, step after step, read ahead in the background."""

    def __init__(self, prefetch: int, *, together: bool = False) -> None:
        """Begin before the first step. prefetch: batches kept ready; 0 reads in the caller's thread. together: whether
        ranks exchange something in reading a batch, see `ReadAhead`."""
        self.prefetch = prefetch
        self.together = together
        self._step = 0
        self._ahead: ReadAhead[BatchT] | None = None

    @abstractmethod
    def batch(self, step: int) -> BatchT:
        """Return this rank's samples of optimizer step `step`, counted from 1."""

    def seek(self, step: int) -> None:
        """Continue after `step`, the last step that is done."""
        # What was read ahead belongs to other steps.
        self.close()
        self._step = step

    def next(self) -> BatchT:
        """Return the batch of the next step. Raises what reading it raised."""
        self._step += 1
        # Errors then come out of the very call that causes them.
        if self.prefetch == 0:
            return self.batch(self._step)
        if self._ahead is None:
            self._ahead = ReadAhead(self.batch, self._step, self.prefetch, together=self.together)
        return self._ahead.next()

    def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class ReadAheadStream(SteppedStream[BatchT]):
    """Global batches, of which every rank has an equal share."""

    def __init__(
        self,
        reader: Reader[BatchT],
        *,
        global_batch: int | BatchSizes,
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Rank `rank` of `ranks` takes a contiguous part of each batch of `global_batch` samples.

        global_batch: for all steps, or by step. prefetch: batches kept ready; 0 reads in the caller's thread.
        """
        super().__init__(prefetch)
        self.sizes = global_batch if isinstance(global_batch, BatchSizes) else BatchSizes(global_batch)
        assert all(
            samples % ranks == 0 for samples in (self.sizes.final, *(samples for _, samples in self.sizes.stages))
        )
        self.rank, self.ranks = rank, ranks
        self.pin_memory = pin_memory
        # Sizes of batches decide which samples a step reads, so they belong to what a resumed run compares.
        stages = "".join(f"/{samples} for {steps}" for steps, samples in self.sizes.stages)
        self.fingerprint = f"{reader.fingerprint}/{self.sizes.final}{stages}"
        self._reader = reader

    def batch(self, step: int) -> BatchT:
        """Return this rank's samples of optimizer step `step`, counted from 1."""
        # A function of the step alone, so a run may resume on any number of ranks and read the same samples.
        share = self.sizes.of_step(step) // self.ranks
        first = self.sizes.samples_through(step - 1) + self.rank * share
        batch = self.read(np.arange(first, first + share, dtype=np.int64), step)
        # Here, where a thread reads ahead: pinning is a copy, which training need not wait for.
        return batch.pinned() if self.pin_memory else batch

    def read(self, numbers: Int64Array, step: int) -> BatchT:
        """Read the samples with these global numbers for optimizer step `step`, which by default makes no difference."""
        return self._reader.read(numbers)


class ReadAhead(Generic[BatchT]):
    """A thread that keeps the batches of the next few steps ready."""

    def __init__(self, read: Callable[[int], BatchT], first_step: int, depth: int, *, together: bool = False) -> None:
        """Read `first_step` and what follows it, at most `depth` batches ahead of `next`.

        together: whether ranks wait for each other in `read`. All that have called `next` equally often have then read the
        same steps once they are closed, so that none waits for one that is closed already.
        """
        self._read = read
        self._together = together
        # Bounded: reading ahead without end would fill the host's memory.
        self._ready: queue.Queue[BatchT | Exception] = queue.Queue(depth)
        self._last: float = math.inf  # the step that is read last
        self._furthest = first_step + depth  # what the thread gets to in any case: one more is read than fits the queue
        self._failure: Exception | None = None  # the thread ended with it, so every later batch fails alike
        self._thread = threading.Thread(target=self._run, args=(first_step,), name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> BatchT:
        """Return the next batch. Raises what reading it raised, and again on every later call."""
        # A thread that has failed puts nothing more: waiting for it would never end.
        item = self._failure or self._ready.get()
        if isinstance(item, Exception):
            self._failure = item
            raise item
        self._furthest += 1
        return item

    def close(self) -> None:
        """End the thread; batches read but not taken are dropped."""
        # Before there is room: the thread has then begun no later step.
        self._last = self._furthest if self._together else 0
        while self._thread.is_alive():
            # Makes room, in case the thread waits to put a batch.
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _run(self, step: int) -> None:
        item: BatchT | Exception
        while step <= self._last:
            try:
                item = self._read(step)
            except Exception as error:
                item = error
            # Blocks while `depth` batches are ready, which bounds the memory held.
            self._ready.put(item)
            if isinstance(item, Exception):
                return
            step += 1
