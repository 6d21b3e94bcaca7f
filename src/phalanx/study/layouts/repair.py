"""Between general optimisers, which know ranges of parameters, and the points that a space really has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from phalanx.study.layouts.space import Space
from phalanx.study.trials.ranges import Choices, Integers, Range, Scalar, Told
from phalanx.study.trials.trial import Trial


def position_ranges(space: Space) -> dict[str, Range]:
    """Positions in the values of each parameter that varies, by its name."""
    found: dict[str, Range] = {}
    for number in space.varying:
        one = space.parameters[number]
        found[one.name] = Integers(0, len(one.values) - 1) if one.ordered else Choices(tuple(range(len(one.values))))
    return found


def told_of(space: Space, trials: Sequence[Trial]) -> list[Told]:
    """Trials that ended and that the space has, by positions."""
    found = []
    for trial in trials:
        point = space.find(trial.values)
        if point is None or not (trial.good or trial.failed):
            continue
        assert trial.outcome is not None
        values = {space.parameters[number].name: int(space.codes[point][number]) for number in space.varying}
        found.append(Told(values, trial.value if trial.good else None, trial.outcome.cause))
    return found


def position_values(space: Space, suggested: Mapping[str, Scalar]) -> dict[int, int]:
    """Suggested positions {parameter: position}."""
    return {number: int(suggested[space.parameters[number].name] or 0) for number in space.varying}


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
