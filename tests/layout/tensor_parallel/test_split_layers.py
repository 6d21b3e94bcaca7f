"""Collectives and their gradients, the loss over parts of the vocabulary, and parts that tile every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed_ranks import run_ranks
from phalanx.config.model import LanguageModel
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.decoder import Decoder
from phalanx.layout.mesh import Axis, build_mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.autograd_collectives import exchange_parts, gather_parts, gather_values, scatter_sum
from phalanx.layout.tensor_parallel.split_layers import ColumnLinear, RowLinear, split_tensors, vocabulary_chunk_loss
from phalanx.nn.cross_entropy import IGNORED, chunk_loss
from small_models import FAMILIES

BOUND = {"rtol": 1e-12, "atol": 1e-12}


def own_axis() -> Axis:
    """All ranks of this process group as a tensor-parallel axis."""
    return build_mesh(ResolvedLayout(1, tp=dist.get_world_size()), torch.device("cpu")).tp


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- collectives -------------------------------------------------------------------------------------------------------

Collective = Callable[[Tensor, Axis], Tensor]

COLLECTIVES: dict[str, tuple[Collective, Callable[[list[Tensor], int], Tensor]]] = {
    # What a rank gets of all ranks' x, by plain arithmetic.
    "gather 0": (lambda x, axis: gather_parts(x, axis, 0), lambda parts, _: torch.cat(parts, 0)),
    "gather 1": (lambda x, axis: gather_parts(x, axis, 1), lambda parts, _: torch.cat(parts, 1)),
    "scatter_sum 1": (
        lambda x, axis: scatter_sum(x, axis, 1),
        lambda parts, rank: sum(parts, torch.zeros(())).chunk(len(parts), 1)[rank],
    ),
    "scatter_sum 2": (
        lambda x, axis: scatter_sum(x, axis, 2),
        lambda parts, rank: sum(parts, torch.zeros(())).chunk(len(parts), 2)[rank],
    ),
    "exchange 1 for 2": (
        lambda x, axis: exchange_parts(x, axis, split=1, join=2),
        lambda parts, rank: torch.cat([part.chunk(len(parts), 1)[rank] for part in parts], 2),
    ),
    "exchange 2 for 1": (
        lambda x, axis: exchange_parts(x, axis, split=2, join=1),
        lambda parts, rank: torch.cat([part.chunk(len(parts), 2)[rank] for part in parts], 1),
    ),
}


def collectives_on_ranks() -> dict[str, Any]:
    """On this rank: each collective's result, and both sides of <f(x), y> = <x, adjoint of f applied to y>."""
    axis = own_axis()
    found: dict[str, Any] = {}
    parts = [random(2, 6, 12, seed=rank) for rank in range(axis.size)]
    for name, (collective, _) in COLLECTIVES.items():
        for how, run in (
            ("", collective),
            (", compiled", torch.compile(collective, backend="aot_eager", fullgraph=True)),
        ):
            x = parts[axis.rank].clone().requires_grad_()
            result = run(x, axis)
            y = random(*result.shape, seed=100 + axis.rank)
            result.backward(y)
            assert x.grad is not None
            found[name + how] = (result.detach(), float((result * y).sum()), float((x * x.grad).sum()))
    found["values"] = gather_values(parts[axis.rank][0, 0], axis)
    found["strided"] = gather_parts(parts[axis.rank].transpose(0, 2), axis, 1)
    return found


