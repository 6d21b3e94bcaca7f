"""Batches of fields: what a model of weather or climate reads and is scored on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from phalanx.data.stream import ReadAheadStream


@dataclass(frozen=True)
class FieldBatch:
    """Samples of one rank. Fields run from south to north and eastward."""

    fields: Tensor
    """float32 [B, V_in, H, W]: inputs, then static fields; normalised, 0 (the mean) where a value is missing."""
    targets: Tensor
    """float32 [B, V_out, H, W]: normalised, NaN where a value is missing."""
    lead_hours: Tensor
    """float32 [B]: hours from input to target."""
    time_of_year: Tensor
    """float32 [B]: part of the year that has passed at the input, from 0 to 1."""
    time_of_day: Tensor
    """float32 [B]: part of the day, in UTC, that has passed at the input, from 0 to 1."""
    sample_indices: Tensor
    """int64 [B]: global sample numbers."""

    def to(self, device: torch.device) -> FieldBatch:
        """The batch on `device`, copied without waiting when it lies in pinned memory."""
        return FieldBatch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def pinned(self) -> FieldBatch:
        """A copy in pinned memory, from which an accelerator copies on its own."""
        return FieldBatch(*(tensor.pin_memory() for tensor in self._tensors()))

    def split(self, parts: int) -> Iterator[FieldBatch]:
        """`parts` micro-batches, in order."""
        assert len(self.fields) % parts == 0, (len(self.fields), parts)
        for pieces in zip(*(tensor.chunk(parts) for tensor in self._tensors()), strict=True):
            yield FieldBatch(*pieces)

    def target_counts(self) -> Tensor:
        """int64 [1]: target values that are there."""
        return (~self.targets.isnan()).sum().reshape(1)

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """The fields for the first stage; for every stage targets, lead times, and the fields that changes add to."""
        others = {"fields_BVHW": self.fields, "targets_BVHW": self.targets, "lead_hours_B": self.lead_hours}
        return self.fields, others

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class FieldBatchStream(ReadAheadStream[FieldBatch]):
    """This rank's share of each global batch of fields, step after step, read ahead in the background."""
