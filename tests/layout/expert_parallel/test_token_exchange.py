"""Experts spread over ranks beside all experts on one: the same results and gradients for any choice of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed_ranks import run_ranks
from phalanx.config.layers import MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.layout.expert_parallel.token_exchange import order_by_expert, split_experts
from phalanx.layout.mesh import Axis
from phalanx.nn.experts import MixtureOfExperts, RoutingPass

RANKS, TOKENS = 4, 12
CASES: list[dict[str, Any]] = [{}, {"active": 1}, {"active": 8}, {"capacity_factor": 0.5}, {"shared": 1, "z_loss": 0.1}]


def config(experts: dict[str, Any]) -> MixtureConfig:
    model = LanguageModel(
        n_layers=1,
        d_model=16,
        n_heads=2,
        vocab_size=10,
        max_positions=64,
        d_ff=24,
        experts={"count": 8, "active": 2, **experts},
    )
    mixture = model.layer(0).mlp
    assert isinstance(mixture, MixtureConfig)
    return mixture


def filled(model: MixtureOfExperts, whole: MixtureOfExperts, splits: dict[str, Any]) -> MixtureOfExperts:
    """`model` with the values of `whole`, or its part of them."""
    model.to_empty(device="cpu").double()
    for (name, parameter), source in zip(model.named_parameters(), whole.parameters(), strict=True):
        part = splits.get(f".{name}")
        values = source if part is None else source.narrow(0, part.start, parameter.shape[0])
        parameter.data.copy_(values)
    return model


def inputs(rank: int) -> Tensor:
    x = torch.randn((1, TOKENS, 16), generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return x.requires_grad_()


def work(cases: list[dict[str, Any]]) -> list[bool]:
    rank = dist.get_rank()
    ep = Axis("ep", rank, RANKS, dist.group.WORLD, tuple(range(RANKS)), dist.group.WORLD.group_name)
    found = []
    for experts in cases:
        torch.manual_seed(0)
        whole = MixtureOfExperts(config(experts)).double()
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=0.4)
        with torch.device("meta"):
            part = MixtureOfExperts(config(experts))
        splits = split_experts(part, ep)
        assert len(splits) == 2
        part = filled(part, whole, splits)
        x, grad = inputs(rank), torch.randn((1, TOKENS, 16), dtype=torch.float64)
        out = part(x, RoutingPass(0.3))
        out.backward(grad)
        wanted_x = inputs(rank)
        wanted = whole(wanted_x, RoutingPass(0.3))
        wanted.backward(grad)
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, wanted_x.grad, rtol=1e-12, atol=1e-12)
        for (name, parameter), source in zip(part.named_parameters(), whole.named_parameters(), strict=True):
            assert source[1].grad is not None and parameter.grad is not None
            total = source[1].grad
            if f".{name}" in splits:
                # An expert's rows of all ranks come together where it is.
                dist.all_reduce(total)
                total = total.narrow(0, splits[f".{name}"].start, parameter.shape[0])
            torch.testing.assert_close(parameter.grad, total, rtol=1e-11, atol=1e-11)
        found.append(True)
    return found


@pytest.fixture(scope="module")
def results() -> list[list[bool]]:
    return run_ranks(work, RANKS, CASES)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_spread_experts_compute_what_one_rank_computes(results: list[list[bool]], case: int) -> None:
    assert all(rank[case] for rank in results)


def test_arrivals_are_sorted_by_expert() -> None:
    """Two ranks send (2, 1, 0) and (1, 0, 3) rows to three experts here."""
    by_expert, ends = order_by_expert(torch.tensor([[2, 1, 0], [1, 0, 3]]), 7)
    assert by_expert.tolist() == [0, 1, 3, 2, 4, 5, 6]
    assert ends.tolist() == [3, 4, 7]


def test_no_row_may_arrive() -> None:
    by_expert, ends = order_by_expert(torch.zeros((2, 3), dtype=torch.int64), 0)
    assert by_expert.tolist() == [] and ends.tolist() == [0, 0, 0]
