"""Spaces: ranges of parameters, what samplers ask of a space, and conditions that every choice must meet.

Spaces differ in what a choice means for a run: a layout space enumerates legal layouts, a hyperparameter space combines
fields of the run file freely. Samplers see neither.

Conditions are written in a run file, such as "tp * microbatch <= 16 or recompute == 'full'", and hold for many choices at
once: only names, numbers, strings, lists, arithmetic and comparisons; nothing is called and no attribute is read. Length,
nesting and the size of numbers are bounded, and arithmetic is for numbers alone, so that no condition takes more memory or
time than its columns do.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.config.document import show_value
from phalanx.errors import ConfigError

Scalar = bool | int | float | str | None
Values = dict[str, Scalar]
"""A choice: values by the name of their parameter, without those of parameters that do not apply."""
Mask = npt.NDArray[np.bool_]

MAX_LENGTH = 2000
"""Characters of a condition."""
MAX_DEPTH = 50
"""Operations inside each other; each term of a sum is inside the next."""
_MAX_WHOLE = 2**62
"""Size of a whole number anywhere in a condition: columns hold 64 bits, beyond which they would wrap around in silence."""
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CONSTANTS = {"true": True, "false": False}
"""Names that YAML's users write for the two."""


@dataclass(frozen=True)
class Choices:
    """One of several values without an order."""

    values: tuple[Scalar, ...]

    def draw(self, random: np.random.Generator) -> Scalar:
        """Return one of the values, each as often."""
        return self.values[int(random.integers(len(self.values)))]

    def contains(self, value: Scalar) -> bool:
        """Return whether the value may be chosen."""
        return value in self.values

    def position(self, value: Scalar) -> float:
        """Return the index of a value."""
        return float(self.values.index(value))


