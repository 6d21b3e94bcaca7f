"""Consecutive blocks of a model under their numbers in the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import nn

Block = TypeVar("Block", bound=nn.Module)


class NumberedBlocks(nn.Module, Generic[Block]):
    """Consecutive blocks under their numbers in the whole model, so that parameter names do not depend on the part."""

    def __init__(self, make: Callable[[int], Block], numbers: range) -> None:
        super().__init__()
        self.numbers = numbers
        for number in numbers:
            self.add_module(str(number), make(number))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Block]:
        return (self[number] for number in self.numbers)

    def __getitem__(self, number: int) -> Block:
        """Return the block with this number in the whole model."""
        block: Block = self._modules[str(number)]  # type: ignore[assignment]
        return block
