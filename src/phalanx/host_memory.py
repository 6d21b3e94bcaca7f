"""Host memory beside a device: what the device does not need for a while lies there.

On a CPU both are the same memory, and copies are copies: what is kept in host memory gives the same results there.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 28
"""Bytes of page-locked memory that are asked for at a time. PyTorch rounds each request up to a power of two: tensors by
themselves would take up to twice their size."""
_ALIGNMENT = 64


class HostMemory:
    """Gives out parts of host memory, page-locked beside an accelerator; they live as long as their tensors."""

    def __init__(self, device: torch.device) -> None:
        """device: what copies are to and from."""
        self.device = device
        self._rest: Tensor | None = None
        """Rest of the newest chunk, not given out yet, uint8."""

    def allocate_like(self, tensor: Tensor) -> Tensor:
        """Return host memory of the shape, strides and format of `tensor`, which has no gaps; without content."""
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._rest is None or self._rest.numel() < size:
            pinned = self.device.type != "cpu"
            self._rest = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        part, self._rest = self._rest[: tensor.nbytes], self._rest[size:]
        return part.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
