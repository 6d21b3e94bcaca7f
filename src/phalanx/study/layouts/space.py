"""What may be chosen: every layout that is legal, times the knobs that apply to it, less what constraints exclude.

A finite list of points, each a position for every parameter. Engines see parameters and points; only `words` and `env`
know what they mean for a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.config.search import Knob, Scalar, Search
from phalanx.errors import ConfigError
from phalanx.layout.spec import CONTEXTS, GATHERS, RECOMPUTES, SCHEDULES, LayoutTable
from phalanx.planner.layouts.enumerate import CHOSEN
from phalanx.study.trials.expression import Mask, holds
from phalanx.study.trials.trial import key_of

Ints = npt.NDArray[np.int64]
Values = dict[str, Scalar]
"""What was chosen, by the name of the parameter."""

LAYOUT = tuple(name for name in CHOSEN if name != "dp_shard")
"""Parameters of a layout; `dp_shard` follows from the others."""
MOST_POINTS = 4_000_000
_NAMED: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "context": CONTEXTS,
    "recompute": RECOMPUTES,
    "gather": GATHERS,
}
_ENVIRONMENT = "env."


@dataclass(frozen=True)
class Parameter:
    """One thing that is chosen."""

    name: str
    """A field of the layout; of a knob `section.field` or `env.NAME`."""
    values: tuple[Scalar, ...]
    """All that it may be; numbers ascending."""

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers, of which some lie nearer to each other than others."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True)
class Space:
    """All points."""

    parameters: tuple[Parameter, ...]
    codes: Ints
    """[points, parameters]: positions in the parameters' values."""
    layouts: LayoutTable
    """Distinct layouts of the points."""
    layout_of: Ints
    """[points]: which of `layouts` each has."""

    def __len__(self) -> int:
        return len(self.codes)

    def values(self, point: int) -> Values:
        """What is chosen at a point; knobs that do not apply there, or change nothing, are left out."""
        pairs = zip(self.parameters, self.codes[point].tolist(), strict=True)
        return {one.name: value for one, code in pairs if (value := one.values[code]) is not None}

    def key(self, point: int) -> str:
        """The point's name in a study: the same in every space that holds it."""
        return key_of(self.values(point))

    def point_of_key(self, key: str) -> int | None:
        """The point with that name; None where the space has none."""
        return self._points.get(key)

    def find(self, values: Mapping[str, Scalar]) -> int | None:
        """The point with these values; None where the space has none."""
        return self._points.get(key_of(values))

    @cached_property
    def _points(self) -> dict[str, int]:
        return {self.key(point): point for point in range(len(self))}

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Parameters that are not the same at all points."""
        return tuple(np.flatnonzero(np.ptp(self.codes, axis=0) > 0).tolist()) if len(self) else ()

    def words(self, point: int) -> list[str]:
        """Overrides of the run file that make it the point's."""
        layout = self.layouts.row(int(self.layout_of[point]))
        chosen = {f"layout.{name}": value for name, value in self.values(point).items() if name in LAYOUT}
        chosen["layout.dp_shard"] = layout.dp_shard
        if layout.pp == 1:
            # Without stages the schedule has no effect, and a number of them would not go with all of them.
            chosen["layout.stages_per_rank"] = "auto"
        if layout.cp == 1:
            chosen["layout.context"] = "auto"
        knobs = {name: value for name, value in self.values(point).items() if name not in LAYOUT}
        chosen |= {name: value for name, value in knobs.items() if not name.startswith(_ENVIRONMENT)}
        return [_override(name, value) for name, value in chosen.items()]

    def knob_values(self) -> Iterator[tuple[Ints, list[str]]]:
        """Points at which a field of the run file that is no choice of the layout has some value, and its override."""
        for place, one in enumerate(self.parameters):
            if one.name in LAYOUT or one.name.startswith(_ENVIRONMENT):
                continue
            for code, value in enumerate(one.values):
                points = np.flatnonzero(self.codes[:, place] == code)
                if value is not None and len(points):
                    yield points, [_override(one.name, value)]

    def env(self, point: int) -> dict[str, str]:
        """Variables of the ranks' environment at a point."""
        chosen = self.values(point).items()
        return {name.removeprefix(_ENVIRONMENT): str(value) for name, value in chosen if name.startswith(_ENVIRONMENT)}

    def describe(self, point: int) -> str:
        """The point in one line."""
        text = str(self.layouts.row(int(self.layout_of[point])))
        values = self.values(point)
        extra = {name: values[name] for name in ("microbatch", "recompute")}
        extra |= {name: value for name, value in values.items() if name not in LAYOUT}
        return " ".join([text, *(f"{name}={value}" for name, value in extra.items())])

    def take(self, which: Any) -> Space:
        """The points at these positions, or where this mask is true."""
        return Space(self.parameters, self.codes[which], self.layouts, self.layout_of[which])


