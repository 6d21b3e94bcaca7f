"""What ranks tell each other while they compare records: rank 0 has the one-rank record, each rank a part of a layout's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 2**22
"""Elements of small tensors that travel together."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Exchange:
    """The ranks of a comparison. All of them call its methods alike."""

    alone: bool = False
    """Whether this rank compares two records of its own, whatever other ranks there are."""

    @property
    def joined(self) -> bool:
        """Return whether there are other ranks to tell."""
        return dist.is_initialized() and not self.alone

    def from_first(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        # As an object: names and shapes are unknown to the others.
        if not self.joined:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        found: Value = box[0]
        return found

    def send_from_first(self, names: list[str], whole: dict[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield rank 0's tensors, in order, on every rank; small ones are sent together."""
        shapes = self.from_first(None if whole is None else [(list(whole[n].shape), whole[n].dtype) for n in names])
        described: list[tuple[list[int], torch.dtype]] = [] if shapes is None else shapes
        start = 0
        while start < len(names):
            end, size = start, 0
            while end < len(names) and (end == start or size + math.prod(described[end][0]) <= _BUCKET):
                size += math.prod(described[end][0])
                end += 1
            dtype = described[start][1]
            # Small tensors travel together: a message for each of thousands of biases would take longer than the step.
            flat = torch.empty(size, dtype=dtype)
            if whole is not None:
                flat = torch.cat([whole[name].flatten() for name in names[start:end]]).to(dtype)
            if self.joined:
                dist.broadcast(flat, src=0)
            parts = flat.split([math.prod(shape) for shape, _ in described[start:end]])
            for name, part, (shape, _) in zip(names[start:end], parts, described[start:end], strict=True):
                yield name, part.view(shape)
            start = end

    def largest(self, values: Tensor) -> Tensor:
        """Replace `values` by the largest of any rank's; returns them."""
        if self.joined:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def total(self, values: Tensor) -> Tensor:
        """Replace `values` by the sum of all ranks'; returns them."""
        if self.joined:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values
