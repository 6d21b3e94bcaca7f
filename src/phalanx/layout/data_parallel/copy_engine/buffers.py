"""Which buffer of a pool is used next: of those that are lent and read in turns, one that nobody may still be reading."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Turn(Protocol):
    """A buffer of a pool, or one that is only thought of, and where it is in its round."""

    exchange: int
    """The last exchange it was used in; exchanges count from 1."""
    lent: bool

    @property
    def size(self) -> int:
        """Bytes."""


AnyTurn = TypeVar("AnyTurn", bound=Turn)


def resting(turns: Iterable[AnyTurn], size: int, exchanges: int) -> AnyTurn | None:
    """The smallest of `turns` that is large enough, not lent out, and not one the peers may still be reading after so many
    exchanges; of equal ones that which rests longest."""
    fitting = [x for x in turns if x.size >= size and not x.lent and not 0 < x.exchange == exchanges]
    return min(fitting, key=lambda x: (x.size, x.exchange), default=None)
