"""Mixtures of experts in layouts of every kind give the loss, gradients and updated parameters of one rank.

Three mixtures: one that balances over sequences, with softmax scores that are normalised; one like that of DeepSeek-V3, with
groups, selection biases that move, a shared network and a dense first layer; one of two experts of which ranks hold slices.
"""

from __future__ import annotations

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import expert_cases, expert_pairs, pairs_of_all, run_of, sliced_cases, spread_layouts
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.spec import ResolvedLayout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

WORLDS = (2, 4, 8)
MIXTURES = ("mixtral", "deepseek", "sliced")


def layouts_of(model: str, world: int) -> list[ResolvedLayout]:
    """The layouts of a mixture: the first two share those of two and four ranks; on eight there is one of them. The third
    is for those that share out each expert."""
    if model == "sliced":
        return sliced_cases(world)
    shared = expert_cases(model, world)
    if world == 8:
        return shared if model == "deepseek" else []
    return shared[MIXTURES.index(model) :: 2]


def steps_of(model: str, world: int) -> int:
    """Steps to compare: two where the second one uses what the first one counted. More ranks count alike."""
    return 2 if model == "deepseek" and world < 8 else 1


def verify_all(world: int, layouts: dict[str, list[ResolvedLayout]]) -> dict[str, list[Verdict]]:
    """On one of `world` ranks: verdicts by model. layouts: to verify it in, chosen once for all ranks."""
    verdicts, groups = {}, Groups()
    for model, of_model in layouts.items():
        bound = bind(run_of(model, world, "fp64"), VerifiableModel)
        verifier = Verifier(bound, torch.device("cpu"), steps=steps_of(model, world), activations=True, groups=groups)
        verdicts[model] = [verifier.verify(layout) for layout in of_model]
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[int, str], list[Verdict]]:
    found = {}
    for world in WORLDS:
        layouts = {model: of_model for model in MIXTURES if (of_model := layouts_of(model, world))}
        verdicts = run_ranks(verify_all, world, world, layouts, timeout_s=600.0)[0]
        found |= {(world, model): of_model for model, of_model in verdicts.items()}
    return found


@pytest.mark.parametrize(("world", "model"), [(w, m) for w in WORLDS for m in MIXTURES if layouts_of(m, w)])
def test_layouts_compute_what_one_rank_computes(
    world: int, model: str, verdicts: dict[tuple[int, str], list[Verdict]]
) -> None:
    failed = [f"{v.layout}: {v.first}" for v in verdicts[world, model] if not v.passed]
    assert not failed, "\n".join(failed)
    for verdict in verdicts[world, model]:
        worst = max(check.error for check in verdict.checks if check.what == "gradient")
        assert worst < 1e-9, verdict.layout


def test_more_than_forty_layouts_hold_every_pair_of_features() -> None:
    tried = [layout for world in WORLDS for model in MIXTURES for layout in layouts_of(model, world)]
    assert len({f"{layout} {layout.recompute}" for layout in tried}) >= 40
    assert all(layout.ep > 1 for layout in tried)
    held = pairs_of_all(tried)
    for world in (2, 4):
        assert pairs_of_all(spread_layouts("deepseek", world)) <= held
    # Eight ranks add pairs of axes, and of features what goes together with `ep`.
    for world in WORLDS:
        assert _expert_pairs_of_all(spread_layouts("deepseek", world)) <= _expert_pairs_of_all(tried)


def _expert_pairs_of_all(layouts: list[ResolvedLayout]) -> set[tuple[str, ...]]:
    return set().union(*map(expert_pairs, layouts))
