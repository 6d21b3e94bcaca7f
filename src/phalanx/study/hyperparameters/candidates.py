"""What tuning may begin next: every part of a configuration that is ready, with what it is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.study.hyperparameters.asha import backfill_order, project_scores, promotable_trials
from phalanx.study.hyperparameters.configurations import Configuration, group_configurations, part_key
from phalanx.study.hyperparameters.cost import CostModel, TrialSize, measure_size
from phalanx.study.hyperparameters.jobs import quiet_overrides
from phalanx.study.hyperparameters.packing import Ready
from phalanx.study.hyperparameters.space import HyperparameterSpace
from phalanx.study.samplers import Observation, Sampler
from phalanx.study.space import Scalar, Values
from phalanx.study.store import StudyStore
from phalanx.study.trial import key_of


@dataclass(frozen=True)
class Candidate:
    """A part of a configuration's training that may begin."""

    key: str
    """Key of the part."""
    values: Values
    rung: int
    run: Run | None
    """None where the run file does not allow the values; `refusal` says why."""
    size: TrialSize | None
    refusal: str = ""
    number: int | None = None
    """Number of the configuration; None for one that never began."""
    backfill: bool = False
    """Whether ASHA has not promoted the configuration yet."""


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
    ) -> None:
        """rungs: steps at each. trials: configurations in all. default_first: whether the run file itself is among them."""
        self.space, self.sampler, self.costs = space, sampler, costs
        self.rungs, self.eta, self.trials, self.default_first = rungs, eta, trials, default_first
        self._runs: dict[str, tuple[Run | None, TrialSize | None, str]] = {}
        self._drawn: dict[str, Values] = {}

    def candidates(self, store: StudyStore, lookahead: int, *, backfill: bool) -> list[Candidate]:
        """Return all that may begin now: promoted configurations, then interrupted ones, then new ones.

        lookahead: new ones to have at hand, among which the scheduler may choose the order. backfill: whether to add those
        that are likely to be promoted.
        """
        known = group_configurations(store.trials())
        taken = store.taken()
        by_number = {one.number: one for one in known}
        standings = [one.standing() for one in known]
        regular = [one.number for one in promotable_trials(standings, self.eta, len(self.rungs))]
        waiting = [one.number for one in backfill_order(standings, len(self.rungs))] if backfill else []
        found = []
        for number in dict.fromkeys([*regular, *waiting]):
            one = by_number[number]
            rung = one.standing().begun + 1
            if not one.running and part_key(one.key, rung) not in taken:
                found.append(self._candidate(one.key, one.values, rung, number, backfill=number not in regular))
        # Interrupted before their first rung: their folder and number are kept.
        again = [one for one in known if not one.counted and part_key(one.key, 0) not in taken]
        found += [self._candidate(one.key, one.values, 0, one.number) for one in again]
        begun = sum(one.counted for one in known) + len(again)
        self._draw_new(known, min(lookahead, self.trials - begun))
        return found + [self._candidate(key, values, 0, None) for key, values in self._drawn.items()]

    def ready(self, candidates: list[Candidate]) -> list[Ready]:
        """Return the candidates that the run file allows as the scheduler sees them."""
        found = []
        for one in candidates:
            if one.size is None:
                continue
            first = self.rungs[one.rung - 1] if one.rung else 0
            seconds = (self.rungs[one.rung] - first) * self.costs.step_seconds(one.size, one.values)
            found.append(Ready(one.key, seconds, self.costs.memory(one.size, one.values), backfill=one.backfill))
        return found

    def mark_begun(self, candidate: Candidate) -> None:
        """Take a new configuration off the queue: this process or another has begun it."""
        self._drawn.pop(candidate.key.rpartition("@")[0], None)

    def size_of(self, values: Values) -> TrialSize | None:
        """Return the size of a configuration; None where the run file does not allow it."""
        return self._resolve(key_of(values), values)[1]

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
        history = self._observations(known)
        while len(self._drawn) < wanted:
            proposal = self.sampler.propose(history, begun | set(self._drawn))
            if proposal is None:
                return
            self._drawn[key_of(proposal.values)] = proposal.values

    def _observations(self, known: list[Configuration]) -> list[Observation]:
        """Return failures, and scores as they may be at the last rung."""
        scores = project_scores([one.standing() for one in known], len(self.rungs))
        found = []
        for one in known:
            failed = one.failure
            if failed is not None and failed.outcome is not None:
                found.append(Observation(one.values, None, failed.outcome.cause))
            elif one.number in scores:
                found.append(Observation(one.values, scores[one.number]))
        return found

    def _candidate(
        self, key: str, values: Mapping[str, Scalar], rung: int, number: int | None, *, backfill: bool = False
    ) -> Candidate:
        run, size, refusal = self._resolve(key, values)
        return Candidate(part_key(key, rung), dict(values), rung, run, size, refusal, number, backfill)

    def _resolve(self, key: str, values: Mapping[str, Scalar]) -> tuple[Run | None, TrialSize | None, str]:
        """Return (run, size, "") of a configuration, or (None, None, why the run file does not allow it)."""
        if key not in self._runs:
            try:
                run = self.space.run_of(values, quiet_overrides(self.space.run))
                self._runs[key] = (run, measure_size(run), "")
            except ConfigError as error:
                self._runs[key] = (None, None, str(error))
        return self._runs[key]
