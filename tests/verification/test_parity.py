"""Layouts of every kind on 2, 4 and 8 ranks give the loss, gradients and updated parameters of one rank.

The ranks of each world size are started once and run all cases.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import (
    MODELS,
    axis_pairs,
    cases,
    covering,
    features,
    further_cases,
    in_few_microbatches,
    option_cases,
    pairs_of_all,
    plain_layouts,
    run_of,
)
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import DEGREES, ResolvedLayout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

WORLDS = (2, 4, 8)
LIMITS = {"fp64": 1e-9, "fp32": 2e-5}
"""Largest relative error of any gradient."""


def precisions(world: int, model: str) -> dict[str, int]:
    """Formats to compute in, with the steps to compare. One model runs in all layouts; the others on four ranks alone,
    where all features occur that occur on two and on eight. Float32 and a second update are for one model on two.
    """
    if model != "llama":
        return {"fp64": 1} if world == 4 else {}
    return {"fp64": 2, "fp32": 1} if world == 2 else {"fp64": 1}


@cache
def layouts_of(model: str, world: int) -> list[ResolvedLayout]:
    """The layouts of `model`: ALiBi and document masks are options of attention alone; learned positions and a tied head
    meet every feature and every pair of axes. Of eight ranks, which have no pair of features that four have not, those
    that together have any three axes at once."""
    if world == 8:
        found = every_layout(_bound(model, world), world)
        return [in_few_microbatches(layout, others=False) for layout in covering(found, count=axes_by_three)]
    if model == "gpt":
        return further_cases(model, world, layouts_of("llama", world))
    return (option_cases if model == "mpt" else cases)(model, world)


def axes_by_three(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    """Axes with several ranks, three at a time."""
    return set(combinations([name for name in DEGREES if getattr(layout, name) > 1], 3))


def verify_all(world: int, layouts: dict[str, list[ResolvedLayout]]) -> dict[tuple[str, str], list[Verdict]]:
    """On one of `world` ranks: verdicts by model and precision. layouts: by model, chosen once for all ranks."""
    verdicts = {}
    groups: Groups = {}
    for model in MODELS:
        for precision, steps in precisions(world, model).items():
            run = run_of(model, world, precision)
            verifier = Verifier(
                bind(run, VerifiableModel),
                torch.device("cpu"),
                steps=steps,
                activations=precision == "fp64",
                groups=groups,
            )
            # Formats differ in their bounds, not in what layouts compute.
            chosen = layouts[model] if precision == "fp64" else layouts[model][::3]
            verdicts[model, precision] = [verifier.verify(layout) for layout in chosen]
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[int, str, str], list[Verdict]]:
    found = {}
    for world in WORLDS:
        layouts = {model: layouts_of(model, world) for model in MODELS if precisions(world, model)}
        verdicts = run_ranks(verify_all, world, world, layouts, timeout_s=600.0)[0]
        found |= {(world, *key): of_key for key, of_key in verdicts.items()}
    return found


@pytest.mark.parametrize(
    ("world", "model", "precision"), [(w, m, p) for w in WORLDS for m in MODELS for p in precisions(w, m)]
)
def test_layouts_compute_what_one_rank_computes(
    world: int, model: str, precision: str, verdicts: dict[tuple[int, str, str], list[Verdict]]
) -> None:
    failed = [f"{v.layout}: {v.first}" for v in verdicts[world, model, precision] if not v.passed]
    assert not failed, "\n".join(failed)
    for verdict in verdicts[world, model, precision]:
        worst = max(check.error for check in verdict.checks if check.what == "gradient")
        assert worst < LIMITS[precision], verdict.layout


def test_more_than_eighty_layouts_hold_every_pair_of_features() -> None:
    tried = {(w, m): layouts_of(m, w) for w in WORLDS for m in MODELS if precisions(w, m)}
    distinct = {str(layout) for layouts in tried.values() for layout in layouts}
    assert len(distinct) >= 80, len(distinct)
    held = pairs_of_all(layout for (_, model), layouts in tried.items() if model == "llama" for layout in layouts)
    for world in WORLDS:
        assert pairs_of_all(every_layout(_bound("llama", world), world)) <= held
    for model in ("gpt", "mpt"):
        usual = plain_layouts(model, 4)
        assert _axis_pairs_of_all(usual) <= _axis_pairs_of_all(tried[4, model])
    every = every_layout(_bound("gpt", 4), 4)
    assert set().union(*map(features, every)) <= set().union(*map(features, tried[4, "gpt"]))


def _axis_pairs_of_all(layouts: list[ResolvedLayout]) -> set[tuple[str, ...]]:
    return set().union(*map(axis_pairs, layouts))


def _bound(model: str, world: int) -> VerifiableModel:
    return bind(run_of(model, world, "fp64"), VerifiableModel)


def test_verdicts_cover_every_parameter_and_module(verdicts: dict[tuple[int, str, str], list[Verdict]]) -> None:
    for (_, model, precision), found in verdicts.items():
        names = {check.name for check in found[0].checks if check.what == "gradient"}
        assert len(names) == {"llama": 27, "gpt": 60, "mpt": 27}[model]
        watched = {check.name for check in found[0].checks if check.what == "activations"}
        inner = ("attention_norm", "attention", "mlp_norm", "mlp")
        modules = {f"blocks.{n}" for n in range(4)} | {f"blocks.{n}.{name}" for n in range(4) for name in inner}
        assert watched == ({"embedding", *modules} if precision == "fp64" else set())
        taken = {check.name for check in found[0].checks if check.what == "input gradient"}
        assert taken == ({*modules, "head"} if precision == "fp64" else set())
