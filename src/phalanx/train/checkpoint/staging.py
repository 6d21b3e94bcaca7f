"""Host memory that a save copies tensors to before writing, kept from save to save.

Fresh memory is what makes a naive copy slow: the first touch of each page costs several times the copy itself.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.train.checkpoint.plan import Piece

ALIGNMENT = 64
"""Bytes; pieces start at multiples of it, so that they can be seen in their own dtype."""


class Staging:
    """Numbered blocks of host memory; each holds the pieces of one file until that file is written."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}

    def copy(self, block: int, pieces: Sequence[Piece]) -> list[Tensor]:
        """Copy `pieces` into `block`; returns each one's bytes (uint8, one dim), valid until the block's next use.

        The copies are complete when this returns: whatever happens to the pieces' sources later does not show.
        """
        starts = _starts(pieces)
        memory = self._block(block, pieces)
        staged = [memory[start : start + piece.bytes] for start, piece in zip(starts, pieces, strict=False)]
        with torch.no_grad():
            for piece, target in zip(pieces, staged, strict=True):
                typed = target.view(piece.source.dtype).view(piece.sizes)
                typed.copy_(piece.source, non_blocking=True)
        for device in {piece.source.device for piece in pieces if piece.source.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return staged

    def reserve(self, block: int, pieces: Sequence[Piece]) -> None:
        """Have the memory for `pieces` ready, down to its last page."""
        self._block(block, pieces).zero_()

    def _block(self, block: int, pieces: Sequence[Piece]) -> Tensor:
        size = _starts(pieces)[-1]
        pinned = any(piece.source.device.type != "cpu" for piece in pieces)
        memory = self._blocks.get(block)
        if memory is None or memory.numel() < size or memory.is_pinned() != pinned:
            self._blocks.pop(block, None)
            memory = self._blocks[block] = _allocate(size, pinned=pinned)
        return memory


def _starts(pieces: Sequence[Piece]) -> list[int]:
    """Where in its block each piece starts, and after them the size of the block; in bytes."""
    starts = [0]
    for piece in pieces:
        starts.append(-(-(starts[-1] + piece.bytes) // ALIGNMENT) * ALIGNMENT)
    return starts


def _allocate(size: int, *, pinned: bool) -> Tensor:
    """Uninitialised bytes: page-locked for copies from an accelerator, else in huge pages where the system has them."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages answers EINVAL; ordinary pages serve as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
