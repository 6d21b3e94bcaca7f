"""The space of a search of layouts: legal layouts, times the tunables that apply to each, less what constraints exclude.

A finite list of points, each a position in the values of every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.config.studies import Search, Tunable
from phalanx.errors import ConfigError
from phalanx.layout.spec import CONTEXTS, GATHERS, OFFLOADS, RECOMPUTES, SCHEDULES, LayoutTable, ResolvedLayout
from phalanx.planner.rank.enumeration import CHOSEN, SELDOM
from phalanx.study.space import Choices, Integers, Mask, Range, Scalar, Values, condition_holds, format_override
from phalanx.study.trial import key_of

Ints = npt.NDArray[np.int64]

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
    """A parameter of the search."""

    name: str
    """A field of the layout; of another tunable `section.field` or `env.NAME`."""
    values: tuple[Scalar, ...]
    """All values; numbers ascending."""

    @property
    def ordered(self) -> bool:
        """Whether the values are numbers, of which some lie nearer to each other than others."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True)
class LayoutSpace:
    """All points of a search."""

    parameters: tuple[Parameter, ...]
    codes: Ints
    """[points, parameters]: positions in the parameters' values."""
    layouts: LayoutTable
    """Distinct layouts of the points."""
    layout_of: Ints
    """[points]: index into `layouts`."""

    def __len__(self) -> int:
        return len(self.codes)

    def values(self, point: int) -> Values:
        """Return what is chosen at a point, without tunables that do not apply there or change nothing."""
        pairs = zip(self.parameters, self.codes[point].tolist(), strict=True)
        return {one.name: value for one, code in pairs if (value := one.values[code]) is not None}

    def key(self, point: int) -> str:
        """Return the point's name in a study: the same in every space that holds the point."""
        return key_of(self.values(point))

    def find(self, values: Mapping[str, Scalar]) -> int | None:
        """Return the point with these values; None where the space has none."""
        return self._point_of_key.get(key_of(values))

    def free_points(self, taken: set[str]) -> Mask:
        """Return which points have a key that is not taken, [points]."""
        free = np.ones(len(self), bool)
        # Other searches of the study may have tried what this space does not have.
        free[[self._point_of_key[key] for key in taken if key in self._point_of_key]] = False
        return free

    @cached_property
    def _point_of_key(self) -> dict[str, int]:
        return {self.key(point): point for point in range(len(self))}

    @cached_property
    def _varying(self) -> list[int]:
        """Indices of the parameters that are not the same at all points."""
        return np.flatnonzero(np.ptp(self.codes, axis=0) > 0).tolist() if len(self) else []

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """Positions in the values of each parameter that varies: legal layouts are no product of ranges of values."""
        found: dict[str, Range] = {}
        for one in (self.parameters[number] for number in self._varying):
            # Values may lie far apart, as degrees do: their positions are evenly spread.
            count = len(one.values)
            found[one.name] = Integers(0, count - 1) if one.ordered else Choices(tuple(range(count)))
        return found

    def encode(self, values: Mapping[str, Scalar]) -> Values | None:
        """Return a choice as positions, by name; None where the space does not have it."""
        point = self.find(values)
        return None if point is None else {self.parameters[n].name: int(self.codes[point][n]) for n in self._varying}

    def decode(self, suggested: Mapping[str, Scalar], taken: set[str]) -> Values | None:
        """Return the choice nearest to suggested positions whose key is not taken; None where all are.

        A parameter counts the distance of the two positions over the number of values; one without order counts 1 where
        it differs.
        """
        distance = np.zeros(len(self))
        for number in self._varying:
            one = self.parameters[number]
            apart = np.abs(self.codes[:, number] - int(suggested[one.name] or 0))
            distance += apart / max(1, len(one.values) - 1) if one.ordered else (apart > 0)
        free = self.free_points(taken)
        return self.values(int(np.argmin(np.where(free, distance, np.inf)))) if free.any() else None

    def draw(self, random: np.random.Generator, taken: set[str]) -> Values | None:
        """Return any choice whose key is not taken; None where all are."""
        free = np.flatnonzero(self.free_points(taken))
        return self.values(int(random.choice(free))) if len(free) else None

    def overrides(self, point: int) -> list[str]:
        """Return the overrides of the run file that make it the point's."""
        # A tunable of value None stays as the run file has it, and is not among the values.
        layout, values = self.layouts.row(int(self.layout_of[point])), self.values(point)
        chosen = {f"layout.{name}": value for name, value in values.items() if name in LAYOUT}
        chosen["layout.dp_shard"] = layout.dp_shard
        if layout.pp == 1:
            # Without stages the schedule has no effect, and a number of stages a rank would not go with every schedule.
            chosen["layout.stages_per_rank"] = "auto"
        if layout.cp == 1:
            chosen["layout.context"] = "auto"
        tunables = {name: value for name, value in values.items() if name not in LAYOUT}
        chosen |= {name: value for name, value in tunables.items() if not name.startswith(_ENVIRONMENT)}
        return [format_override(name, value) for name, value in chosen.items()]

    def tunable_values(self) -> Iterator[tuple[Ints, list[str]]]:
        """Yield the points at which a field of the run file beside the layout has some value, and that value's override."""
        for place, one in enumerate(self.parameters):
            if one.name in LAYOUT or one.name.startswith(_ENVIRONMENT):
                continue
            for code, value in enumerate(one.values):
                points = np.flatnonzero(self.codes[:, place] == code)
                if value is not None and len(points):
                    yield points, [format_override(one.name, value)]

    def env(self, point: int) -> dict[str, str]:
        """Return the environment variables of the ranks at a point."""
        chosen = self.values(point).items()
        return {name.removeprefix(_ENVIRONMENT): str(value) for name, value in chosen if name.startswith(_ENVIRONMENT)}

    def describe(self, point: int) -> str:
        """Return the point in one line."""
        text = str(self.layouts.row(int(self.layout_of[point])))
        values = self.values(point)
        extra = {name: values[name] for name in ("microbatch", "recompute")}
        extra |= {name: value for name, value in values.items() if name not in LAYOUT}
        return " ".join([text, *(f"{name}={value}" for name, value in extra.items())])

    def take(self, which: Any) -> LayoutSpace:
        """Return the space of the points at these positions, or where this mask is true."""
        return LayoutSpace(self.parameters, self.codes[which], self.layouts, self.layout_of[which])


