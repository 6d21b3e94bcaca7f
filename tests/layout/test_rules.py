"""Rules as predicates over tables: masks and messages agree, fields that decide are named, one list serves all callers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from layout_runs import refusal, run_with
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout import legality
from phalanx.layout.legality import RULES, is_legal, reasons_against
from phalanx.layout.legality.rule import Requirements, Rule
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import CONTEXTS, DEGREES, GATHERS, RECOMPUTES, SCHEDULES, LayoutTable, ResolvedLayout
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts

VALUES: dict[str, tuple[Any, ...]] = {
    "global_batch": (1, 3, 8, 24, 64),
    "microbatch": (1, 2, 3, 5),
    **dict.fromkeys(DEGREES, (1, 2, 3, 4, 8)),
    "zero": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "stages_per_rank": (1, 2, 3),
    "context": CONTEXTS,
    "cuts_structures": (False, True),
    "reshard_after_forward": (False, True),
    "gather": GATHERS,
    "branch_groups": ((), (2, 2), (4,)),
    "recompute": RECOMPUTES,
}


def draw_run(random: Random) -> LanguageRun:
    return run_with(
        {
            "data.sequence_length": random.choice((12, 16, 30)),
            "model.tied_head": random.choice((True, False)),
            "training.compile": random.choice((True, "auto")),
            "model.vocab_size": random.choice((7, 61)),
        },
        precision=random.choice(("bf16", "fp16", "fp8-block")),
    )


def draw_layouts(random: Random, count: int) -> list[ResolvedLayout]:
    return [ResolvedLayout(**{name: random.choice(values) for name, values in VALUES.items()}) for _ in range(count)]


def draw_legal(random: Random, run: LanguageRun, world: int, count: int) -> list[ResolvedLayout]:
    legal = enumerate_layouts(bind(run), world, limits=Limits.none())
    return [legal.row(random.randrange(len(legal))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("per_node", [None, 2])
def test_masks_and_messages_agree(seed: int, per_node: int | None) -> None:
    random = Random(seed)
    run, world = draw_run(random), random.choice((4, 8, 12))
    # Of layouts drawn at random nearly all are illegal; some are for other numbers of ranks.
    layouts = draw_layouts(random, 200) + draw_legal(random, run, world, 50)
    mask = is_legal(Requirements.of_model(bind(run), world, per_node), LayoutTable.from_rows(layouts))
    assert mask.any() and not mask.all()
    for layout, legal in zip(layouts, mask.tolist(), strict=True):
        reasons = reasons_against(bind(run), layout, world, per_node)
        assert bool(reasons) is not legal
        assert all(reason.text and "{" not in reason.text for reason in reasons)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_field_than_a_rule_names_decides(seed: int) -> None:
    random = Random(seed)
    run = draw_run(random)
    layouts = draw_layouts(random, 300)
    needs = Requirements.of_model(bind(run), 8, 6)
    for rule in RULES:
        others = {name: values for name, values in VALUES.items() if name not in rule.reads}
        changed = [replace(x, **{name: random.choice(values) for name, values in others.items()}) for x in layouts]
        before, after = (
            np.broadcast_to(rule.broken(needs, LayoutTable.from_rows(x)), len(x)) for x in (layouts, changed)
        )
        assert before.tolist() == after.tolist(), rule.reads


def test_a_rule_added_at_one_place_changes_single_layouts_and_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Rule(("tp",), lambda _, t: t.tp == 2, "layout.tp={x.tp} brings bad luck", ({"layout.tp": 4},))
    run = run_with(tp=2)
    assert 2 in enumerate_layouts(bind(run), 8, limits=Limits.none()).tp
    monkeypatch.setattr(legality, "RULES", (*RULES, odd))
    found = enumerate_layouts(bind(run), 8, limits=Limits.none())
    assert len(found) and 2 not in found.tp
    assert refusal(run, 8) == ["layout.tp=2 brings bad luck", "nearest legal: tp=4"]


def test_a_batch_that_a_warm_up_begins_with_has_to_suit_the_layout() -> None:
    run = run_with({}, global_batch=64, microbatch=4, batch_warmup=[{"steps": 1, "global_batch": 16}])
    run = run.model_copy(update={"training": run.training.model_copy(update={"steps": 9})})
    assert resolve_layout(bind(run), 4).accumulation == 4
    (line, *_) = refusal(run, 8)
    assert (
        "layout.batch_warmup.0.global_batch of 16 samples does not suit layout.microbatch=4 x 8 data-parallel" in line
    )
    auto = run.model_copy(update={"layout": run.layout.model_copy(update={"microbatch": "auto"})})
    assert resolve_layout(bind(auto), 8).microbatch == 2
