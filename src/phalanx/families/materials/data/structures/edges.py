"""Edges of one structure: directed pairs of atoms, r = position[target] + image @ cell - position[source]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TIE_A = 1e-3
"""Neighbours whose distances differ by less than this many angstrom count as equally near."""


@dataclass(frozen=True)
class Edges:
    """Directed edges, ordered by target, then source, then image."""

    source: npt.NDArray[np.int64]
    """[E]."""
    target: npt.NDArray[np.int64]
    """[E]."""
    images: npt.NDArray[np.int64]
    """[E, 3]: lattice vectors added to the target's position."""
    distances: npt.NDArray[np.float64]
    """[E] in A."""

    def __len__(self) -> int:
        return len(self.source)
