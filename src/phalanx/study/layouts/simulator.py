"""A cluster whose truth differs from the planner's model by a stated amount: what searches are tried out on.

Its errors have the structure of real ones: constants of the device that are not what its profile says, choices of kernels
and protocols that the model does not know of and that several layouts share, and something of each layout's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phalanx.config.schema import Run
from phalanx.planner.rank.cost_models import CostModels, Floats
from phalanx.planner.time.profile import CONSTANTS, spread_of
from phalanx.study.layouts.prior import Prior, with_constants
from phalanx.study.layouts.space import LAYOUT, Space
from phalanx.study.trials.trial import OK, Outcome, Trial

SHARED_CHOICES = (
    ("tp", "microbatch"),
    ("pp", "schedule", "stages_per_rank"),
    ("zero", "reshard_after_forward", "dp_replicate"),
    ("recompute", "microbatch"),
)
"""Fields whose combinations have an error in common: kernels, schedules, protocols."""
MEMORY_CHOICES = (("tp", "microbatch", "recompute"), ("pp", "schedule", "zero", "reshard_after_forward"))
_REPEAT = 0.005
"""Standard deviation of the logarithm of one trial beside another of the same layout."""


@dataclass(frozen=True)
class Errors:
    """How far the truth is from the model: root mean squares of logarithms over the points of a space."""

    time: float = 0.10
    memory: float = 0.05
    constants: float = 0.5
    """Part of the squared error of time that is due to constants of the device."""
    choices: float = 0.4
    """The part that is due to choices which layouts share; the rest is each layout's own."""


@dataclass(frozen=True)
class Truth:
    """What trials on the simulated cluster find. Arrays of [points]."""

    seconds: Floats
    memory: Floats
    """Bytes of live tensors on the worst rank."""
    fits: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def best_seconds(self) -> float:
        """Of the fastest point that fits."""
        return float(np.where(self.fits, self.seconds, np.inf).min())


def draw_truth(
    space: Space, prior: Prior, models: CostModels, run: Run, seed: int, errors: Errors | None = None
) -> Truth:
    """A truth, by its seed. models: those the prior is from."""
    errors = errors or Errors()
    random = np.random.default_rng(seed)
    own = 1 - errors.constants - errors.choices
    assert own >= 0
    shift = _mixed(
        (errors.constants, _constants(space, models, run, random)),
        (errors.choices, _choices(space, SHARED_CHOICES, random)),
        (own, random.standard_normal(len(space))),
    )
    need = _mixed(
        (0.8, _choices(space, MEMORY_CHOICES, random)),
        (0.2, random.standard_normal(len(space))),
    )
    need *= errors.memory
    return Truth(prior.seconds * np.exp(errors.time * shift), prior.peak * np.exp(need), need < prior.margin)


def _mixed(*parts: tuple[float, Floats]) -> Floats:
    """The sum of parts, each scaled to its share of a mean square of 1 over all points."""
    total = np.zeros(len(parts[0][1]))
    for share, values in parts:
        size = float(np.sqrt(np.square(values).mean()))
        if share and size:
            total += np.sqrt(share) * values / size
    # Parts that happen to go together, or against each other, must not change how far the whole is off.
    return np.asarray(total / np.sqrt(np.square(total).mean()))


def _constants(space: Space, models: CostModels, run: Run, random: np.random.Generator) -> Floats:
    """Logarithm of the time with other constants of the device over the time with those of the profile."""
    names = [name for name in CONSTANTS if spread_of(name) > 0]
    factors = np.exp(random.standard_normal(len(names)) * [spread_of(name) for name in names])
    changed = with_constants(models, dict(zip(names, factors.tolist(), strict=True)))
    before, after = (one.times(run, space.layouts, exact=False).total for one in (models, changed))
    return np.asarray(np.log(after / before)[space.layout_of])


def _choices(space: Space, groups: Sequence[Sequence[str]], random: np.random.Generator) -> Floats:
    """A random value for each combination of the fields of each group; and for each value of each knob."""
    place = {one.name: number for number, one in enumerate(space.parameters)}
    groups = [*groups, *([name] for name in place if name not in LAYOUT)]
    total = np.zeros(len(space))
    for group in groups:
        codes = space.codes[:, [place[name] for name in group]]
        _, which = np.unique(codes, axis=0, return_inverse=True)
        which = which.reshape(-1)
        values = random.standard_normal(int(which.max()) + 1)[which]
        total += values
    return total


@dataclass(frozen=True)
class SimulatedRunner:
    """Measures points by looking at the truth."""

    truth: Truth
    seed: int = 0
    waits: float = 0.0
    """Seconds that a trial takes, for those who want to watch."""
    measured: list[int] = field(default_factory=list)

    def measure(self, space: Space, point: int, trial: Trial, folder: Path, before: Sequence[Trial]) -> Outcome:
        """What is true of the point, but for what one trial differs from the next."""
        time.sleep(self.waits)
        self.measured.append(point)
        if not self.truth.fits[point]:
            return Outcome("out_of_memory", words="simulated: more memory needed than there is")
        noise = np.random.default_rng([self.seed, trial.number]).standard_normal()
        seconds = float(self.truth.seconds[point] * np.exp(_REPEAT * noise))
        return Outcome(OK, value=seconds, memory_bytes=float(self.truth.memory[point]), seconds=self.waits)
