"""Choices of experts that are replayed: how far from a layout's own they may be, and what replaying them is worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_ranks import run_ranks
from layout_cases import run_of
from phalanx.config.layers import Experts, MixtureConfig
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.experts import Router
from phalanx.verification.family import VerifiableModel
from phalanx.verification.replay_routing import choice_margins
from phalanx.verification.verify_run import Verdict, Verifier

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid and biases": {"scoring": "sigmoid", "selection_bias": True},
    "groups": {"scoring": "sigmoid", "selection_bias": True, "groups": 4, "active_groups": 2},
}
TOKENS, COUNT, ACTIVE = 64, 16, 3


def router_of(kind: str) -> Router:
    settings = Experts(count=COUNT, active=ACTIVE, **ROUTERS[kind])
    router = Router(MixtureConfig(width=8, hidden=8, settings=settings, shared=None))
    torch.nn.init.normal_(router.weight)
    if router.bias is not None:
        router.bias.copy_(torch.linspace(-0.1, 0.1, COUNT))
    return router


def scores_of(router: Router, logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1) if router.settings.scoring == "softmax" else logits_TE.sigmoid()


@pytest.mark.parametrize("kind", ROUTERS)
def test_own_choices_have_no_margin(kind: str) -> None:
    torch.manual_seed(0)
    router = router_of(kind)
    scores_TE = scores_of(router, torch.randn(TOKENS, COUNT, dtype=torch.float64))
    own_TK = router.choose_experts(scores_TE)
    assert not choice_margins(router, scores_TE, own_TK).any()
    assert not choice_margins(router, scores_TE, own_TK.flip(-1)).any()


@pytest.mark.parametrize("kind", ROUTERS)
def test_rounding_is_within_the_margin_that_it_makes(kind: str) -> None:
    torch.manual_seed(1)
    router = router_of(kind)
    logits_TE = torch.randn(100 * TOKENS, COUNT, dtype=torch.float64)
    error = 1e-3
    # What another layout computes: every logit off by up to `error`.
    other_TE = logits_TE + error * (2 * torch.rand_like(logits_TE) - 1)
    chosen_TK = router.choose_experts(scores_of(router, other_TE))
    moves_T = choice_margins(router, scores_of(router, logits_TE), chosen_TK) * logits_TE.std(-1)
    # Some choices change; each by less than its logits are off, to first order.
    assert 5 < moves_T.count_nonzero() < 1000
    assert moves_T.max() < 1.05 * error


@pytest.mark.parametrize("kind", ROUTERS)
def test_another_choice_is_far(kind: str) -> None:
    torch.manual_seed(2)
    router = router_of(kind)
    scores_TE = scores_of(router, torch.randn(TOKENS, COUNT, dtype=torch.float64))
    worst_TK = router.best_experts(-router.rank_scores(scores_TE))
    assert choice_margins(router, scores_TE, worst_TK).min() > 0.2


def test_margin_is_half_the_gap_of_two_logits() -> None:
    router = router_of("softmax")
    logits_TE = torch.tensor([[2.0, 1.0, 0.5, 0.499, *([-1.0] * 12)]], dtype=torch.float64)
    found = choice_margins(router, logits_TE.softmax(-1), torch.tensor([[0, 1, 3]]))
    assert float(found * logits_TE.std(-1)) == pytest.approx(0.0005, rel=1e-2)


TRIED = (("mixtral", "bf16"), ("deepseek", "fp32"))
"""Models and the formats that they compute in."""

LAYOUTS = ({"dp_shard": 2, "ep": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2, "recompute": "full"})


def verify_in_low_precision() -> dict[str, list[Verdict]]:
    """On one of two ranks: verdicts on the layouts by model and precision; on the second also without replay."""
    groups, found = Groups(), {}
    for model, precision in TRIED:
        run = run_of(model, 2, precision)
        verifier = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=2, activations=True, groups=groups)
        layouts = [resolve_layout(bind(run_of(model, 2, precision, **fields)), 2) for fields in LAYOUTS]
        found[f"{model} {precision}"] = [verifier.verify(layout) for layout in layouts]
        verifier.choices = None
        found[f"{model} {precision} alone"] = [verifier.verify(layouts[1])]
    return found


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    return run_ranks(verify_in_low_precision, 2, timeout_s=300.0)[0]


@pytest.mark.parametrize(("model", "precision"), TRIED)
def test_layouts_pass_in_low_precision(model: str, precision: str, verdicts: dict[str, list[Verdict]]) -> None:
    for verdict in verdicts[f"{model} {precision}"]:
        assert verdict.passed, f"{verdict.layout}: {verdict.first}"
        assert verdict.otherwise is not None
        otherwise, tokens = verdict.otherwise
        layers = 4 if model == "mixtral" else 3
        # Every token of every layer with experts in both steps.
        assert tokens == 2 * layers * 4 * 32
        assert otherwise < 0.02 * tokens


def test_replayed_choices_leave_rounding_alone(verdicts: dict[str, list[Verdict]]) -> None:
    replayed, alone = (verdicts[f"mixtral bf16{how}"] for how in ("", " alone"))
    otherwise, _ = replayed[1].otherwise or (0, 0)
    assert otherwise > 0
    errors = [verdict.worst("gradient") for verdict in (replayed[1], alone[0])]
    assert errors[0] is not None and errors[1] is not None
    assert 2.0 * errors[0].error < errors[1].error
