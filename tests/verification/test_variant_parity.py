"""Options of today's decoders, in layouts of every kind with one schedule: loss, gradients and updates of one rank."""

from __future__ import annotations

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import VARIANTS, option_cases, run_of
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.spec import ResolvedLayout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

WORLD = 4


def verify_all(layouts: dict[str, list[ResolvedLayout]]) -> dict[str, list[Verdict]]:
    """On one of the ranks: verdicts by model. layouts: to verify it in, chosen once for all ranks."""
    verdicts, groups = {}, Groups()
    for model, of_model in layouts.items():
        bound = bind(run_of(model, WORLD, "fp64"), VerifiableModel)
        # What a second step adds, state of optimizers and their schedules, is the same whatever blocks compute.
        verifier = Verifier(bound, torch.device("cpu"), steps=1, activations=True, groups=groups)
        verdicts[model] = [verifier.verify(layout) for layout in of_model]
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    layouts = {model: option_cases(model, WORLD) for model in VARIANTS}
    return run_ranks(verify_all, WORLD, layouts, timeout_s=900.0)[0]


@pytest.mark.parametrize("model", VARIANTS)
def test_layouts_compute_what_one_rank_computes(model: str, verdicts: dict[str, list[Verdict]]) -> None:
    failed = [f"{v.layout}: {v.first}" for v in verdicts[model] if not v.passed]
    assert not failed, "\n".join(failed)
    for verdict in verdicts[model]:
        worst = max(check.error for check in verdict.checks if check.what == "gradient")
        assert worst < 1e-9, verdict.layout
