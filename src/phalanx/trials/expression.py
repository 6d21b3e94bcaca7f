"""Conditions written in a run file, such as "tp * microbatch <= 16 or recompute == 'full'", over many choices at once.

Only names, numbers, strings, lists, arithmetic and comparisons: nothing is called and no attribute is read.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError

Mask = npt.NDArray[np.bool_]


def _is_in(one: Any, several: Any) -> Any:
    """Whether `one` is one of a list's values, choice by choice: these may be other columns."""
    if not isinstance(several, list):
        raise _Unknown("in wants a list behind it")
    return reduce(np.logical_or, [np.asarray(one == each) for each in several], np.asarray(False))


def _is_not_in(one: Any, several: Any) -> Any:
    return np.logical_not(_is_in(one, several))


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
    ast.In: _is_in,
    ast.NotIn: _is_not_in,
}
_WORDS = {"true": True, "false": False}


def holds(text: str, columns: Mapping[str, npt.NDArray[Any]], count: int) -> Mask:
    """Whether the condition holds, for each of `count` choices; `columns` are their values by name.

    Raises ConfigError, with the names that are known, for anything that is no such condition.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        value = _value(tree.body, columns)
    except SyntaxError as error:
        raise ConfigError(
            f"{text!r} is not a condition: {error.msg}; write one such as tp * microbatch <= 16"
        ) from None
    except _Unknown as error:
        raise ConfigError(f"{text!r}: {error}; known names: {', '.join(sorted(columns))}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{text!r} cannot be computed: {error}") from None
    found = np.broadcast_to(np.asarray(value), (count,))
    if found.dtype != np.bool_:
        raise ConfigError(f"{text!r} is a value, not a condition; compare it with something")
    return found


class _Unknown(Exception):
    """A name or a construct that conditions do not have."""


def _value(node: ast.AST, columns: Mapping[str, npt.NDArray[Any]]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() | bool() as value):
            return value
        case ast.Name(id=name) if name in columns:
            return columns[name]
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.Attribute() if (name := ast.unparse(node)) in columns:
            return columns[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, columns) for item in items]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_number(_value(left, columns)), _number(_value(right, columns)))
        case ast.BoolOp(op=op, values=items):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return reduce(join, [_value(item, columns) for item in items])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_value(operand, columns))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, columns)
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_value(side, columns) for side in (left, *others)]
            pairs = zip(sides, ops, sides[1:], strict=False)
            return reduce(np.logical_and, [_compare(type(op), a, b) for a, op, b in pairs])
    raise _Unknown(f"{ast.unparse(node)} is not known")


def _number(value: Any) -> Any:
    """The value; of a condition 1 where it holds, so that conditions can be counted: arrays would add up to a condition."""
    return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype == np.bool_ else value


def _compare(kind: type[ast.AST], left: Any, right: Any) -> Any:
    if kind not in _COMPARISONS:
        raise _Unknown("is and is not are not known")
    return np.asarray(_COMPARISONS[kind](left, right))
