"""Which part of the work is this rank's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """This rank among those that work together."""

    rank: int = 0
    ranks: int = 1


ALONE = Share()
