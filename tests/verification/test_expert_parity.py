"""Mixtures of experts in layouts of every kind give the loss, gradients and updated parameters of one rank.

Two mixtures: one that balances over sequences, with softmax scores that are normalised; one like that of DeepSeek-V3, with
groups, selection biases that move, a shared network and a dense first layer. Three steps: the second and third use what the
steps before counted.
"""

from __future__ import annotations

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import cases, covering, run_of
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

WORLDS = (2, 4, 8)
MIXTURES = ("mixtral", "deepseek")


def verify_all(world: int) -> dict[str, list[Verdict]]:
    """On one of `world` ranks: verdicts by model."""
    verdicts, groups = {}, Groups()
    for model in MIXTURES:
        verifier = Verifier(
            bind(run_of(model, world, "fp64"), VerifiableModel),
            torch.device("cpu"),
            steps=3,
            activations=True,
            groups=groups,
        )
        # Eight ranks for one of the two: no pair of features occurs there that does not occur on four.
        layouts = cases(model, world) if world < 8 or model == "deepseek" else []
        verdicts[model] = [verifier.verify(layout) for layout in (covering(layouts) if world == 2 else layouts)]
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[int, str], list[Verdict]]:
    return {
        (world, model): found
        for world in WORLDS
        for model, found in run_ranks(verify_all, world, world, timeout_s=600.0)[0].items()
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model", MIXTURES)
def test_layouts_compute_what_one_rank_computes(
    world: int, model: str, verdicts: dict[tuple[int, str], list[Verdict]]
) -> None:
    failed = [f"{v.layout}: {v.first}" for v in verdicts[world, model] if not v.passed]
    assert not failed, "\n".join(failed)
    for verdict in verdicts[world, model]:
        worst = max(check.error for check in verdict.checks if check.what == "gradient")
        assert worst < 1e-9, verdict.layout
