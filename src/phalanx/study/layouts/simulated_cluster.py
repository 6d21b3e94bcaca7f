"""A simulated cluster for trying out searches: its truth differs from the planner's model by a stated amount.

The errors have the structure of real ones: constants of the device that are not what its profile says, choices of kernels
and protocols that the model does not know of and that several layouts share, and something of each layout's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.planner.rank.cost_models import CostModels, Floats
from phalanx.planner.time.profile import CONSTANTS, spread_of
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.study.layouts.layout_space import LAYOUT, LayoutSpace
from phalanx.study.layouts.prior import Prior, with_constants
from phalanx.study.loop import EndedJob
from phalanx.study.trial import OK, Outcome, Trial

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
    """Distance of the truth from the model: root mean squares of logarithms over the points of a space."""

    time: float = 0.10
    memory: float = 0.05
    constants: float = 0.5
    """Part of the squared error of time that is due to constants of the device."""
    choices: float = 0.4
    """Part that is due to choices which layouts share; the rest is each layout's own."""


@dataclass(frozen=True)
class Truth:
    """True time and memory on the simulated cluster. Arrays of [points]."""

    seconds: Floats
    memory: Floats
    """Bytes of live tensors on the worst rank."""
    fits: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def best_seconds(self) -> float:
        """Return the seconds of the fastest point that fits."""
        return float(np.where(self.fits, self.seconds, np.inf).min())


def draw_truth(
    space: LayoutSpace, prior: Prior, models: CostModels, model: TracedModel, seed: int, errors: Errors | None = None
) -> Truth:
    """Return the truth of a seed. models: those that the prior is from."""
    errors = errors or Errors()
    random = np.random.default_rng(seed)
    own = 1 - errors.constants - errors.choices
    assert own >= 0
    names = [name for name in CONSTANTS if spread_of(name) > 0]
    factors = np.exp(random.standard_normal(len(names)) * [spread_of(name) for name in names])
    changed = with_constants(models, dict(zip(names, factors.tolist(), strict=True)))
    before, after = (one.bound_times(model, space.layouts).total for one in (models, changed))
    shift = _mix_parts(
        (errors.constants, np.asarray(np.log(after / before)[space.layout_of])),
        (errors.choices, _choice_errors(space, SHARED_CHOICES, random)),
        (own, random.standard_normal(len(space))),
    )
    need = _mix_parts(
        (0.8, _choice_errors(space, MEMORY_CHOICES, random)),
        (0.2, random.standard_normal(len(space))),
    )
    need *= errors.memory
    return Truth(prior.seconds * np.exp(errors.time * shift), prior.peak * np.exp(need), need < prior.margin)


def _mix_parts(*parts: tuple[float, Floats]) -> Floats:
    """Return the sum of parts, each scaled to its share of a mean square of 1 over all points."""
    total = np.zeros(len(parts[0][1]))
    for share, values in parts:
        size = float(np.sqrt(np.square(values).mean()))
        if share and size:
            total += np.sqrt(share) * values / size
    # Parts that happen to go together, or against each other, must not change how far the whole is off.
    return np.asarray(total / np.sqrt(np.square(total).mean()))


def _choice_errors(space: LayoutSpace, groups: Sequence[Sequence[str]], random: np.random.Generator) -> Floats:
    """Return the sum of a random value for each combination of each group's fields, and for each value of each tunable."""
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
    """Measures points by looking them up in the truth: `phalanx search --where simulated`."""

    truth: Truth
    seed: int = 0

    def start(self, space: LayoutSpace, trial: Trial, folder: Path, before: Sequence[Trial]) -> EndedJob:
        """Return the trial as ended, with what is true of its point and the noise of one trial."""
        point = space.find(trial.values)
        assert point is not None
        if not self.truth.fits[point]:
            said = "simulated: more memory needed than there is"
            return EndedJob(trial, Outcome("out_of_memory", words=said))
        # By the trial's number, so that a simulated study can be repeated.
        noise = np.random.default_rng([self.seed, trial.number]).standard_normal()
        seconds = float(self.truth.seconds[point] * np.exp(_REPEAT * noise))
        return EndedJob(trial, Outcome(OK, value=seconds, memory_bytes=float(self.truth.memory[point])))
