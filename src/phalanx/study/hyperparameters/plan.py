"""What a tuner could do next: every part of a trial that may begin, with what it is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.study.hyperparameters.asha import early, promotions
from phalanx.study.hyperparameters.cost import CostModel, Size, size_of
from phalanx.study.hyperparameters.job import quiet_words
from phalanx.study.hyperparameters.packing import Ready
from phalanx.study.hyperparameters.sampler import projected, propose
from phalanx.study.hyperparameters.space import TuneSpace, Values
from phalanx.study.hyperparameters.study import Configuration, configurations, part_key
from phalanx.study.trials.ranges import Told
from phalanx.study.trials.storage import Study
from phalanx.study.trials.trial import key_of


@dataclass(frozen=True)
class Candidate:
    """A part of a trial that may begin."""

    key: str
    """Of the part."""
    values: Values
    rung: int
    run: Run | None
    """None where the run file does not allow the values; `refusal` says why."""
    size: Size | None
    refusal: str = ""
    number: int | None = None
    """Of the configuration; None for one that never began."""
    early: bool = False


@dataclass
class Planner:
    """Knows what is to be tried, and draws new configurations as they are needed."""

    space: TuneSpace
    rungs: tuple[int, ...]
    eta: int
    trials: int
    """Configurations that are tried in all."""
    engine: str
    seed: int
    costs: CostModel
    default_first: bool = True

    def __post_init__(self) -> None:
        self._runs: dict[str, tuple[Run | None, Size | None, str]] = {}
        self._drawn: dict[str, Values] = {}

    def candidates(self, study: Study, lookahead: int, *, fill: bool) -> list[Candidate]:
        """Everything that may begin now: what goes on from a rung, then what was interrupted, then what is new.

        lookahead: new ones to have at hand, from which the scheduler may choose the order. fill: with what would be promoted
        next beside it, marked as early.
        """
        known = configurations(study.trials())
        taken = study.taken()
        found = [one for one in self._going_on(known, fill=fill) if one.key not in taken]
        again = [one for one in known if not one.counted and part_key(one.key, 0) not in taken]
        found += [self._candidate(one.key, one.values, 0, one.number) for one in again]
        begun = sum(one.counted for one in known) + len(again)
        self._draw(known, min(lookahead, self.trials - begun))
        found += [self._candidate(key, values, 0, None) for key, values in self._drawn.items()]
        return found

    def ready(self, candidates: list[Candidate]) -> list[Ready]:
        """The same for the scheduler."""
        found = []
        for one in candidates:
            if one.size is None:
                continue
            first = self.rungs[one.rung - 1] if one.rung else 0
            seconds = (self.rungs[one.rung] - first) * self.costs.step_seconds(one.size, one.values)
            found.append(Ready(one.key, seconds, self.costs.memory(one.size, one.values), early=one.early))
        return found

    def begun(self, candidate: Candidate) -> None:
        """Note that somebody has begun it."""
        self._drawn.pop(candidate.key.rpartition("@")[0], None)

    def size(self, values: Values) -> Size | None:
        """Of a configuration; None where the run file does not allow it."""
        return self._resolve(key_of(values), values)[1]

    def _going_on(self, known: list[Configuration], *, fill: bool) -> list[Candidate]:
        by_number = {one.number: one for one in known}
        standings = [one.standing() for one in known]
        regular = [one.number for one in promotions(standings, self.eta, len(self.rungs))]
        waiting = [one.number for one in early(standings, len(self.rungs))] if fill else []
        found = []
        for number in [*regular, *(number for number in waiting if number not in regular)]:
            one = by_number[number]
            if not one.running:
                rung = one.standing().begun + 1
                found.append(self._candidate(one.key, one.values, rung, number, early=number not in regular))
        return found

    def _draw(self, known: list[Configuration], wanted: int) -> None:
        begun = {one.key for one in known}
        self._drawn = {key: values for key, values in self._drawn.items() if key not in begun}
        if wanted <= len(self._drawn):
            self._drawn = dict(list(self._drawn.items())[: max(wanted, 0)])
            return
        default = self.space.default()
        if self.default_first and key_of(default) not in begun | set(self._drawn):
            # Also in a study that goes on: longer trials may have begun before it, and its tuner have ended since.
            self._drawn = {key_of(default): default, **self._drawn}
        history = self._history(known)
        while len(self._drawn) < wanted:
            taken = begun | set(self._drawn)
            drawn = propose(self.engine, self.space, history, taken, seed=self.seed, drawn=len(taken))
            if drawn is None:
                return
            self._drawn[key_of(drawn)] = drawn

    def _history(self, known: list[Configuration]) -> list[Told]:
        scores = projected([one.standing() for one in known], len(self.rungs))
        found = []
        for one in known:
            failed = one.failure
            # The run file as it stands may lie outside the ranges: then samplers cannot be told of it.
            if set(one.values) <= set(self.space.ranges) and one.values:
                if failed is not None and failed.outcome is not None:
                    found.append(Told(one.values, None, failed.outcome.cause))
                elif one.number in scores:
                    found.append(Told(one.values, scores[one.number]))
        return found

    def _candidate(
        self, key: str, values: Mapping[str, object], rung: int, number: int | None, *, early: bool = False
    ) -> Candidate:
        plain: Values = dict(values)  # type: ignore[arg-type]
        run, size, refusal = self._resolve(key, plain)
        return Candidate(part_key(key, rung), plain, rung, run, size, refusal, number, early)

    def _resolve(self, key: str, values: Values) -> tuple[Run | None, Size | None, str]:
        if key not in self._runs:
            try:
                run = self.space.run_of(values, quiet_words(self.space.run))
                self._runs[key] = (run, size_of(run), "")
            except ConfigError as error:
                self._runs[key] = (None, None, str(error))
        return self._runs[key]
