"""Candidates of tuning: every part of a configuration that may begin next, with the time and memory it probably takes.

Both are linear regressions of a logarithm with a prior: before any trial has run they follow the family's own size and
FLOPs, and each trial that ends corrects them. Beside the size they know what was chosen, so that they learn of a backbone
that is slow for its FLOPs, or of an option that needs memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.config.check import global_batch_samples
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.family import BoundModel
from phalanx.families.registry import bind
from phalanx.layout.resolve import one_rank_microbatch, resolve_layout
from phalanx.study.hyperparameters.asha import backfill_order, project_scores, promotable_trials
from phalanx.study.hyperparameters.configuration import Configuration, group_configurations, part_key, rung_of
from phalanx.study.hyperparameters.hyperparameter_space import HyperparameterSpace
from phalanx.study.processes.trial_files import tuned_overrides
from phalanx.study.samplers import Observation, Sampler
from phalanx.study.space import Choices, Range, Values
from phalanx.study.store import StudyStore
from phalanx.study.trial import Trial, key_of

Floats = npt.NDArray[np.float64]

_NOISE = 0.15
"""Standard deviation of what equal trials differ by, in logarithms."""
_FIRST_FLOP_S = {True: 2e12, False: 5e9}
"""FLOP/s that a step reaches before anything is measured: on an accelerator, on a CPU core."""
_SHARING_EXPONENT = {True: 0.5, False: 1.0}
"""Exponent of the number of trials that share a device: on a CPU core k trials take k times as long each."""
_LEAST_STEP_S = 0.005
"""Seconds that a step takes however small the model is: launching kernels, reading data."""
_PROCESS_BYTES = 0.7e9
"""Bytes of a process before it trains: libraries, and on an accelerator its context."""
_STATE_BYTES = 16
"""Bytes of a parameter with its gradient and the optimizer's state: four numbers of float32."""
_ACTIVATION_WIDTHS = 12.0
"""Numbers that are kept for the backward pass of a matmul parameter's row of a block, in widths."""
_USUAL_WIDTH = 64
"""Width of models whose section names none."""
_SPREAD = 1.3
"""Standard deviations of the memory's logarithm that are kept free."""


# --- what may begin ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A part of a configuration's training that may begin."""

    key: str
    """Key of the part."""
    values: Values
    rung: int
    number: int | None
    """Number of the configuration; None for one that never began."""
    backfill: bool
    """Whether ASHA has not promoted the configuration yet."""
    run: Run
    first: int
    """Optimizer steps that were trained before."""
    until: int
    """Optimizer step at the rung."""
    step_s: float
    """Expected seconds of a step on a device of its own."""
    memory_bytes: float
    """Bytes that are probably enough."""

    @property
    def seconds(self) -> float:
        """Expected seconds of training on a device of its own."""
        return (self.until - self.first) * self.step_s


@dataclass(frozen=True)
class Refusal:
    """A part of a configuration that the run file does not allow."""

    key: str
    values: Values
    rung: int
    number: int | None
    reason: str


