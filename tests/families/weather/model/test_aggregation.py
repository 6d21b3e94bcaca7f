"""Aggregation of variables: against attention over tokens that are formed, by groups, by heads, and in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.field_embedding import HierarchicalAggregation, PatchAggregation, TokenAggregation
from phalanx.families.weather.sizes import group_sizes
from small_forecasters import SMALL, random_fields, random_forecaster, small

WIDTH, HEADS = SMALL.d_model, SMALL.n_heads


def _attention(layer: PatchAggregation | TokenAggregation, tokens_BLVD: Tensor, queries_ND: Tensor) -> Tensor:
    """Plain multi-head attention of `queries` to the tokens of each location: [B, L, N, D]."""

    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], HEADS, -1).transpose(-2, -3)

    query = heads(F.linear(queries_ND, layer.query.weight, layer.query.bias))
    key, value = (heads(F.linear(tokens_BLVD, part.weight, part.bias)) for part in (layer.key, layer.value))
    shares = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(dim=-1)
    mixed = (shares @ value).transpose(-2, -3).flatten(-2)
    return F.linear(mixed, layer.output.weight, layer.output.bias)


def _parts(config: WeatherModel) -> tuple[torch.nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """The aggregation, its three arguments, and the variables' tokens [B, L, V, D]."""
    embedding = random_forecaster(config).embedding
    weight, offset = embedding.variable_maps(list(range(len(config.variables))))
    patches = random_fields(config, 2, len(config.variables)).unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(4, 5).flatten(1, 2)
    tokens = torch.einsum("blvp,vdp->blvd", patches, weight) + offset
    return embedding.aggregation, patches, weight, offset, tokens


@pytest.mark.parametrize("queries", [1, 3])
def test_is_attention_to_tokens_that_are_never_formed(queries: int) -> None:
    flat, patches, weight, offset, tokens = _parts(small(aggregation_queries=queries))
    assert isinstance(flat, PatchAggregation)
    expected = _attention(flat, tokens, flat.queries).flatten(1, 2)
    torch.testing.assert_close(flat(patches, weight, offset), expected)


@pytest.mark.parametrize(("groups", "queries"), [(1, 1), (2, 1), (3, 2), (5, 1)])
def test_hierarchical_is_attention_over_groups_then_over_their_tokens(groups: int, queries: int) -> None:
    config = small(aggregation="hierarchical", aggregation_groups=groups, aggregation_queries=queries)
    both, patches, weight, offset, tokens = _parts(config)
    assert isinstance(both, HierarchicalAggregation)
    chunks = tokens.split(group_sizes(5, groups), dim=2)
    first = [_attention(both.groups, chunk, both.groups.queries[g : g + 1]) for g, chunk in enumerate(chunks)]
    expected = _attention(both.final, torch.cat(first, dim=2), both.final.queries).flatten(1, 2)
    torch.testing.assert_close(both(patches, weight, offset), expected)


def test_one_group_with_an_identity_behind_it_is_flat() -> None:
    both, patches, weight, offset, _ = _parts(small(aggregation="hierarchical"))
    assert isinstance(both, HierarchicalAggregation)
    with torch.no_grad():
        for layer in (both.final.value, both.final.output):
            layer.weight.copy_(torch.eye(WIDTH))
            assert layer.bias is not None
            layer.bias.zero_()
    torch.testing.assert_close(both(patches, weight, offset), both.groups(patches, weight, offset))


def test_heads_can_be_shared_out() -> None:
    whole, patches, weight, offset, _ = _parts(small(aggregation_queries=2))
    assert isinstance(whole, PatchAggregation) and whole.output.bias is not None
    total = torch.zeros(())
    for first in range(HEADS):
        mine = slice(first * 8, first * 8 + 8)
        part = PatchAggregation(whole_config := small(aggregation_queries=2), whole_config.aggregation_queries)
        part.queries = whole.queries
        for name in ("query", "key", "value"):
            layer, full = getattr(part, name), getattr(whole, name)
            layer.weight = torch.nn.Parameter(full.weight[mine])
            layer.bias = None if full.bias is None else torch.nn.Parameter(full.bias[mine])
        part.output.weight = torch.nn.Parameter(whole.output.weight[:, mine])
        part.output.bias = torch.nn.Parameter(whole.output.bias / HEADS)
        total = total + part(patches, weight, offset)
    torch.testing.assert_close(total, whole(patches, weight, offset))


def test_keeps_no_token_of_a_variable() -> None:
    config = small(d_model=64, n_heads=2, variables=[f"v_{n}" for n in range(1, 40)])
    embedding = random_forecaster(config).embedding
    fields = random_fields(config, 2, 39)
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        embedding.tokens(fields, torch.arange(24), embedding.config).sum().backward()
    heads, points, stack = 2, 4, 2 * 24 * 39 * 64
    assert max(kept) == 2 * 24 * heads * 39 * (points + 1) < stack / 6


@pytest.mark.parametrize(("variables", "groups", "sizes"), [(5, 3, [2, 2, 1]), (48, 8, [6] * 8), (4, 4, [1] * 4)])
def test_sizes_of_groups(variables: int, groups: int, sizes: list[int]) -> None:
    assert group_sizes(variables, groups) == sizes


@pytest.mark.parametrize("groups", [1, 2])
def test_a_masked_model_is_that_of_the_variables_that_are_there(groups: int) -> None:
    shape: dict[str, Any] = {"aggregation": "hierarchical", "aggregation_groups": groups} if groups > 1 else {}
    whole = random_forecaster(small(**shape, absent_inputs="masked"))
    fields = random_fields(whole.config, 3, 5)
    hours = torch.tensor([6.0, 24.0, 72.0], dtype=fields.dtype)
    # One of each group stays: two of five are gone, of one sample alone.
    fields[1, [1, 3]] = 0.0
    predicted = whole.forecast(fields, hours)
    there = [0, 2, 4]
    fewer = random_forecaster(small(**shape, inputs=[SMALL.variables[place] for place in there]))
    fewer.load_state_dict(whole.state_dict())
    if groups == 1:
        torch.testing.assert_close(predicted[1], fewer.forecast(fields[1:2][:, there], hours[1:2])[0])
    as_mean = random_forecaster(small(**shape))
    as_mean.load_state_dict(whole.state_dict())
    torch.testing.assert_close(predicted[[0, 2]], as_mean.forecast(fields, hours)[[0, 2]])
    assert not torch.allclose(predicted[1], as_mean.forecast(fields, hours)[1])
    # A sample without any variable is computed as if nothing were masked.
    fields[1] = 0.0
    torch.testing.assert_close(whole.forecast(fields, hours), as_mean.forecast(fields, hours))
