"""From what a general optimiser suggests, parameter by parameter, to the nearest point that the space really has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from phalanx.search.space import Space


def nearest_free(space: Space, suggested: Mapping[int, int], taken: set[str]) -> int | None:
    """The point nearest to suggested positions {parameter: position} whose key is not taken; None where all are.

    A parameter is as far off as the two positions lie apart, over the number of values; one without order is so by 1
    where it differs.
    """
    distance = np.zeros(len(space))
    for number, position in suggested.items():
        one = space.parameters[number]
        apart = np.abs(space.codes[:, number] - position)
        distance += apart / max(1, len(one.values) - 1) if one.ordered else (apart > 0)
    order: Sequence[int] = np.argsort(distance, kind="stable").tolist()
    return next((point for point in order if space.key(point) not in taken), None)
