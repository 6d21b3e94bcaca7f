"""The space of tuning: fields of the run file with their ranges, when each applies, and what every choice must meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phalanx.config.document import flatten_fields
from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.config.studies import Tune
from phalanx.errors import ConfigError
from phalanx.study.space import Choices, Integers, Range, Reals, Scalar, Values, condition_holds, format_override
from phalanx.study.trial import key_of

_NOT_CHOSEN = ("tune", "search", "checkpoint", "evaluation", "cluster")
"""Sections that do not decide what a trial computes, or decide how it is judged."""
_FIXED = {
    "training.steps": "it is what rungs count; set it in the run file",
    "training.run_dir": "every trial has a folder of its own",
    "training.resume": "trials go on from their own checkpoints",
}

_ATTEMPTS = 200
"""Draws before a space counts as empty of anything new."""
_ROOM_DRAWS = 2000
"""Draws that see whether constraints leave any choice."""
# Schema errors carry no kind that tells a wrong name from a wrong value.
_NO_FIELD = ("there is no such field", "is not a section", "holds no fields", "does not exist in the list")


@dataclass(frozen=True)
class Parameter:
    """A field that may be chosen."""

    name: str
    range: Range
    when: str | None = None
    """Condition without which the field stays as the run file has it."""


@dataclass(frozen=True)
class HyperparameterSpace:
    """All choices around one run file."""

    run: Run
    parameters: tuple[Parameter, ...]
    constraints: tuple[str, ...] = ()

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """Ranges by the name of the field, in the order of the run file."""
        return {one.name: one.range for one in self.parameters}

    def encode(self, values: Mapping[str, Scalar]) -> Values | None:
        """Return a choice as it is; None for the run file as it stands where that lies outside the ranges."""
        return dict(values) if values and set(values) <= set(self.ranges) else None

    def decode(self, suggested: Mapping[str, Scalar], taken: set[str]) -> Values | None:
        """Return the suggested values that apply; None where constraints exclude them or their key is taken."""
        values = self.drop_inapplicable(suggested)
        return values if key_of(values) not in taken and self.meets_constraints(values) else None

    def draw(self, random: np.random.Generator, taken: set[str]) -> Values | None:
        """Return an allowed choice at random whose key is not taken; None where many draws find none."""
        for _ in range(_ATTEMPTS):
            values = self.decode({one.name: one.range.draw(random) for one in self.parameters}, taken)
            if values is not None:
                return values
        return None

    def drop_inapplicable(self, values: Mapping[str, Scalar]) -> Values:
        """Return `values` without those of parameters whose condition does not hold beside the others."""
        found: Values = {}
        # In the order of the run file: a condition sees the parameters above it, as far as these apply.
        for one in self.parameters:
            if one.name in values and (one.when is None or self._holds(one.when, found)):
                found[one.name] = values[one.name]
        return found

    def meets_constraints(self, values: Mapping[str, Scalar]) -> bool:
        """Return whether all constraints hold for a choice."""
        return all(self._holds(condition, values) for condition in self.constraints)

    def default(self) -> Values:
        """Return what the run file itself has; nothing where a field that applies lies outside its range."""
        values = self.drop_inapplicable({one.name: self._own.get(one.name) for one in self.parameters})
        return values if all(self.ranges[name].contains(value) for name, value in values.items()) else {}

    def run_of(self, values: Mapping[str, Scalar], overrides: Sequence[str] = ()) -> Run:
        """Return the run with these values, and with further overrides. Raises ConfigError where they do not go together."""
        chosen = [format_override(name, value) for name, value in values.items()]
        return parse_run(dump_run(self.run), "the run file", [*overrides, *chosen])

    @cached_property
    def _own(self) -> dict[str, Scalar]:
        return flatten_fields(self.run.model_dump(mode="json"))

    def _holds(self, condition: str, values: Mapping[str, Scalar]) -> bool:
        # Conditions take columns of many choices; here there is one. A None needs the type object.
        columns = {
            name: np.asarray([value], object if value is None else None)
            for name, value in {**self._own, **values}.items()
        }
        return bool(condition_holds(condition, columns, 1)[0])


def build_hyperparameter_space(run: Run) -> HyperparameterSpace:
    """Return the space of a run file's `tune` section.

    Raises ConfigError for fields, ranges and conditions that cannot be.
    """
    section: Tune = run.tune
    if not section.parameters:
        raise ConfigError(
            "tune.parameters is empty; name fields to choose, as in optimizer.lr: {low: 1e-4, high: 1e-2}"
        )
    own = flatten_fields(run.model_dump(mode="json"))
    found: list[Parameter] = []
    for name, given in section.parameters.items():
        if name in _FIXED or name.partition(".")[0] in _NOT_CHOSEN:
            why = _FIXED.get(name, "trials do not depend on it, or are judged by it")
            raise ConfigError(f"tune.parameters.{name} cannot be chosen: {why}")
        values, low, high = given.values, given.low, given.high
        try:
            parse_run(dump_run(run), "the run file", [format_override(name, low if values is None else values[0])])
        except ConfigError as error:
            # A value may well be wrong beside others of the run file; a name is wrong beside any.
            if any(said in str(error) for said in _NO_FIELD):
                raise ConfigError(f"tune.parameters.{name}: {error}") from None
        if values is not None:
            found.append(Parameter(name, Choices(tuple(values)), given.when))
        elif isinstance(low, int) and isinstance(high, int):
            # steps end at or below the high end
            last = low + (high - low) // given.step * given.step
            found.append(Parameter(name, Integers(low, last, given.log, given.step), given.when))
        else:
            assert low is not None and high is not None
            found.append(Parameter(name, Reals(float(low), float(high), given.log), given.when))
    parameters = tuple(found)
    space = HyperparameterSpace(run, parameters, section.constraints)
    # Conditions are tried out now: one that is no condition is found before anything runs.
    space.drop_inapplicable({one.name: own.get(one.name) for one in parameters})
    space.meets_constraints(own)
    # Constraints that nothing meets would let the sampler draw without end.
    random = np.random.default_rng(0)
    draws = ({one.name: one.range.draw(random) for one in parameters} for _ in range(_ROOM_DRAWS))
    if space.constraints and not any(space.meets_constraints(space.drop_inapplicable(draw)) for draw in draws):
        raise ConfigError(
            f"tune.constraints: none of {_ROOM_DRAWS:,} choices drawn at random meets {' and '.join(space.constraints)}; "
            "widen tune.parameters, or drop one of them"
        )
    return space