@pytest.fixture(scope="module", params=[2, 3])
def collectives(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(collectives_on_ranks, request.param)


@pytest.mark.parametrize("how", ["", ", compiled"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_its_ranks_what_it_says(name: str, how: str, collectives: list[dict[str, Any]]) -> None:
    parts = [random(2, 6, 12, seed=rank) for rank in range(len(collectives))]
    for rank, found in enumerate(collectives):
        torch.testing.assert_close(found[name + how][0], COLLECTIVES[name][1](parts, rank), **BOUND)


@pytest.mark.parametrize("how", ["", ", compiled"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_gradient_is_the_adjoint(name: str, how: str, collectives: list[dict[str, Any]]) -> None:
    forward = sum(found[name + how][1] for found in collectives)
    backward = sum(found[name + how][2] for found in collectives)
    assert abs(forward) > 0.1
    assert forward == pytest.approx(backward, rel=1e-12)


def test_values_of_all_ranks(collectives: list[dict[str, Any]]) -> None:
    parts = [random(2, 6, 12, seed=rank) for rank in range(len(collectives))]
    for found in collectives:
        assert torch.equal(found["values"], torch.stack([part[0, 0] for part in parts]))
        assert torch.equal(found["strided"], torch.cat([part.transpose(0, 2) for part in parts], 1))


def test_one_rank_exchanges_nothing() -> None:
    alone, x = Axis("tp"), random(2, 6, 4, seed=0)
    assert (
        gather_parts(x, alone, 1) is x
        and scatter_sum(x, alone, 1) is x
        and exchange_parts(x, alone, split=1, join=2) is x
    )
    assert gather_values(x, alone).shape == (1, 2, 6, 4)


# --- loss --------------------------------------------------------------------------------------------------------------

LOSSES = [(13, 0.0), (13, 1e-2), (12, 1e-3), (5, 0.0)]
"""Rows of the vocabulary, even and uneven, and weight of the z-loss."""
TOKENS = 11


def logits_and_targets(vocabulary: int) -> tuple[Tensor, Tensor]:
    targets = torch.arange(TOKENS) * 5 % vocabulary
    targets[[2, 7]] = IGNORED
    return 3.0 * random(TOKENS, vocabulary, seed=vocabulary), targets


def losses_on_ranks() -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """For each of LOSSES: where this rank's rows begin, loss, gradient of its logits, and the loss without gradient."""
    axis, found = own_axis(), []
    for vocabulary, z_loss in LOSSES:
        logits, targets = logits_and_targets(vocabulary)
        each = -(-vocabulary // axis.size)
        start = axis.rank * each
        mine = logits[:, start : start + each].contiguous()
        without = vocabulary_chunk_loss(axis, start, mine, targets, z_loss, False)[0]
        nobody = vocabulary_chunk_loss(axis, start, mine.clone(), torch.full_like(targets, IGNORED), z_loss, True)
        loss, grad = vocabulary_chunk_loss(axis, start, mine, targets, z_loss, True)
        assert grad is mine
        assert float(nobody[0]) == 0.0 and not bool(nobody[1].any())
        found.append((start, loss, grad, without))
    return found


@pytest.fixture(scope="module", params=[2, 3])
def losses(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(losses_on_ranks, request.param)


@pytest.mark.parametrize("case", range(len(LOSSES)))
def test_the_loss_over_parts_of_the_vocabulary_is_the_loss(case: int, losses: list[Any]) -> None:
    vocabulary, z_loss = LOSSES[case]
    logits, targets = logits_and_targets(vocabulary)
    loss, grad = chunk_loss(logits, targets, z_loss, True)
    covered = 0
    for found in losses:
        start, part_loss, part_grad, without = found[case]
        torch.testing.assert_close(part_loss, loss, **BOUND)
        torch.testing.assert_close(without, loss, **BOUND)
        torch.testing.assert_close(part_grad, grad[:, start : start + part_grad.shape[1]], **BOUND)
        covered += part_grad.shape[1]
    assert covered == vocabulary


def test_the_loss_on_one_rank_is_the_loss() -> None:
    logits, targets = logits_and_targets(13)
    found = vocabulary_chunk_loss(Axis("tp"), 0, logits.clone(), targets, 1e-3, True)
    torch.testing.assert_close(found, chunk_loss(logits, targets, 1e-3, True), **BOUND)


# --- parts of parameters -----------------------------------------------------------------------------------------------

WHOLE = {"norm", "positions"}
"""What of a name says that the parameter stays whole; so do the biases of row matrices."""


def split_on(model: LanguageModel, rank: int, size: int) -> tuple[Decoder, dict[str, Any]]:
    with torch.device("meta"):
        decoder = Decoder(model)
    return decoder, split_tensors(decoder, DeclaredLanguage(model, 1).splits(), Axis("tp", rank, size))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_tile_every_parameter(family: str, size: int) -> None:
    check_tiles(FAMILIES[family], size)


@pytest.mark.parametrize(("family", "size"), [("gpt", 3), ("gpt", 6), ("mpt", 6), ("llama", 2)])
def test_parts_of_a_vocabulary_may_be_uneven(family: str, size: int) -> None:
    tables = check_tiles(FAMILIES[family], size)
    assert len(tables["embedding.weight"]) == size
    assert len(set(tables["embedding.weight"])) == 2


def check_tiles(model: LanguageModel, size: int) -> dict[str, list[int]]:
    """Elements along the split dim of each rank's part of every split parameter."""
    whole = {name: parameter.shape for name, parameter in Decoder(model).named_parameters()}
    covered = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in whole.items()}
    lengths: dict[str, list[int]] = {}
    for rank in range(size):
        decoder, splits = split_on(model, rank, size)
        parts = dict(decoder.named_parameters())
        assert parts.keys() == whole.keys() and splits.keys() <= whole.keys()
        for name, parameter in parts.items():
            if name not in splits:
                assert parameter.shape == whole[name]
                assert (
                    size == 1
                    or WHOLE & set(name.replace("_", ".").split("."))
                    or name.endswith(("output.bias", "down.bias"))
                )
                covered[name] += int(rank == 0)
                continue
            split, length = splits[name], parameter.shape[splits[name].dim]
            assert split.whole == whole[name][split.dim] and parameter.is_contiguous()
            covered[name].narrow(split.dim, split.start, length).add_(1)
            lengths.setdefault(name, []).append(length)
    assert all(bool((count == 1).all()) for count in covered.values())
    return lengths


def test_a_part_of_the_projection_is_whole_groups_of_heads() -> None:
    model = FAMILIES["llama"]
    group = (model.n_heads // model.kv_heads + 2) * model.head_size
    for rank in range(2):
        decoder, splits = split_on(model, rank, 2)
        split = splits["blocks.1.attention.qkv.weight"]
        assert (split.dim, split.start, split.whole) == (0, rank * group, 2 * group)
        assert splits["blocks.0.attention.output.weight"].dim == splits["blocks.0.mlp.down.weight"].dim == 1
        assert isinstance(decoder.blocks[0].attention.qkv, ColumnLinear)
        assert isinstance(decoder.blocks[0].mlp.down, RowLinear)


def test_equal_parts_hold_an_equal_share_of_the_numbers() -> None:
    sizes = [sum(math.prod(p.shape) for p in split_on(FAMILIES["llama"], rank, 2)[0].parameters()) for rank in range(2)]
    assert sizes[0] - sizes[1] == 2 * FAMILIES["llama"].d_model
