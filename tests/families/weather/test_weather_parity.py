"""Forecasters in layouts of every kind on 2, 4 and 8 ranks give the loss, gradients and updated parameters of one rank.

Both models drop activations and whole branches; one has q/k norms, several tokens a location and predicts changes.
"""

from __future__ import annotations

import pytest
import torch

from distributed_ranks import run_ranks
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier
from weather_cases import cases, run_of

WORLDS = (2, 4, 8)
LIMITS = {"fp64": 1e-9, "fp32": 3e-5}
"""Largest relative error of any gradient."""
RUNS = [
    (2, "orbit", "fp64"),
    (2, "members", "fp64"),
    (4, "climax", "fp64"),
    (4, "rollout", "fp64"),
    (4, "through", "fp64"),
    (4, "members through", "fp64"),
    (4, "grids", "fp64"),
    (4, "orbit", "fp32"),
    (8, "orbit", "fp64"),
]


def verify_all(world: int) -> dict[tuple[str, str], list[Verdict]]:
    """On one of `world` ranks: verdicts by model and precision."""
    verdicts = {}
    groups: Groups = {}
    for _, model, precision in (run for run in RUNS if run[0] == world):
        run = run_of(model, world, precision)
        verifier = Verifier(
            bind(run, VerifiableModel),
            torch.device("cpu"),
            # A step for each grid.
            steps=len(run.grid_weights),
            activations=precision == "fp64",
            groups=groups,
        )
        verdicts[model, precision] = [verifier.verify(layout) for layout in cases(model, world, precision)]
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[int, str, str], list[Verdict]]:
    return {
        (world, *key): found
        for world in WORLDS
        for key, found in run_ranks(verify_all, world, world, timeout_s=600.0)[0].items()
    }


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layouts_compute_what_one_rank_computes(
    run: tuple[int, str, str], verdicts: dict[tuple[int, str, str], list[Verdict]]
) -> None:
    failed = [f"{v.layout}: {v.first}" for v in verdicts[run] if not v.passed]
    assert not failed, "\n".join(failed)
    for verdict in verdicts[run]:
        worst = max(check.error for check in verdict.checks if check.what == "gradient")
        assert worst < LIMITS[run[2]], verdict.layout


def test_every_kind_of_layout_is_among_them(verdicts: dict[tuple[int, str, str], list[Verdict]]) -> None:
    layouts = [verdict.layout for found in verdicts.values() for verdict in found]
    for words in ("tp=2", "tp=4", "tp=8", "dp_shard=2", "dp_replicate=2", "pp=2", "zero=1", "zero=2"):
        assert any(words in layout for layout in layouts), words
    assert any(all(axis in layout for axis in ("tp=2", "dp_shard=2", "dp_replicate=2")) for layout in layouts)


def test_verdicts_cover_every_parameter_and_module(verdicts: dict[tuple[int, str, str], list[Verdict]]) -> None:
    for (_, model, precision), found in verdicts.items():
        names = {check.name for check in found[0].checks if check.what == "gradient"}
        counts = {"climax": 70, "rollout": 46, "through": 34, "orbit": 90, "grids": 46}
        counts |= {"members": 48, "members through": 35}
        assert len(names) == counts[model]
        fewer = {"rollout": 2, "members": 2, "through": 1, "members through": 1, "grids": 2}
        blocks = [f"blocks.{n}" for n in range(fewer.get(model, 4))]
        inner = ("attention_norm", "attention", "mlp_norm", "mlp")
        modules = {*blocks, *(f"{block}.{name}" for block in blocks for name in inner)}
        watched = {check.name for check in found[0].checks if check.what == "activations"}
        assert watched == ({"embedding", *modules} if precision == "fp64" else set())
        taken = {check.name for check in found[0].checks if check.what == "input gradient"}
        assert taken == ({*modules, "head"} if precision == "fp64" else set())
