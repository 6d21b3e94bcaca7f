"""Data sources of your own: any program that gives items as a function of (seed, item) is trained on like our own data.

A source says how many items a split has and computes or reads some of them. Everything else is done here and in
`data.batch_stream`: the order of items, a fresh shuffle each epoch, shares of ranks, reading ahead, and resuming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.counter_random import sample_bits, sample_normals, stable_key
from phalanx.data.batch_stream import ReadAheadStream, TensorBatch
from phalanx.data.sample_order import ORDER_VERSION, EpochShuffle, Int64Array
from phalanx.errors import DataError
from phalanx.extensions import Registry, make_extension

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class TensorSpec:
    """What one position of a sample holds: a tensor of `shape`; a sample is [positions, *shape]."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    values: int = 0
    """Number of distinct whole numbers, which are 0 to values - 1."""

    def zeros(self, samples: int, positions: int, device: torch.device) -> Tensor:
        """Return samples without content, [samples, positions, *shape]."""
        return torch.zeros((samples, positions, *self.shape), dtype=self.dtype, device=device)

    def sample_bytes(self, positions: int) -> int:
        """Return the bytes of one sample."""
        return positions * int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def random_samples(self, what: str, numbers: Tensor, positions: int) -> Tensor:
        """Return samples that are a function of their numbers alone, [samples, positions, *shape]."""
        shape = (len(numbers), positions, *self.shape)
        count = int(np.prod(shape[1:], dtype=np.int64))
        if self.dtype.is_floating_point:
            return sample_normals(what, numbers, count).to(self.dtype).view(shape)
        return (sample_bits(what, numbers, count) % self.values).to(self.dtype).view(shape)


class DataSource(ABC):
    """A body of items of which each is one sample: a function of the source, the seed and the item's number alone.

    A class under `phalanx.data_sources` is called with the positions of a sample and, by name, the options of the run file.
    """

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length

    @abstractmethod
    def count_items(self, split: Split) -> int:
        """Return how many items a split has; 0 for a split that there is not. An epoch reads each once."""

    @abstractmethod
    def read_items(self, split: Split, seed: int, items: Int64Array) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these items, [items, positions, ...] each.

        The same numbers must give the same samples in every process and every call, from any thread. Targets that count for
        nothing are NaN, or negative where they are whole numbers.
        """

    def fingerprint(self) -> str:
        """Return what differs between sources that give other samples; by default the class's name.

        A run goes on only with data of the fingerprint that it began with.
        """
        return type(self).__qualname__

    def describe(self) -> str:
        """Return in words how much there is to train on. Raises DataError where data that it reads are not there."""
        return f"{self.count_items('train'):,} samples"


DATA_SOURCES: Registry[type[DataSource]] = Registry(
    "phalanx.data_sources",
    accepts=lambda item: isinstance(item, type) and issubclass(item, DataSource),
    expected="a subclass of phalanx.DataSource",
)


def open_source(name: str, sequence_length: int, options: Mapping[str, Any]) -> DataSource:
    """Return the data source called `name`.

    Raises ConfigError for a name that stands for none and for options that it does not take, DataError for missing data.
    """
    kind = DATA_SOURCES.get(name, "data.source")
    refusal = f"data.options={dict(options)}: data source {name} cannot be opened with them"
    return make_extension(partial(kind, sequence_length, **options), refusal)


def count_targets(targets: Tensor) -> Tensor:
    """Return how many targets count, int64 [1]: those that are not NaN, or not negative."""
    return valid_targets(targets).sum().reshape(1)


def valid_targets(targets: Tensor) -> Tensor:
    """Return which targets count, bool of their shape."""
    return ~targets.isnan() if targets.dtype.is_floating_point else targets >= 0


@dataclass(frozen=True)
class SampleBatch(TensorBatch):
    """Samples of one rank."""

    samples: Tensor
    """[B, S, ...]: inputs."""
    targets: Tensor
    """[B, S, ...]: NaN, or negative, where there is none."""
    sample_indices: Tensor
    """int64 [B]: global sample numbers."""

    def target_counts(self) -> Tensor:
        """Return the number of targets that take part in the loss, int64 [1]."""
        return count_targets(self.targets)

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the inputs for the first stage, the targets for every stage."""
        return self.samples, {"targets": self.targets}


@dataclass(frozen=True)
class SourceReader:
    """Reads training samples by global sample number: every item once an epoch, in an order of its own each time."""

    source: DataSource
    seed: int
    positions: int
    specs: tuple[TensorSpec, TensorSpec]
    """Specifications of inputs and targets, which the model states."""

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for readers that give the same sample for every number."""
        return f"{self.source.fingerprint()}/{self.source.count_items('train')}/{self.seed}/{ORDER_VERSION}"

    def read(self, numbers: Int64Array) -> SampleBatch:
        """Read the samples with these global numbers, int64 [n], in order."""
        # A function of the number alone: ranks need no common state, and a resumed run none of the past.
        shuffle = EpochShuffle(self.source.count_items("train"), stable_key("samples", self.seed))
        return self.read_items("train", shuffle(numbers), numbers)

    def read_items(self, split: Split, items: Int64Array, numbers: Int64Array) -> SampleBatch:
        """Return items of a split under these sample numbers. Raises DataError for tensors that the model does not take."""
        # Foreign code: what it gives is checked here, once, and not where a kernel would fail on it.
        samples, targets = self.source.read_items(split, self.seed, items)
        given: Mapping[str, tuple[Tensor, TensorSpec]] = {
            "inputs": (samples, self.specs[0]),
            "targets": (targets, self.specs[1]),
        }
        for what, (tensor, spec) in given.items():
            wanted = (len(items), self.positions, *spec.shape)
            if tuple(tensor.shape) != wanted or tensor.dtype != spec.dtype:
                raise DataError(
                    f"data source {type(self.source).__name__} gives {what} of shape {list(tensor.shape)} and "
                    f"{tensor.dtype}; the model takes {list(wanted)} and {spec.dtype}"
                )
        return SampleBatch(samples, targets, torch.from_numpy(np.asarray(numbers)))


class SampleStream(ReadAheadStream[SampleBatch]):
    """This rank's share of each global batch of a source, step after step, read ahead in the background."""