class CandidateQueue:
    """Lists what may begin, and draws new configurations as they are needed."""

    def __init__(
        self,
        space: HyperparameterSpace,
        sampler: Sampler,
        costs: CostModel,
        *,
        rungs: tuple[int, ...],
        eta: int,
        trials: int,
        default_first: bool = True,
        ranks: int = 1,
        ranks_per_node: int | None = None,
    ) -> None:
        """Draw from `space`.

        rungs: steps at each. trials: configurations in all. default_first: whether the run file itself is among them.
        ranks, ranks_per_node: of a trial; None where one node has all of them.
        """
        self.space, self.sampler, self.costs = space, sampler, costs
        self.rungs, self.eta, self.trials, self.default_first = rungs, eta, trials, default_first
        self.ranks, self.ranks_per_node = ranks, ranks_per_node or ranks
        self._allowed: dict[str, tuple[Run, TrialSize] | str] = {}
        """Run and size of each configuration, or why the run file does not allow it: bound once, and asked for often."""
        self._drawn: dict[str, Values] = {}

    def candidates(self, store: StudyStore, lookahead: int, *, backfill: bool) -> list[Candidate | Refusal]:
        """Return all that may begin now: promoted configurations, then interrupted ones, then new ones.

        lookahead: new ones to have at hand, among which the scheduler may choose the order. backfill: whether to add those
        that are likely to be promoted.
        """
        known = group_configurations(store.trials())
        taken = store.taken()
        by_number = {one.number: one for one in known}
        # All from the store: what other processes finished meanwhile counts as well.
        standings = [one.standing() for one in known]
        promoted = [one.number for one in promotable_trials(standings, self.eta, len(self.rungs))]
        waiting = [one.number for one in backfill_order(standings, len(self.rungs))] if backfill else []
        found = []
        for number in dict.fromkeys([*promoted, *waiting]):
            one = by_number[number]
            rung = one.standing().begun + 1
            if not one.running and part_key(one.key, rung) not in taken:
                found.append(self._candidate(one.key, one.values, rung, number, backfill=number not in promoted))
        # Interrupted before their first rung: their folder and number are kept.
        again = [one for one in known if not one.counted and part_key(one.key, 0) not in taken]
        found += [self._candidate(one.key, one.values, 0, one.number) for one in again]
        begun = sum(one.counted for one in known) + len(again)
        self._draw_new(known, min(lookahead, self.trials - begun))
        return found + [self._candidate(key, values, 0, None) for key, values in self._drawn.items()]

    def candidate_of(self, part: Trial, number: int) -> Candidate | Refusal:
        """Return a part that has begun as it was. number: of its configuration."""
        return self._candidate(part.key.rpartition("@")[0], dict(part.values), rung_of(part), number)

    def mark_begun(self, candidate: Candidate | Refusal) -> None:
        """Take a new configuration off the queue: this process or another has begun it."""
        self._drawn.pop(candidate.key.rpartition("@")[0], None)

    def learn_cost(self, values: Values, step_s: float, memory_bytes: float | None, sharing: float) -> None:
        """Take in what a trial took; see `CostModel.learn`. Does nothing for a configuration that is refused."""
        allowed = self._resolve(key_of(values), values)
        if not isinstance(allowed, str):
            self.costs.learn(allowed[1], values, step_s, memory_bytes, sharing)

    def _draw_new(self, known: list[Configuration], wanted: int) -> None:
        """Draw configurations until `wanted` are at hand, or the sampler finds none."""
        begun = {one.key for one in known}
        self._drawn = {key: values for key, values in self._drawn.items() if key not in begun}
        if wanted <= len(self._drawn):
            self._drawn = dict(list(self._drawn.items())[: max(wanted, 0)])
            return
        default = self.space.default()
        if self.default_first and key_of(default) not in begun | set(self._drawn):
            # In a resumed study too: a longer trial may have begun before it, and its process may have ended since.
            self._drawn = {key_of(default): default, **self._drawn}
        # A batch is drawn from one history: what is drawn is told apart by the taken keys alone.
        # Samplers cannot compare scores of different rungs: they see each as it may be at the last rung.
        scores = project_scores([one.standing() for one in known], len(self.rungs))
        history = []
        for one in known:
            failed = one.failure
            if failed is not None and failed.outcome is not None:
                history.append(Observation(one.values, None, failed.outcome.cause))
            elif one.number in scores:
                history.append(Observation(one.values, scores[one.number]))
        while len(self._drawn) < wanted:
            proposal = self.sampler.propose(history, begun | set(self._drawn))
            if proposal is None:
                return
            self._drawn[key_of(proposal.values)] = proposal.values

    def _candidate(
        self, key: str, values: Values, rung: int, number: int | None, *, backfill: bool = False
    ) -> Candidate | Refusal:
        allowed = self._resolve(key, values)
        if isinstance(allowed, str):
            return Refusal(part_key(key, rung), dict(values), rung, number, allowed)
        run, size = allowed
        return Candidate(
            key=part_key(key, rung),
            values=dict(values),
            rung=rung,
            number=number,
            backfill=backfill,
            run=run,
            first=self.rungs[rung - 1] if rung else 0,
            until=self.rungs[rung],
            step_s=self.costs.step_seconds(size, values),
            memory_bytes=self.costs.memory(size, values),
        )

    def _resolve(self, key: str, values: Values) -> tuple[Run, TrialSize] | str:
        """Return (run, size) of a configuration, or why the run file does not allow it."""
        if key not in self._allowed:
            try:
                run = self.space.run_of(values, tuned_overrides(self.space.run))
                model = bind(run)
                # What no rank could run needs no processes that say so.
                resolve_layout(model, self.ranks, self.ranks_per_node)
                self._allowed[key] = run, measure_size(model, self.ranks)
            except ConfigError as error:
                self._allowed[key] = str(error)
        return self._allowed[key]


# --- what it costs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialSize:
    """Size of a trial, by its family's own functions."""

    flops: float
    """FLOPs of a step on each rank, forward and backward."""
    parameters: float
    bytes: float
    """Bytes of memory by a rule of thumb."""


