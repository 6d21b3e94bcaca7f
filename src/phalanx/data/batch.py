"""What every family's batches have in common: how training moves, cuts and counts them without knowing what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Batch(Protocol):
    """Samples of one rank."""

    @property
    def sample_indices(self) -> Tensor:
        """int64 [B]: global sample numbers."""

    def to(self, device: torch.device) -> Self:
        """The batch on `device`, copied without waiting when it lies in pinned memory."""

    def pinned(self) -> Self:
        """A copy in pinned memory, from which an accelerator copies on its own."""

    def split(self, parts: int) -> Iterator[Self]:
        """`parts` micro-batches, in order; or the number that the batch was planned with, the same on every rank."""

    def target_counts(self) -> Tensor:
        """How many targets each task has in these samples: [T], what the summed losses of `T` tasks are divided by."""

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """What the first stage takes, and what every stage takes besides, by name."""


class BatchStream(Protocol):
    """This rank's share of each global batch, step after step."""

    @property
    def fingerprint(self) -> str:
        """Equal for streams that read the same samples in the same order."""

    def seek(self, step: int) -> None:
        """Go on after `step`, the last step already done."""

    def next(self) -> Batch:
        """The batch of the next step."""

    def close(self) -> None:
        """Stop reading ahead."""
