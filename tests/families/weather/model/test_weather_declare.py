"""What the weather family declares: initial values, kinds, splits."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from phalanx.counter_random import normal_values, stream_key
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.declare import DeclaredWeather
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.nn.layers import Linear
from small_forecasters import EVERYTHING, SMALL, random_inputs, small


def _initialised(config: WeatherModel) -> Forecaster:
    """A forecaster with its declared initial values, in float64."""
    model = Forecaster(config, dtype=torch.float64).double()
    declared = DeclaredWeather(config, config.n_tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = next(rule for pattern, rule in declared.initial_rules() if fnmatchcase(name, pattern))
            index = torch.arange(parameter.numel())
            if rule.kind == "constant":
                parameter.fill_(rule.value)
                continue
            if rule.kind == "table":
                assert rule.table is not None
                values = rule.table(index, tuple(parameter.shape))
            else:
                values = normal_values(stream_key(name), index) * rule.value
            parameter.copy_(values.view_as(parameter))
    return model


@pytest.mark.parametrize("config", [SMALL, EVERYTHING, small(aggregation_queries=2)])
def test_training_can_begin_from_the_initial_values(config: WeatherModel) -> None:
    model = _initialised(config)
    fields, targets, hours = random_inputs(config)
    model(fields, targets, lead_hours_B=hours).sum().backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # A query of zeros attends to all variables alike: it moves first, then the maps that it meets. Elsewhere all move.
    single = config.aggregation == "flat" and config.aggregation_queries == 1
    assert still == ({f"embedding.aggregation.{side}.weight" for side in ("query", "key")} if single else set())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


def test_tokens_of_a_location_differ_from_the_start() -> None:
    """Queries that begin equal, as published, would give equal tokens until the head tells them apart."""
    model = _initialised(small(aggregation_queries=3))
    fields, _, hours = random_inputs(model.config)
    tokens = model.embedding(fields, hours, model.all_positions(torch.device("cpu"))).unflatten(1, (-1, 3))
    assert (tokens[:, :, 0] - tokens[:, :, 1]).abs().min(dim=-1).values.max() > 0
    assert not torch.allclose(tokens[:, :, 1], tokens[:, :, 2], rtol=0, atol=1e-9)


def test_tables_stand_where_the_published_ones_do() -> None:
    embedding = _initialised(SMALL).embedding
    assert embedding.positions is not None
    positions = embedding.positions.detach()
    # Location 7 is column 1 of row 1, in a grid of 6 columns; waves of the column come first.
    assert positions[7, 0] == positions[7, 16] == pytest.approx(math.sin(1))
    assert positions[5, 0] == pytest.approx(math.sin(5)) and positions[5, 16] == 0.0
    assert embedding.variables.detach()[3, 0] == pytest.approx(math.sin(3))


@pytest.mark.parametrize("config", [SMALL, EVERYTHING])
def test_kinds(config: WeatherModel) -> None:
    with torch.device("meta"):
        parameters = dict(Forecaster(config).named_parameters())
    kinds = {name: DeclaredWeather(config, config.n_tokens).parameter_kind(name) for name in parameters}
    assert all(kinds[name] == "bias" for name in parameters if name.endswith("bias"))
    assert all(kinds[name] == "norm" for name in parameters if name.endswith("norm.weight"))
    tables = {name for name, kind in kinds.items() if kind == "embedding"}
    assert {"embedding.variables"} < tables
    assert all(name.endswith(("variables", "positions", "queries")) for name in tables)
    assert all(parameters[name].dim() >= 2 for name, kind in kinds.items() if kind == "matrix")


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_splits_name_layers_in_pairs_that_fit(depth: int) -> None:
    config = small(decoder_depth=depth, d_ff=96)
    with torch.device("meta"):
        modules = dict(Forecaster(config).named_modules())
    splits = DeclaredWeather(config, config.n_tokens).splits()
    named = {
        name: next(split for pattern, split in splits if fnmatchcase(name, pattern))
        for name in modules
        if any(fnmatchcase(name, pattern) for pattern, _ in splits)
    }
    assert all(any(fnmatchcase(name, pattern) for name in modules) for pattern, _ in splits)
    for name, split in named.items():
        module = modules[name]
        if split.kind == "attention":
            continue
        assert isinstance(module, Linear)
        assert module.weight.shape[0 if split.kind == "column" else 1] % split.unit == 0
    head = [split.kind for name, split in named.items() if name.startswith("head.")]
    assert head == ["column", "row"] * (depth // 2)
    assert [count.count for count in DeclaredWeather(config, config.n_tokens).split_counts()] == [4, 96, 24]


def test_a_part_of_the_rows_of_qkv_is_whole_heads() -> None:
    """Two halves of the heads, each with its own part of the matrices, add up to the whole attention."""
    model = _initialised(small(qk_norm=True, init_std=0.3))
    attention = model.blocks[0].attention
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = attention(x)
    qkv, output = attention.qkv, attention.output
    assert qkv.bias is not None and output.bias is not None
    total = torch.zeros_like(x)
    for half in range(2):
        rows, columns = slice(half * 48, half * 48 + 48), slice(half * 16, half * 16 + 16)
        attention.qkv, attention.output = Linear(32, 48, bias=True), Linear(16, 32, bias=False)
        attention.qkv.weight, attention.qkv.bias = nn.Parameter(qkv.weight[rows]), nn.Parameter(qkv.bias[rows])
        attention.output.weight = nn.Parameter(output.weight[:, columns])
        total = total + attention(x)
    torch.testing.assert_close(total + output.bias, expected)


def test_embedding_and_head_cost_a_part_of_a_block() -> None:
    config = small(n_lat=32, n_lon=64, d_model=1024, n_heads=16)
    before, behind = DeclaredWeather(config, config.n_tokens).block_costs()
    assert 0.05 < before < 0.2 and 0.1 < behind < 0.3