def build_space(layouts: LayoutTable, search: Search) -> Space:
    """The space of these layouts and of the knobs of a run file. Raises ConfigError, also where nothing is left."""
    layouts = layouts.take(allowed(layouts, search))
    columns = {name: layout_column(layouts, name) for name in CHOSEN}
    parameters = [Parameter(name, _distinct(columns[name], name)) for name in LAYOUT]
    codes = np.stack([_positions(columns[one.name], one.values) for one in parameters], axis=1)
    space = Space(tuple(parameters), codes, layouts, np.arange(len(layouts)))
    for name, knob in search.knobs.items():
        space = _with_knob(space, name, knob)
    for condition in search.constraints:
        space = space.take(holds(condition, _columns(space), len(space)))
    if not len(space):
        raise ConfigError("no legal layout that may fit is left by search.layout and search.constraints; loosen them")
    return space


def allowed(layouts: LayoutTable, search: Search) -> Mask:
    """Which layouts have the values that the run file lists. Raises ConfigError for fields and values that there are not."""
    check_layout(search)
    keep = np.ones(len(layouts), bool)
    for name, values in search.layout.items():
        keep &= np.isin(layout_column(layouts, name), np.asarray(values))
    return keep


def _override(name: str, value: Scalar) -> str:
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def layout_column(layouts: LayoutTable, name: str) -> npt.NDArray[Any]:
    """One field of many layouts as its plain values."""
    column = getattr(layouts, name)
    return np.asarray(_NAMED[name])[column] if name in _NAMED else np.asarray(column)


def check_layout(search: Search) -> None:
    """Raises ConfigError for fields in `search.layout` that are not chosen, and for values that these cannot have."""
    for name, given in search.layout.items():
        if name not in CHOSEN:
            raise ConfigError(f"search.layout.{name}: a search does not choose it; it chooses {', '.join(CHOSEN)}")
        known = _NAMED.get(name)
        least = 0 if name in ("zero", "reshard_after_forward") else 1
        wrong = [x for x in given if (x not in known if known else isinstance(x, str) or x is None or x < least)]
        if not given or wrong:
            words = ", ".join(known) if known else f"numbers from {least} on"
            raise ConfigError(f"search.layout.{name}={list(given)}: give a list of one or more of {words}")


def _distinct(column: npt.NDArray[Any], name: str) -> tuple[Scalar, ...]:
    found = np.unique(column).tolist()
    return tuple(word for word in _NAMED[name] if word in found) if name in _NAMED else tuple(found)


def _positions(column: npt.NDArray[Any], values: tuple[Scalar, ...]) -> Ints:
    order = np.argsort(np.asarray(values))
    return np.asarray(order[np.searchsorted(np.asarray(values)[order], column)], np.int64)


def _columns(space: Space) -> dict[str, npt.NDArray[Any]]:
    """Values by name; a knob that does not apply is None."""
    found = {name: layout_column(space.layouts, name)[space.layout_of] for name in CHOSEN}
    for place, one in enumerate(space.parameters):
        if one.name not in found:
            found[one.name] = _array(one.values)[space.codes[:, place]]
    return found


def _array(values: tuple[Scalar, ...]) -> npt.NDArray[Any]:
    return np.asarray(values) if None not in values else np.asarray(values, object)


def _with_knob(space: Space, name: str, knob: Knob) -> Space:
    if "." not in name:
        raise ConfigError(f"search.knobs.{name}: a knob is section.field of the run file, or env.NAME")
    section, _, field = name.partition(".")
    if section == "layout" and field in CHOSEN:
        raise ConfigError(f"search.knobs.{name}: {field} is chosen anyway; give its values as search.layout.{field}")
    applies: Mask = np.ones(len(space), bool)
    if knob.when is not None:
        applies = holds(knob.when, _columns(space), len(space))
    values = tuple(dict.fromkeys(knob.values))
    choices = np.arange(len(values))
    if not applies.all() and None not in values:
        values = (*values, None)
    still = values.index(None) if None in values else 0
    rows = np.concatenate([np.repeat(np.flatnonzero(applies), len(choices)), np.flatnonzero(~applies)])
    if len(rows) > MOST_POINTS:
        raise ConfigError(f"search.knobs.{name} makes {len(rows):,} points; at most {MOST_POINTS:,} can be searched")
    chosen = np.concatenate([np.tile(choices, int(applies.sum())), np.full(int((~applies).sum()), still)])
    grown = space.take(rows)
    codes = np.concatenate([grown.codes, chosen[:, None]], axis=1)
    return Space((*space.parameters, Parameter(name, values)), codes.astype(np.int64), space.layouts, grown.layout_of)
