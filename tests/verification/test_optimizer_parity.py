"""Muon, Lion and AdamW with moments in 8 bits give the gradients and parameters of one rank in layouts of every kind.

Muon gathers whole matrices over FSDP shards of every ZeRO level, replicas, tensor-parallel, context-parallel and
expert-parallel ranks, one pipeline stage at a time; a dense model and a mixture of experts. Moments in 8 bits have scales of
blocks, which no layout cuts. Two steps: the second adds to momenta that the first has left.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import (
    covering,
    features,
    in_few_microbatches,
    plain_layouts,
    run_of,
    sliced_cases,
    spread_layouts,
)
from phalanx.config.schema import Optimizer
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.optimizers.adamw8bit import ADAMW8BIT
from phalanx.optimizers.lion import LION
from phalanx.optimizers.muon import MUON
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

OPTIMIZERS = {
    "muon": {"name": "muon", "adamw_lr_ratio": 0.5, "weight_decay": 0.1},
    "lion": {"name": "lion", "betas": (0.9, 0.98), "lr": 1e-3},
    "adamw8bit": {"name": "adamw8bit", "weight_decay": 0.1},
}
CASES = [(4, "muon", "llama"), (4, "muon", "deepseek"), (4, "lion", "llama")]
CASES += [(4, "muon", "sliced"), (4, "adamw8bit", "wide"), (4, "adamw8bit", "wide mixture")]
CASES += [(8, "muon", "llama"), (8, "muon", "deepseek")]
LIMIT = 1e-9
"""Largest relative error of any gradient or parameter, in float64."""


def optimizer_pairs(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    """Features that decide which ranks hold what of a matrix, alone and two at a time.

    How context is exchanged and when parameters are gathered again changes no gradient, so nothing that an optimizer sees.
    """
    held = sorted(name for (name,) in kept_features(layout))
    return {pair for count in (1, 2) for pair in combinations(held, count)}


def kept_features(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    """The same features alone."""
    kept = {"cp" if name.startswith("cp ") else name for name in features(layout)}
    return {(name,) for name in kept if name != "reshard" and not name.startswith("recompute")}


def layouts_of(world: int, optimizer: str, model: str) -> list[ResolvedLayout]:
    """Layouts on four ranks, in one schedule: every pair of features for Muon on a dense model, each feature beside `ep` for
    mixtures, some for other optimizers; one with many features on eight."""
    if model == "sliced":
        return sliced_cases(world)[::3]
    if optimizer == "adamw8bit":
        # Columns that `tp` splits in more than two are within a block. One layout for each feature, alone.
        found = spread_layouts(model, world) if model == "wide mixture" else plain_layouts(model, world)
        whole = [x for x in found if x.schedule == "1f1b" and x.recompute == "none" and x.tp <= 2]
        return [in_few_microbatches(layout, others=False) for layout in covering(whole, count=kept_features)]
    if world < 8 and model == "deepseek":
        # What is computed again changes no gradient, so nothing that an optimizer sees.
        spread = [x for x in spread_layouts(model, world) if x.schedule == "1f1b" and x.recompute == "none"]
        return [in_few_microbatches(layout, others=False) for layout in covering(spread, count=kept_features)]
    if world < 8:
        chosen = covering(plain_layouts(model, world), count=optimizer_pairs)
        return [in_few_microbatches(layout, others=False) for layout in chosen[:: 1 if optimizer == "muon" else 4]]
    wanted = {"llama": {"tp": 2, "pp": 2, "dp_shard": 2}, "deepseek": {"tp": 2, "dp_shard": 2, "cp": 2, "ep": 4}}[model]
    found = every_layout(bind(run_of(model, world, "fp64")), world)
    alike = [x for x in found if all(getattr(x, name) == value for name, value in wanted.items())]
    return alike[:1]


def verify_all(world: int) -> dict[tuple[str, str], list[Verdict]]:
    """On one of `world` ranks: verdicts by optimizer and model."""
    # None says how far rounding may move a parameter (a sign or a code jumps); here parameters are compared all the same.
    for kind in (MUON, LION, ADAMW8BIT):
        kind.update_gain = lambda config: 1e6  # type: ignore[method-assign]
    verdicts, groups = {}, Groups()
    for _, optimizer, model in (case for case in CASES if case[0] == world):
        run = run_of(model, world, "fp64")
        fields = {**run.optimizer.model_dump(), **OPTIMIZERS[optimizer]}
        run = run.model_copy(update={"optimizer": Optimizer.model_validate(fields)})
        bound = bind(run, VerifiableModel)
        verifier = Verifier(bound, torch.device("cpu"), steps=2, activations=False, groups=groups)
        verdicts[optimizer, model] = [verifier.verify(layout) for layout in layouts_of(world, optimizer, model)]
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[int, str, str], list[Verdict]]:
    return {
        (world, *key): found
        for world in sorted({case[0] for case in CASES})
        for key, found in run_ranks(verify_all, world, world, timeout_s=600.0)[0].items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_layouts_update_as_one_rank_does(
    case: tuple[int, str, str], verdicts: dict[tuple[int, str, str], list[Verdict]]
) -> None:
    assert verdicts[case]
    for verdict in verdicts[case]:
        for what in ("gradient", "parameter"):
            errors = {f"{c.name} in step {c.step}": c.error for c in verdict.checks if c.what == what}
            worst = max(errors, key=lambda name: errors[name])
            assert errors[worst] < LIMIT, (verdict.layout, what, worst, errors[worst])


def test_muon_meets_every_pair_of_features() -> None:
    for world, model in ((2, "llama"), (4, "llama")):
        legal = set().union(*map(optimizer_pairs, plain_layouts(model, world)))
        assert legal == set().union(*map(optimizer_pairs, layouts_of(world, "muon", model)))
