"""Host memory beside a device, and copies to and from it that go on while the device computes.

On a CPU both are the same memory, and copies are copies: what is kept in host memory gives the same results there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


class CopyStream:
    """A stream of copies beside the one that computes; none on a CPU, where each copy is done when it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def behind_present(self) -> Iterator[None]:
        """Run what is inside on this stream, behind all that the present one was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def hold_present(self) -> None:
        """Let the present stream wait for all copies so far; the process does not wait."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def synchronise(self) -> None:
        """Wait for all copies so far: host memory that they write may be read afterwards."""
        if self._stream is not None:
            self._stream.synchronize()