@dataclass(frozen=True)
class Integers:
    """A whole number from `low` to `high`, both included, in steps."""

    low: int
    high: int
    log: bool = False
    """Whether ratios matter rather than differences."""
    step: int = 1
    """1 where `log`."""

    def draw(self, random: np.random.Generator) -> Scalar:
        """Return a number between the bounds, evenly spread; where `log`, its logarithm is."""
        if self.log:
            # Half a step beyond either end, so that the ends are drawn as often as what lies between.
            drawn = math.exp(random.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(drawn), self.low), self.high)
        return self.low + self.step * int(random.integers((self.high - self.low) // self.step + 1))

    def contains(self, value: Scalar) -> bool:
        """Return whether the value may be chosen."""
        # In Python True is an int, too.
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high and (value - self.low) % self.step == 0  # type: ignore[operator]

    def position(self, value: Scalar) -> float:
        """Return how far a value lies up the range, from 0 to 1."""
        return _share_of_range(value, self.low, self.high, self.log)


@dataclass(frozen=True)
class Reals:
    """A number from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Whether ratios matter rather than differences."""

    def draw(self, random: np.random.Generator) -> Scalar:
        """Return a number between the bounds, evenly spread; where `log`, its logarithm is."""
        if self.log:
            return math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        return float(random.uniform(self.low, self.high))

    def contains(self, value: Scalar) -> bool:
        """Return whether the value may be chosen."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def position(self, value: Scalar) -> float:
        """Return how far a value lies up the range, from 0 to 1."""
        return _share_of_range(value, self.low, self.high, self.log)


Range = Choices | Integers | Reals


class Space(Protocol):
    """All choices, as samplers see them."""

    @property
    def ranges(self) -> dict[str, Range]:
        """Ranges that general samplers suggest from, by name; of some spaces these are positions in place of values."""

    def encode(self, values: Mapping[str, Scalar]) -> Values | None:
        """Return a choice in terms of `ranges`; None where the space does not have it."""

    def decode(self, suggested: Mapping[str, Scalar], taken: set[str]) -> Values | None:
        """Return the choice that a suggestion in terms of `ranges` stands for.

        taken: keys of choices that are not to be returned. None where no legal choice is left that the suggestion may mean.
        """

    def draw(self, random: np.random.Generator, taken: set[str]) -> Values | None:
        """Return a legal choice at random whose key is not taken; None where none is found."""


def format_override(name: str, value: Scalar) -> str:
    """Return the `section.field=value` override of the run file that sets a field."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def _share_of_range(value: Scalar, low: float, high: float, log: bool) -> float:
    assert isinstance(value, int | float)
    if low == high:
        return 0.0
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


# --- conditions --------------------------------------------------------------------------------------------------------


def condition_holds(text: str, columns: Mapping[str, npt.NDArray[Any]], count: int) -> Mask:
    """Return whether the condition holds, for each of `count` choices; `columns` are their values by name.

    Raises ConfigError, with the names that are known, for anything that is no such condition.
    """
    shown = repr(text) if len(text) <= MAX_LENGTH else repr(show_value(text))
    try:
        if len(text) > MAX_LENGTH:
            raise _TooLarge(f"{len(text):,} characters; a condition has at most {MAX_LENGTH:,}")
        tree = ast.parse(text.strip(), mode="eval").body
        level: list[ast.AST] = [tree]
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise _TooLarge(f"operations nested more than {MAX_DEPTH} deep; split the condition into several")
        with np.errstate(all="ignore"):
            value = _evaluate_node(tree, columns)
    except (SyntaxError, RecursionError, MemoryError) as error:
        # The last two are what Python's parser answers to brackets within brackets.
        what = error.msg if isinstance(error, SyntaxError) else "too deeply nested"
        raise ConfigError(f"{shown} is not a condition: {what}; write one such as tp * microbatch <= 16") from None
    except _TooLarge as error:
        raise ConfigError(f"{shown}: {error}") from None
    except _Unknown as error:
        raise ConfigError(f"{shown}: {error}; known names: {', '.join(sorted(columns))}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{shown} cannot be computed: {error}") from None
    found = np.broadcast_to(np.asarray(value), (count,)) if not isinstance(value, list) else np.asarray(value, object)
    if found.dtype != np.bool_:
        raise ConfigError(f"{shown} is a value, not a condition; compare it with something")
    return found


class _Unknown(Exception):
    """A name or a construct that conditions do not have."""


class _TooLarge(Exception):
    """A condition, or a number in it, beyond the bounds."""


def _evaluate_node(node: ast.AST, columns: Mapping[str, npt.NDArray[Any]]) -> Any:
    """Return the value of a part of a condition for each choice. Raises _Unknown for what is no part of conditions."""
    match node:
        case ast.Constant(value=int() | float() | str() | bool() as value):
            if isinstance(value, int) and value > _MAX_WHOLE:
                raise _TooLarge(f"a number in it goes beyond {_MAX_WHOLE:,}")
            return value
        case ast.Name(id=name) if name in columns:
            return columns[name]
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Attribute() if (name := ast.unparse(node)) in columns:
            return columns[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate_node(item, columns) for item in items]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _apply_arithmetic(
                op, _require_number(_evaluate_node(left, columns)), _require_number(_evaluate_node(right, columns))
            )
        case ast.BoolOp(op=op, values=items):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return reduce(join, [_require_plain(_evaluate_node(item, columns)) for item in items])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_require_plain(_evaluate_node(operand, columns)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_require_number(_evaluate_node(operand, columns))
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_evaluate_node(side, columns) for side in (left, *others)]
            # a < b < c is a < b and b < c.
            pairs = zip(sides, ops, sides[1:], strict=False)
            return reduce(np.logical_and, [_apply_comparison(type(op), a, b) for a, op, b in pairs])
    raise _Unknown(f"{ast.unparse(node)} is not known")


def _require_number(value: Any) -> Any:
    """Return the value as a number: of a condition 1 where it holds, so that conditions can be counted.

    Raises TypeError for texts and lists, which arithmetic would repeat."""
    column = np.asarray(value)
    texts = column.dtype.kind in "US" or (column.dtype == object and any(isinstance(item, str) for item in column.flat))
    if isinstance(value, list) or texts:
        raise TypeError("arithmetic is for numbers, and this has text or a list in it")
    return column.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == np.bool_ else value


def _apply_arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """Return what the operator gives, choice by choice.

    Raises _TooLarge for whole numbers beyond 64 bits, ZeroDivisionError for a divisor that is zero in all choices.
    """
    if isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
        if not np.any(right):
            raise ZeroDivisionError("division by zero")
    # Tried out in floating point: whole numbers of 64 bits would wrap around in silence.
    elif np.any(
        np.abs(_ARITHMETIC[type(op)](np.asarray(left, np.float64), np.asarray(right, np.float64))) > _MAX_WHOLE
    ):
        raise _TooLarge(f"a number in it goes beyond {_MAX_WHOLE:,}")
    return _ARITHMETIC[type(op)](left, right)


def _require_plain(value: Any) -> Any:
    if isinstance(value, list):
        raise _Unknown("a list stands behind in")
    return value


def _apply_comparison(kind: type[ast.AST], left: Any, right: Any) -> Any:
    """Return the comparison, choice by choice; the values in a list behind `in` may be other columns."""
    left = _require_plain(left)
    if kind in _COMPARISONS:
        return np.asarray(_COMPARISONS[kind](left, _require_plain(right)))
    if kind not in (ast.In, ast.NotIn):
        raise _Unknown("is and is not are not known")
    if not isinstance(right, list):
        raise _Unknown("in wants a list behind it")
    # numpy's isin takes values alone, no columns.
    found = reduce(np.logical_or, [np.asarray(left == _require_plain(each)) for each in right], np.asarray(False))
    return found if kind is ast.In else np.logical_not(found)
