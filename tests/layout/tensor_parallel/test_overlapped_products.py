"""Split matrices whose exchange runs beside their product, or in 8 bits: the numbers of those that exchange before or after.

On the CPU the ranks' buffers are files that all of them map; everything above the buffers is what accelerators run.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.config.layers import MLPConfig
from phalanx.families.registry import bind
from phalanx.layout.mesh import Axis, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.peer_exchange import PeerExchange, choose_exchange, exchange_of
from phalanx.layout.tensor_parallel.split_layers import ColumnLinear, RowLinear, overlap_exchanges, split_tensors
from phalanx.nn.float8_linear import Float8Product
from phalanx.nn.layers import build_mlp, choose_products
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import Split
from phalanx.planner.memory import peer_buffers
from phalanx.planner.trace.traced_model import TracedModel
from whole_model import CPU, backward, laid_out

WIDTH, HIDDEN, UNIT = 64, 128, 16
COLUMN = Split("column", 2 * UNIT)
SPLITS = (("mlp.gate_up", COLUMN), ("mlp.up", Split("column", UNIT)), ("mlp.down", Split("row", UNIT)))
HOW = ("behind", "beside", "beside, compiled")
"""When parts of a sequence travel: before and behind the products, or beside them."""


def own_axis() -> Axis:
    return build_mesh(ResolvedLayout(1, tp=dist.get_world_size()), CPU).tp


def split_mlp(activation: str, bias: bool, axis: Axis, dtype: torch.dtype) -> nn.Module:
    """An MLP of which this rank has its part, with values of its own."""
    with torch.device("meta"):
        block = nn.ModuleDict({"mlp": build_mlp(MLPConfig(WIDTH, HIDDEN, activation=activation, bias=bias))})
    split_tensors(block, SPLITS, axis)
    generator = torch.Generator().manual_seed(axis.rank)
    for parameter in block.to_empty(device="cpu").parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / 8
    return block


def run_passes(block: nn.Module, how: str, axis: Axis, dtype: torch.dtype) -> list[Tensor]:
    """Value and gradients of the last of three passes, the second of which has longer sequences."""
    mlp = block["mlp"]
    run = torch.compile(mlp, backend="aot_eager", fullgraph=True) if how.endswith("compiled") else mlp
    for length in (6, 8, 6):
        generator = torch.Generator().manual_seed(10 * length + axis.rank)
        x = torch.randn(2, length, WIDTH, generator=generator).to(dtype).requires_grad_()
        for parameter in block.parameters():
            parameter.grad = None
        y = run(x)
        y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return [y.detach(), *(p.grad for p in (x, *block.parameters()) if p.grad is not None)]


def passes_on_ranks() -> dict[tuple[str, ...], list[Tensor]]:
    """On this rank, by precision and by how parts travel: value and gradients."""
    axis, found = own_axis(), {}
    assert choose_exchange(True, axis, CPU)
    for activation, bias in (("swiglu", False), ("gelu", True)):
        for how in HOW:
            block = split_mlp(activation, bias, axis, torch.float64)
            if how != HOW[0]:
                overlap_exchanges(block, 0)
            found[activation, how] = run_passes(block, how, axis, torch.float64)
    for activation, bias in (("swiglu", False), ("gelu", True)):
        for how in ("in 16 bits", *HOW):
            block = split_mlp(activation, bias, axis, torch.bfloat16)
            if how.startswith("beside"):
                overlap_exchanges(block, 0)
            choose_products(block, PRECISIONS["fp8-tensor"], CPU)
            if how == "in 16 bits":
                gather_wide(block)
            found["fp8-tensor", activation, how] = run_passes(block, how, axis, torch.bfloat16)
    return found


def gather_wide(block: nn.Module) -> None:
    """Let all layers gather in the format of the activations, and quantise what has been gathered."""
    for module in block.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            assert isinstance(module.multiply, Float8Product)
            assert module.multiply.gathers or module.multiply.scatters
            module.multiply = module.multiply.over_sequence(None, None)
    mlp = block["mlp"]
    if hasattr(mlp, "joint_products"):
        mlp.joint_products = mlp.gate_up.multiply.gated_pair(mlp.down.multiply)


@pytest.fixture(scope="module", params=[2, 4])
def passes(request: pytest.FixtureRequest) -> list[dict[tuple[str, ...], list[Tensor]]]:
    return run_ranks(passes_on_ranks, request.param, timeout_s=300.0)


@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_product_beside_its_exchange_computes_the_same(activation: str, how: str, passes: list[Any]) -> None:
    for found in passes:
        for value, wanted in zip(found[activation, how], found[activation, "behind"], strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_what_is_gathered_in_8_bits_is_what_is_quantised_behind(activation: str, passes: list[Any]) -> None:
    for found in passes:
        both = found["fp8-tensor", activation, "behind"], found["fp8-tensor", activation, "in 16 bits"]
        assert len(both[0]) == len(both[1]) > 3
        for value, wanted in zip(*both, strict=True):
            assert torch.equal(value, wanted)


@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_8_bits_beside_products_too(activation: str, how: str, passes: list[Any]) -> None:
    for found in passes:
        both = found["fp8-tensor", activation, how], found["fp8-tensor", activation, "behind"]
        for value, wanted in zip(*both, strict=True):
            # Sums over four ranks are rounded once, or after each rank.
            assert float((value - wanted).norm() / wanted.norm()) <= 2**-6


def exchanges_beside(peer_copies: Any, recompute: str) -> tuple[int, int]:
    """How many exchanges run beside products in one forward and backward pass of a layout, and bytes of their buffers."""
    run = run_with({}, tp=2, dp_shard=1, global_batch=2, peer_copies=peer_copies, recompute=recompute)
    applied = laid_out(run, resolve_layout(bind(run), 2))
    with patch.object(PeerExchange, "begin", autospec=True, side_effect=PeerExchange.begin) as begin:
        backward(run, applied)
    return begin.call_count, exchange_of(applied.mesh.tp.group_name).bytes if begin.called else 0


@pytest.mark.parametrize(
    ("peer_copies", "recompute", "count"),
    # A block has two column and two row matrices, one exchange each way; a full recompute repeats those of the forward pass
    # but for the last, of which nothing is kept.
    [(True, "none", 4 * 8 * 2), ("auto", "none", 0), (True, "selective", 0), (True, "full", 4 * (8 + 3) * 2)],
)
def test_a_layout_exchanges_beside_products_where_it_can(peer_copies: Any, recompute: str, count: int) -> None:
    found = run_ranks(exchanges_beside, 2, peer_copies, recompute)
    assert [calls for calls, _ in found] == [count] * 2
    # Of samples as short as this plans count none, since they begin at a size.
    run = run_with({}, tp=2, dp_shard=1, global_batch=2, peer_copies=peer_copies, recompute=recompute)
    with patch.object(peer_buffers, "SMALLEST_EXCHANGE", 0):
        planned = peer_buffers.sequence_buffer_bytes(bind(run, TracedModel), resolve_layout(bind(run), 2).table)
    assert [size for _, size in found] == [planned[0] if peer_copies is True else 0] * 2