def build_layout_space(layouts: LayoutTable, search: Search) -> LayoutSpace:
    """Return the space of these layouts and of the tunables of a run file.

    Raises ConfigError for tunables and conditions that cannot be, and where constraints leave nothing.
    """
    # Layouts first, then a tunable at a time: each multiplies the points, and constraints come when all names are known.
    layouts = layouts.take(matching_layouts(layouts, search))
    columns = {name: layout_column(layouts, name) for name in CHOSEN}
    # A model without experts has no choice of `ep`: its trials keep the names that studies gave them before there was one.
    plain = ResolvedLayout(global_batch=1)
    names = [name for name in LAYOUT if name not in SELDOM or (columns[name] != getattr(plain, name)).any()]
    parameters, positions = [], []
    for name in names:
        found = np.unique(columns[name]).tolist()
        # Numbers ascend and names stand as the planner lists them: general samplers take neighbours for alike.
        values = tuple(word for word in _NAMED[name] if word in found) if name in _NAMED else tuple(found)
        order = np.argsort(np.asarray(values))
        parameters.append(Parameter(name, values))
        positions.append(order[np.searchsorted(np.asarray(values)[order], columns[name])])
    codes = np.stack(positions, axis=1).astype(np.int64)
    space = LayoutSpace(tuple(parameters), codes, layouts, np.arange(len(layouts)))
    for name, tunable in search.knobs.items():
        space = _add_tunable(space, name, tunable)
    for condition in search.constraints:
        space = space.take(condition_holds(condition, _condition_columns(space), len(space)))
    if not len(space):
        raise ConfigError("no legal layout that may fit is left by search.layout and search.constraints; loosen them")
    return space


def matching_layouts(layouts: LayoutTable, search: Search) -> Mask:
    """Return which layouts have the values that the run file lists.

    Raises ConfigError for fields and values that there are not.
    """
    check_layout(search)
    keep = np.ones(len(layouts), bool)
    for name, values in search.layout.items():
        keep &= np.isin(layout_column(layouts, name), np.asarray(values))
    return keep


def layout_column(layouts: LayoutTable, name: str) -> npt.NDArray[Any]:
    """Return one field of many layouts as its plain values."""
    column = getattr(layouts, name)
    return np.asarray(_NAMED[name])[column] if name in _NAMED else np.asarray(column)


def check_layout(search: Search) -> None:
    """Raise ConfigError for fields in `search.layout` that are not chosen, and for values that these cannot have."""
    for name, given in search.layout.items():
        if name not in CHOSEN:
            raise ConfigError(f"search.layout.{name}: a search does not choose it; it chooses {', '.join(CHOSEN)}")
        known = _NAMED.get(name)
        least = 0 if name in ("zero", "reshard_after_forward", *OFFLOADS) else 1
        wrong = [x for x in given if (x not in known if known else isinstance(x, str) or x is None or x < least)]
        if not given or wrong:
            words = ", ".join(known) if known else f"numbers from {least} on"
            raise ConfigError(f"search.layout.{name}={list(given)}: give a list of one or more of {words}")


def _condition_columns(space: LayoutSpace) -> dict[str, npt.NDArray[Any]]:
    """Return the values at all points by name; None where a tunable does not apply."""
    found = {name: layout_column(space.layouts, name)[space.layout_of] for name in CHOSEN}
    for place, one in enumerate(space.parameters):
        if one.name not in found:
            found[one.name] = np.asarray(one.values, object if None in one.values else None)[space.codes[:, place]]
    return found


def _add_tunable(space: LayoutSpace, name: str, tunable: Tunable) -> LayoutSpace:
    if "." not in name:
        raise ConfigError(f"search.knobs.{name}: a knob is section.field of the run file, or env.NAME")
    section, _, field = name.partition(".")
    if section == "layout" and field in CHOSEN:
        raise ConfigError(f"search.knobs.{name}: {field} is chosen anyway; give its values as search.layout.{field}")
    applies: Mask = np.ones(len(space), bool)
    if tunable.when is not None:
        applies = condition_holds(tunable.when, _condition_columns(space), len(space))
    # Points to which the tunable does not apply get a None, so that they are counted once.
    values = tuple(dict.fromkeys(tunable.values))
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
    return LayoutSpace(
        (*space.parameters, Parameter(name, values)), codes.astype(np.int64), space.layouts, grown.layout_of
    )