def measure_size(model: BoundModel, ranks: int = 1) -> TrialSize:
    """Return the size of a run on `ranks` ranks. Raises DataError where the data that say so are not prepared.

    Memory is that of one rank: what layouts spare of it the trials themselves tell.
    """
    run, parameters, flops = model.run, model.parameter_count(), model.flops_per_sample()
    width = float(getattr(run.model, "d_model", _USUAL_WIDTH))
    # 6 FLOPs a matmul parameter and row: a row of width w through w * w parameters keeps some widths of numbers.
    activations = flops * one_rank_microbatch(model) / (6.0 * width) * _ACTIVATION_WIDTHS / 4.0
    memory = _PROCESS_BYTES + _STATE_BYTES * parameters + 4.0 * activations
    return TrialSize(flops * global_batch_samples(run) / ranks, parameters, memory)


class CostModel:
    """Time and memory of the trials of one space on one kind of device."""

    def __init__(self, ranges: Mapping[str, Range], reference: TrialSize, *, accelerator: bool) -> None:
        """reference: size of the run file as it stands."""
        self._ranges = dict(ranges)
        self._reference = reference
        self._flop_s = _FIRST_FLOP_S[accelerator]
        # A choice changes time by half its logarithm or so, memory by half of that.
        choices = np.full(len(self._choice_columns({})), 0.5)
        self._seconds = BayesianRegression(
            np.concatenate([[0.0, 0.0, _SHARING_EXPONENT[accelerator]], 0.0 * choices]),
            # The device's rate may be off by a factor of 20, the exponents of size and sharing by a third.
            np.concatenate([[3.0, 0.3, 0.3], choices]),
        )
        self._memory = BayesianRegression(
            np.concatenate([[0.0, 0.0], 0.0 * choices]), np.concatenate([[0.7, 0.3], 0.5 * choices])
        )

    def learn(self, size: TrialSize, values: Values, step_s: float, memory_bytes: float | None, sharing: float) -> None:
        """Take in a trial: seconds of a step with `sharing` trials on its device, and peak bytes; None is not known."""
        self._seconds.add(self._time_row(size, values, sharing), math.log(step_s) - self._first_guess(size))
        if memory_bytes is not None:
            self._memory.add(self._memory_row(size, values), math.log(memory_bytes) - math.log(size.bytes))

    def step_seconds(self, size: TrialSize, values: Values, sharing: float = 1.0) -> float:
        """Return the expected seconds of a step with `sharing` trials on the device."""
        return math.exp(self._seconds.predict(self._time_row(size, values, sharing))[0] + self._first_guess(size))

    def memory(self, size: TrialSize, values: Values) -> float:
        """Return bytes that are probably enough."""
        mean, spread = self._memory.predict(self._memory_row(size, values))
        # Before any trial the spread is the prior's, and would more than double every trial.
        learned = self._memory.observations > 0
        return size.bytes * math.exp(mean + (_SPREAD * spread if learned else 0.0))

    def _first_guess(self, size: TrialSize) -> float:
        return math.log(_LEAST_STEP_S + size.flops / self._flop_s)

    def _time_row(self, size: TrialSize, values: Values, sharing: float) -> Floats:
        known = [1.0, math.log(size.flops / self._reference.flops), math.log(max(sharing, 1.0))]
        return np.concatenate([known, self._choice_columns(values)])

    def _memory_row(self, size: TrialSize, values: Values) -> Floats:
        return np.concatenate([[1.0, math.log(size.bytes / self._reference.bytes)], self._choice_columns(values)])

    def _choice_columns(self, values: Values) -> Floats:
        """Return what was chosen as numbers: a column for each number, and one for each of several values."""
        found: list[float] = []
        for name, given in self._ranges.items():
            if isinstance(given, Choices):
                found += [float(name in values and values[name] == one) for one in given.values]
            else:
                # The middle of a range is 0, as is a parameter that does not apply.
                found.append(given.position(values[name]) - 0.5 if name in values else 0.0)
        return np.asarray(found)


class BayesianRegression:
    """A linear function whose coefficients have a normal prior each, and observations a known noise (Bishop 2006, 3.3).

    scikit-learn's has one prior for all coefficients and fits them to the data, of which there are none at first. Here each
    coefficient has its own, and observations are added one by one: every candidate is predicted anew after each.
    """

    def __init__(self, mean: Floats, spread: Floats) -> None:
        """mean, spread: prior mean and standard deviation of each coefficient."""
        self.observations = 0
        # Precisions add up, so an observation is two additions, and nothing of it need be kept.
        self._precision = np.diag(1.0 / spread**2)
        self._target = mean / spread**2

    def add(self, row: Floats, value: float) -> None:
        """Add an observation."""
        self.observations += 1
        self._precision += np.outer(row, row) / _NOISE**2
        self._target = self._target + row * value / _NOISE**2

    def predict(self, row: Floats) -> tuple[float, float]:
        """Return the expected value at a row, and the standard deviation of an observation there."""
        solved = np.linalg.solve(self._precision, np.stack([self._target, row], axis=1))
        return float(row @ solved[:, 0]), math.sqrt(float(row @ solved[:, 1]) + _NOISE**2)
