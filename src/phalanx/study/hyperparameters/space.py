"""What may be chosen: fields of the run file with their ranges, when each applies, and what every choice must meet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.config.tune import Tune, TuneRange
from phalanx.errors import ConfigError
from phalanx.study.trials.expression import holds
from phalanx.study.trials.ranges import Choices, Integers, Range, Reals, Scalar

Values = dict[str, Scalar]
"""What was chosen, by the name of the field."""

_NOT_CHOSEN = ("tune", "search", "checkpoint", "evaluation", "cluster")
"""Sections that do not decide what a trial computes, or decide how it is judged."""
_FIXED = {
    "training.steps": "it is what rungs count; set it in the run file",
    "training.run_dir": "every trial has a folder of its own",
    "training.resume": "trials go on from their own checkpoints",
}

_NO_FIELD = ("there is no such field", "is not a section", "holds no fields", "does not exist in the list")


@dataclass(frozen=True)
class Parameter:
    """A field that may be chosen."""

    name: str
    range: Range
    when: str | None = None
    """Condition without which it stays as the run file has it."""


@dataclass(frozen=True)
class TuneSpace:
    """All that may be chosen, around one run file."""

    run: Run
    parameters: tuple[Parameter, ...]
    constraints: tuple[str, ...] = ()

    @property
    def ranges(self) -> dict[str, Range]:
        """By name, in the order of the run file."""
        return {one.name: one.range for one in self.parameters}

    def applying(self, values: Mapping[str, Scalar]) -> Values:
        """`values` without those of parameters that do not apply beside the others."""
        found: Values = {}
        for one in self.parameters:
            if one.name in values and (one.when is None or self._meets(one.when, found)):
                found[one.name] = values[one.name]
        return found

    def allowed(self, values: Mapping[str, Scalar]) -> bool:
        """Whether all constraints hold."""
        return all(self._meets(condition, values) for condition in self.constraints)

    def default(self) -> Values:
        """What the run file itself has, of parameters that apply; empty where one of these lies outside its range."""
        values = self.applying({one.name: self._own.get(one.name) for one in self.parameters})
        ranges = self.ranges
        return values if all(ranges[name].holds(value) for name, value in values.items()) else {}

    def run_of(self, values: Mapping[str, Scalar], words: Sequence[str] = ()) -> Run:
        """The run with these values, and with further overrides. Raises ConfigError where they do not go together."""
        return parse_run(dump_run(self.run), "the run file", [*words, *overrides(values)])

    @cached_property
    def _own(self) -> dict[str, Scalar]:
        return _flat(self.run.model_dump(mode="json"))

    def _meets(self, condition: str, values: Mapping[str, Scalar]) -> bool:
        columns = {name: _column(value) for name, value in {**self._own, **values}.items()}
        return bool(holds(condition, columns, 1)[0])


def overrides(values: Mapping[str, Scalar]) -> list[str]:
    """Overrides of the run file that make it the choice's."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]


def build_space(run: Run) -> TuneSpace:
    """The space of a run file's `tune` section. Raises ConfigError for fields, ranges and conditions that cannot be."""
    section: Tune = run.tune
    if not section.parameters:
        raise ConfigError(
            "tune.parameters is empty; name fields to choose, as in optimizer.lr: {low: 1e-4, high: 1e-2}"
        )
    own = _flat(run.model_dump(mode="json"))
    for name, given in section.parameters.items():
        _check_name(run, name, given)
    parameters = tuple(Parameter(name, _range(given), given.when) for name, given in section.parameters.items())
    space = TuneSpace(run, parameters, section.constraints)
    # Conditions are tried out now: one that is no condition is found before anything runs.
    space.applying({one.name: own.get(one.name) for one in parameters})
    space.allowed(own)
    _check_room(space)
    return space


_DRAWN = 2000
"""Choices that are drawn to see whether constraints leave any."""


def _check_room(space: TuneSpace) -> None:
    if not space.constraints:
        return
    random = np.random.default_rng(0)
    for _ in range(_DRAWN):
        if space.allowed(space.applying({one.name: one.range.draw(random) for one in space.parameters})):
            return
    raise ConfigError(
        f"tune.constraints: none of {_DRAWN:,} choices drawn at random meets {' and '.join(space.constraints)}; "
        "widen tune.parameters, or drop one of them"
    )


def _check_name(run: Run, name: str, given: TuneRange) -> None:
    if name in _FIXED or name.partition(".")[0] in _NOT_CHOSEN:
        why = _FIXED.get(name, "trials do not depend on it, or are judged by it")
        raise ConfigError(f"tune.parameters.{name} cannot be chosen: {why}")
    value = given.values[0] if given.values is not None else given.low
    try:
        parse_run(dump_run(run), "the run file", overrides({name: value}))
    except ConfigError as error:
        # A value may well be wrong beside others of the run file; a name is wrong beside any.
        if any(said in str(error) for said in _NO_FIELD):
            raise ConfigError(f"tune.parameters.{name}: {error}") from None


def _range(given: TuneRange) -> Range:
    if given.values is not None:
        return Choices(tuple(given.values))
    low, high = given.low, given.high
    if isinstance(low, int) and isinstance(high, int):
        return Integers(low, low + (high - low) // given.step * given.step, given.log, given.step)
    assert low is not None and high is not None
    return Reals(float(low), float(high), given.log)


def _flat(values: Any, prefix: str = "") -> dict[str, Scalar]:
    """All that is no list or mapping, by dotted name."""
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list):
        items = {str(place): item for place, item in enumerate(values)}.items()
    else:
        return {prefix: values}
    found: dict[str, Scalar] = {}
    for name, value in items:
        found |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _column(value: Scalar) -> np.ndarray[Any, np.dtype[Any]]:
    return np.asarray([value], object if value is None else None)
