"""Experts spread over ranks beside all experts on one: the same results and gradients for any choice of tokens."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed_ranks import run_ranks
from phalanx.config.layers import MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.layout.expert_parallel.token_exchange import Dispatched, TokenExchange, order_by_expert, split_experts
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplits
from phalanx.nn.experts import MixtureOfExperts, RoutingPass
from phalanx.torch_compat import common as compat

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


def spread(
    experts: dict[str, Any], ep: Axis, exchange: TokenExchange
) -> tuple[MixtureOfExperts, MixtureOfExperts, TensorSplits]:
    """This rank's part of a mixture, the whole mixture, and which part that is."""
    torch.manual_seed(0)
    whole = MixtureOfExperts(config(experts)).double()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.4)
    with torch.device("meta"):
        part = MixtureOfExperts(config(experts))
    splits = split_experts(part, ep, exchange)
    assert len(splits) == 2
    return filled(part, whole, splits), whole, splits


def everyone() -> Axis:
    """All ranks share out the experts."""
    world = dist.group.WORLD
    return Axis("ep", dist.get_rank(), RANKS, world, tuple(range(RANKS)), world.group_name)


def work(cases: list[dict[str, Any]]) -> list[bool]:
    ep = everyone()
    found = []
    for experts in cases:
        part, whole, splits = spread(experts, ep, TokenExchange(ep))
        x, grad = inputs(ep.rank), torch.randn((1, TOKENS, 16), dtype=torch.float64)
        out = part(x, RoutingPass(0.3))
        out.backward(grad)
        wanted_x = inputs(ep.rank)
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


class OneAfterTheOther(TokenExchange):
    """Waits for rows as soon as they have set out."""

    def begin(self, rows_RD: Tensor, ends_E: Tensor, complete: bool) -> Dispatched:
        begun = super().begin(rows_RD, ends_E, complete)
        compat.await_tensor(begun.rows_RD)
        return begun


def order_of_events(part: MixtureOfExperts, x: Tensor) -> list[str]:
    """What a forward and a backward pass do, one after another: trips and the shared network."""
    events: list[str] = []
    shared = part.shared
    assert shared is not None
    shared.register_forward_hook(lambda *_: events.append("shared"))
    shared.down.weight.register_hook(lambda _: events.append("shared"))

    def logged(name: str) -> Any:
        right = getattr(compat, name)
        return patch.object(compat, name, lambda *values: (events.append(name.split("_")[0]), right(*values))[1])

    with logged("begin_all_to_all_rows"), logged("await_tensor"):
        out = part(x, RoutingPass(0.3))
        events.append("backward")
        out.backward(torch.ones_like(out))
    return events


def overlap() -> tuple[list[str], bool]:
    """The order of events, and whether results have the bits that they have without overlap."""
    ep = everyone()
    experts = {"shared": 1, "shared_d_ff": 40, "shared_gate": True, "z_loss": 0.1}
    orders, results = [], []
    for exchange in (TokenExchange(ep), OneAfterTheOther(ep)):
        part, x = spread(experts, ep, exchange)[0], inputs(ep.rank)
        orders.append(order_of_events(part, x))
        results.append([x.grad, *(parameter.grad for parameter in part.parameters())])
    return orders[0], all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def both() -> tuple[list[bool], tuple[list[str], bool]]:
    """On one of the ranks: cases, then the overlap."""
    return work(CASES), overlap()


Results = list[tuple[list[bool], tuple[list[str], bool]]]


@pytest.fixture(scope="module")
def results() -> Results:
    return run_ranks(both, RANKS)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_spread_experts_compute_what_one_rank_computes(results: Results, case: int) -> None:
    assert all(rank[case] for rank, _ in results)


def test_the_shared_network_computes_while_rows_travel(results: Results) -> None:
    """There and back, in the backward pass too; waiting at once changes no bit."""
    trip = ["begin", "shared", "await", "begin", "await"]
    for _, (order, same_bits) in results:
        assert order == [*trip, "backward", "begin", "await", "begin", "shared", "await"]
        assert same_bits


def test_arrivals_are_sorted_by_expert() -> None:
    """Two ranks send (2, 1, 0) and (1, 0, 3) rows to three experts here."""
    by_expert, ends = order_by_expert(torch.tensor([[2, 1, 0], [1, 0, 3]]), 7)
    assert by_expert.tolist() == [0, 1, 3, 2, 4, 5, 6]
    assert ends.tolist() == [3, 4, 7]


def test_no_row_may_arrive() -> None:
    by_expert, ends = order_by_expert(torch.zeros((2, 3), dtype=torch.int64), 0)
    assert by_expert.tolist() == [] and ends.tolist() == [0, 0, 0]
