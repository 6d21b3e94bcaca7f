"""Products beside their exchange on devices: two ranks, on two devices or both on one, compute what one process does."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from device_runs import accelerator
from distributed_ranks import run_ranks
from phalanx.layout.mesh import Axis, build_mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.overlapped_products import gather_multiply, multiply_scatter
from phalanx.layout.tensor_parallel.peer_exchange import choose_exchange
from phalanx.layout.tensor_parallel.sequence_ranks import SequenceRanks
from phalanx.nn.float8_linear import Float8Recipe

pytestmark = pytest.mark.gpu

RANKS, BATCH, WIDTH, HIDDEN = 2, 2, 512, 1024
LENGTHS = (256, 64, 512, 256)
"""Positions of one pass after the other: buffers grow, and are used again."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def samples(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, gradient of the result, and the weights of a column and a row matrix, whole."""
    first, second = drawn(HIDDEN, WIDTH, seed=1), drawn(WIDTH, HIDDEN, seed=2)
    x, grad = (drawn(BATCH, length, WIDTH, seed=length + n) for n in range(2))
    return x, grad, first / WIDTH**0.5, second / HIDDEN**0.5


def run_split(tp: Axis, device: torch.device, dtype: torch.dtype, recipe: bool) -> list[list[Tensor]]:
    """On one rank: value and gradients of each pass, this rank's parts."""
    ranks = SequenceRanks(tp.group_name, tp.size, overlapped_bytes=0)
    products: list[Any] = [
        Float8Recipe("tensor").of_layer(WIDTH, HIDDEN, "", tp.group_name, device),
        Float8Recipe("tensor").of_layer(HIDDEN, WIDTH, tp.group_name, "", device),
    ]
    column, row = products[0].over_sequence(ranks, None), products[1].over_sequence(None, ranks)
    found = []
    for length in LENGTHS:
        x, grad, first, second = samples(length)
        parts = [x.chunk(RANKS, 1)[tp.rank], first.chunk(RANKS, 0)[tp.rank], second.chunk(RANKS, 1)[tp.rank]]
        leaves = [part.to(device, dtype).contiguous().requires_grad_() for part in parts]
        own_x, own_first, own_second = leaves
        if recipe:
            y = row(F.silu(column(own_x, own_first, None)), own_second, None)
        else:
            y = multiply_scatter(F.silu(gather_multiply(own_x, own_first, tp)), own_second, tp)
        y.backward(grad.chunk(RANKS, 1)[tp.rank].to(device, dtype))
        found.append([value.cpu().double() for value in (y.detach(), *gradients(leaves))])
    return found


def split_passes(recipe: bool) -> dict[str, list[list[Tensor]]]:
    """On one rank of two, by the format of the activations."""
    kind = accelerator().type
    count = torch.accelerator.device_count()
    if count < RANKS:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device(kind, dist.get_rank() % count)
    torch.accelerator.set_device_index(device.index)
    tp = build_mesh(ResolvedLayout(1, tp=RANKS), torch.device("cpu")).tp
    assert choose_exchange(True, tp, device)
    formats = (torch.bfloat16,) if recipe else (torch.bfloat16, torch.float32)
    return {str(dtype): run_split(tp, device, dtype, recipe) for dtype in formats}


def whole_passes(length: int) -> list[Tensor]:
    """In float64 on the CPU: value and gradients, whole."""
    x, grad, first, second = samples(length)
    leaves = [leaf.double().requires_grad_() for leaf in (x, first, second)]
    y = F.linear(F.silu(F.linear(leaves[0], leaves[1])), leaves[2])
    y.backward(grad.double())
    return [y.detach(), *gradients(leaves)]


def gradients(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("recipe", [False, True], ids=["plain", "fp8-tensor"])
def test_products_beside_their_exchange(recipe: bool) -> None:
    ranks = run_ranks(split_passes, RANKS, recipe, timeout_s=120.0)
    for format_ in ranks[0]:
        bound = 0.1 if recipe else {"torch.bfloat16": 2e-2, "torch.float32": 2e-5}[format_]
        for number, length in enumerate(LENGTHS):
            for place, (wanted, dim) in enumerate(zip(whole_passes(length), (1, 1, 0, 1), strict=True)):
                value = torch.cat([found[format_][number][place] for found in ranks], dim)
                assert float((value - wanted).norm() / wanted.norm()) <= bound, (format_, length, place)
