"""Weights gathered in 8 bits: bit by bit those that one rank quantises, of rows that share out unevenly and cut blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from distributed_ranks import run_ranks
from phalanx.kernels.float8 import quantise
from phalanx.layout.data_parallel import quantised_shards
from phalanx.layout.data_parallel.fully_sharded import FullySharded, ShardingOptions
from phalanx.layout.mesh import Groups, Mesh, build_mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.layers import Linear, choose_products, quantise_weights
from phalanx.nn.precision import PRECISIONS

CPU, RANKS = torch.device("cpu"), 3
RECIPES = ("fp8-tensor", "fp8-row", "fp8-block")
FEATURES = (144, 272, 16, 144)
"""Of layers one behind the other: rows that three ranks share out unevenly, within blocks of 128."""


class Chain(nn.Module):
    """Linear layers one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        sizes = pairwise(FEATURES)
        self.layers = nn.ModuleList(Linear(i, o, bias=True) for i, o in sizes)
        for seed, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(seed)
            rows = torch.exp2(torch.randint(-12, 1, (parameter.shape[0],), generator=generator).float())
            value = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
            parameter.data = value * rows.view(-1, *[1] * (value.dim() - 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def shard_chain(recipe: str, mesh: Mesh, *, compiled: bool) -> tuple[Chain, FullySharded]:
    """The chain in units of a layer each, not yet published."""
    chain = Chain()
    choose_products(chain, PRECISIONS[recipe], CPU)
    if compiled:
        # Layers of all sizes are programs of one function, of which compilers make but a few.
        torch.compiler.reset()
        for layer in chain.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    sharding = FullySharded(mesh, ShardingOptions(PRECISIONS[recipe]))
    sharding.shard_module(chain, list(chain.layers))
    return chain, sharding


def whole_chain(recipe: str, factor: float) -> Chain:
    """The chain on one rank, its weights held in 8 bits and, but for these, in the format that is gathered."""
    chain = Chain()
    choose_products(chain, PRECISIONS[recipe], CPU)
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.mul_(factor)
    quantise_weights(list(chain.layers))
    return chain.bfloat16()


def differences(recipe: str, mesh: Mesh, *, compiled: bool) -> list[str]:
    """What differs between one rank and three that compute the same samples, in two steps."""
    sharded, sharding = shard_chain(recipe, mesh, compiled=compiled)
    generator = torch.Generator().manual_seed(100)
    x, grad = (torch.randn(2, 9, size, generator=generator).bfloat16() for size in (FEATURES[0], FEATURES[-1]))
    found = []
    sharding.publish_parameters()
    for step, factor in enumerate((1.0, 3.0)):
        whole, results = whole_chain(recipe, factor), []
        for chain in (sharded, whole):
            inputs = x.clone().requires_grad_()
            y = chain(inputs)
            y.backward(grad)
            results.append((y, inputs.grad))
        for name, here, there in zip(("result", "gradient"), *results, strict=True):
            found += [f"{name} of step {step}"] * (not torch.equal(here, there))
        for place, (here, there) in enumerate(zip(sharded.layers, whole.layers, strict=True)):
            wanted = there.weight.grad.float() * RANKS
            near = torch.allclose(
                here.weight.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max())
            )
            found += [f"weight {place} of step {step}"] * (not near)
            here.weight.grad = None
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.mul_(3.0)
            sharding.publish_parameters(write_copies(sharding))
    return found


def write_copies(sharding: FullySharded) -> list[Tensor]:
    """Do as an optimizer that writes copies by the scales that were; returns what it wrote: not every rank has all rows."""
    written = []
    for parameter, copy in sharding.quantised_copies.items():
        rows = parameter.to_local()  # type: ignore[attr-defined]
        if len(rows) > 6:
            copy.amax.copy_(rows.abs().amax())
            copy.q.copy_(quantise(rows, copy.scale, copy.scale, copy.q.dtype, True, False)[0])
            written.append(copy.q)
    return written


def bytes_of_weights(mesh: Mesh) -> list[tuple[int, ...]]:
    """Of each layer as it computes: bytes of the parameter, of the weight in 8 bits, and of this behind the layer."""
    chain, sharding = shard_chain("fp8-row", mesh, compiled=False)
    sharding.publish_parameters()
    found: list[tuple[int, ...]] = []

    def note(layer: nn.Module, _: Any) -> None:
        assert isinstance(layer, Linear) and layer.held is not None and layer.weight.isnan().all()
        found.append((layer.weight.untyped_storage().nbytes(), layer.held.rows.q.untyped_storage().nbytes()))

    for layer in chain.layers:
        layer.register_forward_pre_hook(note)
    chain(torch.ones(1, FEATURES[0]).bfloat16())
    behind = [layer.held.rows.q.untyped_storage().nbytes() for layer in chain.layers]
    return [(*before, after) for before, after in zip(found, behind, strict=True)]


def keep_own_scales() -> Any:
    return patch.object(quantised_shards, "_agree", lambda amaxes, group: list(amaxes))


def on_three_ranks() -> dict[str, Any]:
    """Differences by recipe, and bytes."""
    groups: Groups = {}
    mesh = build_mesh(ResolvedLayout(RANKS, 1, dp_shard=RANKS, zero=3), CPU, groups)
    found: dict[str, Any] = {recipe: differences(recipe, mesh, compiled=False) for recipe in RECIPES}
    found["compiled"] = differences("fp8-row", mesh, compiled=True)
    with keep_own_scales():
        found |= {f"{recipe}, own scales": differences(recipe, mesh, compiled=False) for recipe in RECIPES}
    found["bytes"] = bytes_of_weights(mesh)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(on_three_ranks, RANKS, timeout_s=240.0)
    return found


@pytest.mark.parametrize("way", [*RECIPES, "compiled"])
def test_shards_compute_bit_by_bit_what_one_rank_computes(way: str, ranks: list[dict[str, Any]]) -> None:
    assert [rank[way] for rank in ranks] == [[]] * RANKS


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_of_a_shard_alone_are_found(recipe: str, ranks: list[dict[str, Any]]) -> None:
    assert all("result of step 0" in rank[f"{recipe}, own scales"] for rank in ranks)


def test_a_byte_is_gathered_of_each_number(ranks: list[dict[str, Any]]) -> None:
    sizes = pairwise(FEATURES)
    padded = [-(-o // RANKS) * RANKS * i for i, o in sizes]
    assert ranks[0]["bytes"] == [(2, size, 0) for size in padded]
