"""Experts spread over ranks beside all experts on one: the same results and gradients for any choice of tokens.

And what is computed while rows travel: the shared network, and the rows of another chunk of tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed_ranks import run_ranks
from layout_cases import run_of
from phalanx.config.layers import MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.families.registry import bind
from phalanx.kernels.grouped_products import GroupedLinear
from phalanx.layout.expert_parallel.token_exchange import (
    Departures,
    Stages,
    TokenExchange,
    order_by_expert,
    order_copies,
    split_experts,
)
from phalanx.layout.mesh import Axis, Groups, build_mesh
from phalanx.layout.place import TensorSplits
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.experts import MixtureOfExperts, RoutingPass
from phalanx.torch_compat import common as compat
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verifier

RANKS, TOKENS = 4, 12
CASES: list[dict[str, Any]] = [{}, {"active": 1}, {"active": 8}, {"capacity_factor": 0.5}, {"shared": 1, "z_loss": 0.1}]
CHUNKS = (1, 2, 3)
LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 4, "ep": 2, "ep_chunks": 2, "recompute": "selective"},
    {"dp_shard": 4, "ep": 4, "ep_chunks": 4, "zero": 2, "microbatch": 2},
    {"dp_shard": 2, "tp": 2, "ep": 2, "ep_chunks": 2, "recompute": "full"},
    {"cp": 2, "pp": 2, "ep": 2, "ep_chunks": 2, "schedule": "interleaved_zero_bubble"},
    {"dp_shard": 2, "tp": 2, "ep": 4, "ep_chunks": 2, "ep_node": 2},
]
"""To be verified beside one rank, with leading dense layers, groups, moving biases and a shared network."""


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
    world, size = dist.group.WORLD, dist.get_world_size()
    return Axis("ep", dist.get_rank(), size, world, tuple(range(size)), world.group_name)


def two_stages(node: int, groups: Groups) -> Stages:
    """The groups of an exchange among all ranks, on nodes of `node` ranks."""
    world = dist.get_world_size()
    layout = ResolvedLayout(global_batch=world, dp_shard=world, ep=world, ep_node=node)
    mesh = build_mesh(layout, torch.device("cpu"), groups)
    return Stages(mesh.ep_across, mesh.ep_within)


def work(cases: list[dict[str, Any]]) -> list[bool]:
    ep = everyone()
    found = []
    for experts, chunks in itertools.product(cases, CHUNKS):
        part, whole, splits = spread(experts, ep, TokenExchange(ep, chunks=chunks))
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

    def begin(self, rows: list[Tensor], ends: list[Tensor], complete: bool) -> Departures:
        begun = super().begin(rows, ends, complete)
        for one in begun.chunks:
            compat.await_tensor(one.rows_RD)
        return begun


def order_of_events(part: MixtureOfExperts, x: Tensor) -> list[str]:
    """What a forward and a backward pass do, one after another: trips and the shared network."""
    events: list[str] = []
    shared = part.shared
    assert shared is not None
    shared.register_forward_hook(lambda *_: events.append("shared"))
    shared.down.weight.register_hook(lambda _: events.append("shared"))

    def logged(holder: Any, name: str, event: str) -> Any:
        right = getattr(holder, name)
        log = lambda *values: (events.append(event), right(*values))[1]  # noqa: E731
        return patch.object(holder, name, staticmethod(log) if isinstance(holder, type) else log)

    with (
        logged(compat, "begin_all_to_all_rows", "begin"),
        logged(compat, "await_tensor", "await"),
        logged(GroupedLinear, "forward", "experts"),
        logged(GroupedLinear, "backward", "experts"),
    ):
        out = part(x, RoutingPass(0.3))
        events.append("backward")
        out.backward(torch.ones_like(out))
    return events


def overlap(chunks: int) -> tuple[list[str], bool]:
    """The order of events, and whether results have the bits that they have without overlap."""
    ep = everyone()
    experts = {"shared": 1, "shared_d_ff": 40, "shared_gate": True, "z_loss": 0.1}
    orders, results = [], []
    for exchange in (TokenExchange(ep, chunks=chunks), OneAfterTheOther(ep, chunks=chunks)):
        part, x = spread(experts, ep, exchange)[0], inputs(ep.rank)
        orders.append(order_of_events(part, x))
        results.append([x.grad, *(parameter.grad for parameter in part.parameters())])
    return orders[0], all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def stages_differ(nodes: list[int]) -> list[str]:
    """Where a result or gradient has other bits in two stages than in one: among all ranks, on nodes of so many ranks."""
    ep, groups, found = everyone(), Groups(), []
    for node, chunks, experts in itertools.product(nodes, (1, 2), CASES):
        results = []
        for stages in (None, two_stages(node, groups)):
            part, x = spread(experts, ep, TokenExchange(ep, chunks=chunks, stages=stages))[0], inputs(ep.rank)
            out = part(x, RoutingPass(0.3))
            out.backward(torch.ones_like(out))
            results.append([out, x.grad, *(parameter.grad for parameter in part.parameters())])
        if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
            found.append(f"nodes of {node}, {chunks} chunks, {experts}")
    return found


def verify(layouts: list[dict[str, Any]]) -> list[str]:
    """What of these layouts is not as on one rank; the first module of each, or the largest error of gradients."""
    found, groups = [], Groups()
    for layout in layouts:
        bound = bind(run_of("deepseek", RANKS, "fp64", **layout), VerifiableModel)
        verifier = Verifier(bound, torch.device("cpu"), steps=2, activations=True, groups=groups)
        verdict = verifier.verify(resolve_layout(bound, RANKS))
        worst = max((check.error for check in verdict.checks if check.what == "gradient"), default=0.0)
        if not verdict.passed or worst >= 1e-9:
            found.append(f"{layout}: {verdict.first}, {worst}")
    return found


def compiled_differs() -> float:
    """The largest difference that compiling a mixture whose tokens travel in chunks makes to its result and gradients."""
    ep, results = everyone(), []
    for compiled in (False, True):
        part, x = spread({"shared": 1}, ep, TokenExchange(ep, chunks=2))[0], inputs(ep.rank)
        out = (torch.compile(part, backend="aot_eager") if compiled else part)(x, RoutingPass(0.3))
        out.backward(torch.ones_like(out))
        results.append([out, x.grad, *(parameter.grad for parameter in part.parameters())])
    return max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))


@dataclass
class Results:
    """Of one of the ranks."""

    cases: list[bool]
    orders: dict[int, tuple[list[str], bool]]
    wrong: list[str]
    staged: list[str]


def everything() -> Results:
    """On one of the ranks."""
    orders = {chunks: overlap(chunks) for chunks in (1, 2)}
    return Results(work(CASES), orders, verify(LAYOUTS), stages_differ([2]))


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return run_ranks(everything, RANKS, timeout_s=600.0)


@pytest.mark.parametrize("case", range(len(CASES) * len(CHUNKS)))
def test_spread_experts_compute_what_one_rank_computes(results: list[Results], case: int) -> None:
    assert all(rank.cases[case] for rank in results)


def test_the_shared_network_computes_while_rows_travel(results: list[Results]) -> None:
    """There and back, in the backward pass too; waiting at once changes no bit."""
    there = ["begin", "shared", "await", "experts", "begin", "await"]
    back = ["begin", "await", "experts", "begin", "shared", "await"]
    for rank in results:
        order, same_bits = rank.orders[1]
        assert order == [*there, "backward", *back]
        assert same_bits


def test_one_chunk_computes_while_the_other_travels(results: list[Results]) -> None:
    """Experts run with rows of the other chunk under way, but for the first to arrive and the last to leave."""
    one = ["await", "experts", "begin"]
    there = ["begin", "begin", "shared", *one, *one, "await", "await"]
    back = ["begin", "begin", *one, *one, "shared", "await", "await"]
    for rank in results:
        order, same_bits = rank.orders[2]
        assert order == [*there, "backward", *back]
        assert same_bits


def test_layouts_with_chunks_compute_what_one_rank_computes(results: list[Results]) -> None:
    assert [rank.wrong for rank in results] == [[]] * RANKS


def test_two_stages_change_no_bit(results: list[Results]) -> None:
    """On four ranks, two a node, and on eight, two and four a node; with rows that are dropped, and with all experts."""
    assert [rank.staged for rank in results] == [[]] * RANKS
    assert run_ranks(stages_differ, 8, [2, 4], timeout_s=600.0) == [[]] * 8


def test_chunks_travel_between_compiled_programs() -> None:
    assert max(run_ranks(compiled_differs, 2, timeout_s=600.0)) < 1e-12


def test_arrivals_are_sorted_by_expert() -> None:
    """Two ranks send (2, 1, 0) and (1, 0, 3) rows to three experts here."""
    by_expert, ends = order_by_expert(torch.tensor([[2, 1, 0], [1, 0, 3]]), 7)
    assert by_expert.tolist() == [0, 1, 3, 2, 4, 5, 6]
    assert ends.tolist() == [3, 4, 7]


def test_rows_that_arrive_by_place_stand_as_if_they_had_come_by_rank() -> None:
    """Four ranks on two nodes send (1), (2), (1) and (1) rows; those of ranks 0 and 2 arrive first."""
    by_expert, ends = order_by_expert(torch.tensor([[1], [2], [1], [1]]), 5, places=2)
    assert by_expert.tolist() == [0, 3, 1, 2, 4]
    assert ends.tolist() == [5]


def test_no_row_may_arrive() -> None:
    by_expert, ends = order_by_expert(torch.zeros((2, 3), dtype=torch.int64), 0)
    assert by_expert.tolist() == [] and ends.tolist() == [0, 0, 0]


def test_copies_of_a_group_stand_together_for_each_slice() -> None:
    """Groups of 2, 0 and 1 rows go to two ranks each."""
    source, position = order_copies(torch.tensor([2, 0, 1]), 3, 2)
    assert source.tolist() == [0, 1, 0, 1, 2, 2]
    assert position.tolist() == [[0, 2], [1, 3], [4, 5]]
