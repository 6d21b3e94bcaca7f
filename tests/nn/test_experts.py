"""Mixtures of experts beside sums over all experts written out, and what routers choose, lose and count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.config.layers import MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.kernels.swiglu import swiglu
from phalanx.nn.experts import MixtureOfExperts, Router, RoutingPass, sort_by_expert

BOUND = {"rtol": 1e-11, "atol": 1e-11}
BATCH, LENGTH = 3, 16
SCALE = 0.37


def config(**experts: Any) -> MixtureConfig:
    model = LanguageModel(
        n_layers=2,
        d_model=24,
        n_heads=4,
        vocab_size=50,
        max_positions=32,
        d_ff=48,
        experts={"count": 8, "active": 3, "d_ff": 20, **experts},
    )
    mixture = model.layer(1).mlp
    assert isinstance(mixture, MixtureConfig)
    return mixture


def build(**experts: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    model = MixtureOfExperts(config(**experts)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def inputs() -> Tensor:
    x = torch.randn((BATCH, LENGTH, 24), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.requires_grad_()


def all_experts(model: MixtureOfExperts, x_TD: Tensor) -> Tensor:
    """Every expert's result for every token, [E, T, D]."""
    networks = model.experts
    gate_up = networks.gate_up.view(-1, 2 * networks.d_ff, networks.d_model)
    down = networks.down.view(-1, networks.d_model, networks.d_ff)
    return torch.stack([swiglu(x_TD @ g.t(), networks.block) @ d.t() for g, d in zip(gate_up, down, strict=True)])


