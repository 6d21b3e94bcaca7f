"""The rules that say whether a layout is legal for a run: one list, for a single layout as for a million.

A rule is a predicate over a table of layouts, with the message and the fixes for a layout that breaks it. `reasons_against`
asks them of one layout, which is a table of one row; `is_legal` makes a mask of them for many. Nothing is allocated and no
device is asked. `layout.resolve` keeps those fixes that lead to a legal layout, or adds the nearest legal degrees.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from phalanx.families.family import BoundModel
from phalanx.layout.legality.degree_rules import BRANCH_RULES, DEGREE_RULES, NODE_RULES, SPLIT_RULES
from phalanx.layout.legality.pipeline_rules import BATCH_RULES, STAGE_RULES
from phalanx.layout.legality.precision_rules import PRECISION_RULES
from phalanx.layout.legality.rule import Reason, Requirements
from phalanx.layout.legality.sharding_rules import OFFLOAD_RULES, SHARDING_RULES
from phalanx.layout.spec import Bools, LayoutTable, ResolvedLayout

RULES = (
    *DEGREE_RULES,
    *SHARDING_RULES,
    *BRANCH_RULES,
    *SPLIT_RULES,
    *PRECISION_RULES,
    *OFFLOAD_RULES,
    *STAGE_RULES,
    *BATCH_RULES,
    *NODE_RULES,
)
"""All rules, in the order in which messages follow each other."""


def is_legal(
    needs: Requirements, layouts: LayoutTable, decided: Set[str] | None = None, changed: str | None = None
) -> Bools:
    """Return which layouts break no rule, [layouts].

    decided: fields that have their values already, while layouts are put together choice by choice; rules that read others
    have to wait. None: all have. changed: the only field that differs from layouts which broke no rule; None: any may.
    """
    legal = np.ones(len(layouts), np.bool_)
    for rule in RULES:
        asked = changed is None or changed in rule.reads
        if asked and (decided is None or decided >= set(rule.reads)):
            legal &= np.logical_not(rule.broken(needs, layouts))
    return legal


def reasons_against(
    model: BoundModel, layout: ResolvedLayout, world_size: int, devices_per_node: int | None = None
) -> list[Reason]:
    """Return every reason why `layout` cannot be used for `model` on `world_size` ranks; none for a legal one."""
    needs = Requirements.of_model(model, world_size, devices_per_node)
    broken = [rule for rule in RULES if np.any(rule.broken(needs, layout.table))]
    # The other rules would only repeat what wrong degrees lead to.
    broken = [rule for rule in broken if rule in DEGREE_RULES] or broken
    return [rule.explain(needs, layout) for rule in broken]
