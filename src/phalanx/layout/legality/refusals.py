"""What each rule says of many layouts, laid out by the fields that it reads: for pages, which cannot ask it later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np

from phalanx.layout.legality import RULES
from phalanx.layout.legality.rule import Requirements, Rule
from phalanx.layout.spec import DEGREES, Bools, Ints, LayoutTable

Options = Mapping[str, Sequence[Any]]
"""Values that fields other than the degrees may have."""


@dataclass(frozen=True)
class Refusals:
    """What one rule refuses."""

    degrees: tuple[str, ...]
    """The degrees that the rule reads."""
    fields: tuple[str, ...]
    """The other fields that it reads, in the order of the options."""
    splits: list[list[int]]
    """Every choice of these degrees that was asked about."""
    reasons: list[str]
    """Distinct reasons; the first is empty and stands for what the rule allows."""
    found: Ints
    """Position in `reasons` of each choice, [splits, choices of `fields` with the last field varying fastest]."""


def list_refusals(needs: Requirements, splits: LayoutTable, within: Bools, options: Options) -> list[Refusals]:
    """Return what each rule refuses of the splits, combined with all options; rules that refuse nothing are left out.

    Args:
        needs: facts of the run that the rules compare with.
        splits: layouts that differ in their degrees alone.
        within: those that are combined with the options, [splits]; of the others only the degrees are looked at.
        options: values of the other fields that may vary, none of them a degree.
    """
    of_degrees = [rule for rule in RULES if not any(name in options for name in rule.reads)]
    found = [_ask_rule(rule, needs, splits, {}) for rule in of_degrees]
    # Where the degrees are refused, nobody asks about the rest.
    legal = within
    for rule in of_degrees:
        legal = legal & np.logical_not(rule.broken(needs, splits))
    if legal.any():
        possible = splits.take(legal)
        found += [_ask_rule(rule, needs, possible, options) for rule in RULES if rule not in of_degrees]
    return [refusals for refusals in found if refusals is not None]


def _ask_rule(rule: Rule, needs: Requirements, splits: LayoutTable, options: Options) -> Refusals | None:
    """Return what a rule refuses; None for nothing. A rule's answer follows from what it reads: nothing else is varied."""
    degrees = tuple(name for name in DEGREES if name in rule.reads)
    fields = tuple(name for name in options if name in rule.reads)
    values = np.stack([getattr(splits, name) for name in degrees] or [np.zeros(len(splits), np.int64)], axis=1)
    distinct, first = np.unique(values, axis=0, return_index=True)
    table = splits.take(first)
    for name in fields:
        table = table.vary(name, options[name])
    broken = np.broadcast_to(rule.broken(needs, table), len(table))
    if not broken.any():
        return None

    texts: dict[str, int] = {"": 0}
    found = np.zeros(len(table), np.int64)
    refused = np.flatnonzero(broken)
    # Many layouts have one text, and writing it takes longer than comparing what stands in it.
    layouts = table.take(refused)
    names: Iterable[str] = (name for name in rule.reads if name != "branch_groups")
    if isinstance(rule.message, str):
        filled = (field or "" for _, field, _, _ in Formatter().parse(rule.message))
        names = (field.removeprefix("x.") for field in filled if field.startswith("x."))
    columns = [np.asarray(getattr(layouts, name), np.int64) for name in names]
    _, one, which = np.unique(
        np.stack([np.zeros(len(layouts), np.int64), *columns], axis=1), axis=0, return_index=True, return_inverse=True
    )
    places = [texts.setdefault(rule.describe(needs, table.row(index)), len(texts)) for index in refused[one].tolist()]
    found[refused] = np.asarray(places)[which.reshape(-1)]
    return Refusals(degrees, fields, distinct[:, : len(degrees)].tolist(), list(texts), found.reshape(len(first), -1))