def written_out(model: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the balance and z losses, with scores, use and sums of the definition."""
    settings = model.router.settings
    x_TD = x.flatten(0, 1)
    logits = x_TD @ model.router.weight.t()
    scores = logits.softmax(-1) if settings.scoring == "softmax" else logits.sigmoid()
    chosen = torch.zeros_like(scores).scatter(1, model.router.choose_experts(scores.detach()), 1.0)
    weights = chosen * scores
    if settings.normalize and settings.active > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.einsum("te,etd->td", settings.scale * weights, all_experts(model, x_TD)).view_as(x)
    if model.shared is not None:
        shared = model.shared(x)
        out = out + (shared if model.shared_gate is None else model.shared_gate(x).sigmoid() * shared)
    share = (scores / scores.sum(-1, keepdim=True)).view(BATCH, LENGTH, -1)
    use = chosen.view(BATCH, LENGTH, -1).sum(1) / (LENGTH * settings.active)
    if settings.balance == "global_batch":
        use = model.router.load.expand(BATCH, -1)
    balance = settings.balance_weight * settings.count * (use * share.sum(1)).sum()
    loss = balance if settings.balance != "none" else balance * 0.0
    return out, loss + settings.z_loss * logits.logsumexp(-1).square().sum()


@pytest.mark.parametrize(
    "experts",
    [
        {},
        {"normalize": False, "scale": 2.5, "z_loss": 0.01},
        {"scoring": "sigmoid", "bias_rate": 0.001, "balance": "none"},
        {"groups": 4, "active_groups": 2, "shared": 2},
        {"groups": 2, "active_groups": 1, "group_score": "max", "shared": 1, "shared_gate": True, "shared_d_ff": 30},
        {"active": 1, "balance": "global_batch", "balance_weight": 0.3},
        {"active": 8},
    ],
)
def test_mixture_equals_the_sum_over_all_experts(experts: dict[str, Any]) -> None:
    model, x = build(**experts), inputs()
    if experts.get("balance") == "global_batch":
        model.router.load.copy_(torch.arange(8.0) / 28.0)
    found = model(x, RoutingPass(SCALE))
    wanted, loss = written_out(model, x)
    torch.testing.assert_close(found, wanted, **BOUND)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = [x, *model.parameters()]
    gradients = torch.autograd.grad((found * grad).sum(), parameters)
    expected = torch.autograd.grad((wanted * grad).sum() + SCALE * loss, parameters)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, **BOUND)


def test_balance_losses_wait_for_training() -> None:
    model, x = build(balance_weight=5.0), inputs()
    model(x)
    assert not model.router.tokens.any()
    model(x, RoutingPass(1.0))
    assert model.router.tokens.sum() == BATCH * LENGTH * 3


def test_bias_decides_the_choice_and_not_the_weight() -> None:
    model, x = build(bias_rate=0.001, active=2), inputs()
    assert model.router.bias is not None
    model.router.bias[5] = 100.0
    routing = model.router(x, None)
    assert (routing.experts_TK == 5).any(1).all()
    assert (routing.weights_TK <= 1.0).all()


def test_groups_bound_where_a_token_goes() -> None:
    model, x = build(groups=4, active_groups=2, active=3), inputs()
    groups = model.router(x, None).experts_TK // 2
    assert max(len(set(row)) for row in groups.tolist()) == 2


def test_capacity_drops_the_last_tokens_of_a_sequence() -> None:
    model, x = build(capacity_factor=0.5, active=2), inputs()
    routing = model.router(x, None)
    free = build(active=2).router(x, None)
    # ceil(0.5 * 16 tokens * 2 / 8 experts) = 2 tokens of each sequence.
    for batch in range(BATCH):
        rows = slice(batch * LENGTH, (batch + 1) * LENGTH)
        for expert in range(8):
            asked = (free.experts_TK[rows] == expert).any(1).nonzero().flatten().tolist()
            given = (routing.experts_TK[rows] == expert).any(1).nonzero().flatten().tolist()
            assert given == asked[:2]
    dropped = routing.experts_TK == 8
    assert dropped.any() and (routing.weights_TK[dropped] == 0.0).all()
    torch.testing.assert_close(routing.weights_TK[~dropped], free.weights_TK[~dropped])
    out = model(x)
    out.sum().backward()
    assert torch.isfinite(out).all() and x.grad is not None and torch.isfinite(x.grad).all()


def test_part_of_a_sequence_has_its_part_of_the_balance_loss() -> None:
    """Ranks that hold positions of a sequence add up its use, and then their gradients are those of the whole."""
    model, x = build(balance_weight=0.5), inputs()
    whole = torch.autograd.grad(model(x, RoutingPass(SCALE)).sum(), model.router.weight)[0]
    halves = [slice(0, 6), slice(6, LENGTH)]

    def used(part: slice) -> Tensor:
        kept: list[Tensor] = []
        model(x[:, part], RoutingPass(SCALE, lambda counts: kept.append(counts) or counts))  # type: ignore[func-returns-value]
        return kept[0]

    total = used(halves[0]) + used(halves[1])
    parts = [
        torch.autograd.grad(model(x[:, part], RoutingPass(SCALE, lambda _: total)).sum(), model.router.weight)[0]
        for part in halves
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, **BOUND)


def test_rows_of_an_expert_keep_the_order_of_their_tokens() -> None:
    experts = torch.tensor([[2, 0], [0, 1], [2, 3], [1, 2]])
    order = sort_by_expert(experts, 3)
    assert order.source_R.tolist() == [0, 1, 1, 3, 0, 2, 3, 2]
    assert order.ends_E.tolist() == [2, 4, 7]
    assert order.position_TK.tolist() == [[4, 0], [1, 2], [5, 7], [3, 6]]


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_mixture_gives_the_same_numbers(recompute: bool) -> None:
    model, x = build(shared=1, z_loss=0.01, bias_rate=0.001), inputs()

    def run(x: Tensor) -> Tensor:
        result: Tensor = (
            checkpoint(model, x, RoutingPass(SCALE), use_reentrant=False) if recompute else model(x, RoutingPass(SCALE))
        )
        return result

    parameters = [x, *model.parameters()]
    wanted = run(x)
    expected = torch.autograd.grad(wanted.square().sum(), parameters)
    model.router.tokens.zero_()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    for one, other in zip(torch.autograd.grad(found.square().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(one, other, **BOUND)
    torch.testing.assert_close(found, wanted, **BOUND)
    assert model.router.tokens.sum() == BATCH * LENGTH * 3


def test_routers_compute_in_float32() -> None:
    model = build().bfloat16()
    assert model.router(inputs().bfloat16(), None).weights_TK.dtype == torch.float32


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"groups": 3}, "groups=3 does not divide count=8"),
        ({"groups": 4, "active_groups": 1}, "active=3 is more than the 2 experts"),
        ({"groups": 8, "active_groups": 8}, "top2_sum needs two experts"),
        ({"dense_layers": 2}, "leaves no block with experts"),
    ],
)
def test_impossible_mixtures_are_refused(experts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(config(**experts))
