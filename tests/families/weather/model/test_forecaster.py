"""The forecaster as a whole: against ClimaX written with torch's own layers, in parts, in all its options and formats."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.counter_random import DropoutContext
from phalanx.families.weather.model.forecaster import Forecaster, path_factors
from phalanx.families.weather.model.grid_features import fields_of, patches_of, row_latitudes
from phalanx.nn.positions import Positions
from phalanx.nn.splits import ModelChunk
from published_climax import published_copy, published_loss
from small_forecasters import EVERYTHING, NAMES, SMALL, random_fields, random_forecaster, random_inputs, small

CPU = torch.device("cpu")
FORMS = {"published": SMALL, "everything": EVERYTHING}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation_queries": 3},
        {"inputs": ["2m_temperature", "land_sea_mask"], "outputs": ["geopotential_500"]},
        {"inputs": ["temperature_850"], "outputs": ["2m_temperature", "temperature_850"], "decoder_depth": 0},
        {"patch_size": 4, "d_ff": 40, "decoder_depth": 1},
    ],
)
def test_equals_the_published_form(changes: dict[str, Any]) -> None:
    model = random_forecaster(small(**changes))
    fields, targets, hours = random_inputs(model.config)
    expected = published_copy(model)(fields, hours)
    torch.testing.assert_close(model.forecast(fields, hours), expected, rtol=1e-10, atol=1e-11)
    loss = published_loss(expected, targets, row_latitudes(model.config, CPU).tolist())
    total = model(fields, targets, lead_hours_B=hours)
    torch.testing.assert_close(total[0] / (~targets.isnan()).sum(), loss, rtol=1e-11, atol=0)


def test_gradients_equal_those_of_the_published_form() -> None:
    model = random_forecaster(small(aggregation_queries=2))
    fields, targets, hours = random_inputs(model.config)
    reference = published_copy(model)
    model(fields, targets, lead_hours_B=hours).sum().backward()
    predicted = reference(fields, hours)
    (published_loss(predicted, targets, row_latitudes(model.config, CPU).tolist()) * targets.numel()).backward()
    theirs = dict(reference.named_parameters())
    key_bias = theirs["aggregation.in_proj_bias"].grad
    assert key_bias is not None and key_bias[32:64].abs().max() < 1e-9
    joined = torch.cat([getattr(model.embedding.aggregation, n).weight.grad for n in ("query", "key", "value")])
    for mine, other in {
        "embedding.variables": theirs["variables"].grad,
        "embedding.aggregation.queries": theirs["queries"].grad,
        "embedding.positions": theirs["positions"].grad,
        "embedding.lead.weight": theirs["lead.weight"].grad,
        "blocks.0.mlp.up.weight": theirs["blocks.0.up.weight"].grad,
        "blocks.2.attention.output.weight": theirs["blocks.2.attention.out_proj.weight"].grad,
        "head.layers.1.weight": theirs["layers.1.weight"].grad,
    }.items():
        torch.testing.assert_close(model.get_parameter(mine).grad, other, rtol=1e-8, atol=1e-10, msg=mine)
    torch.testing.assert_close(joined, theirs["aggregation.in_proj_weight"].grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("n_lat", "n_lon", "patch", "queries"), [(32, 64, 2, 1), (128, 256, 4, 1), (2, 2, 2, 1), (2, 2, 2, 2), (6, 4, 1, 1)]
)
def test_grids_and_a_single_patch(n_lat: int, n_lon: int, patch: int, queries: int) -> None:
    config = small(n_layers=1, n_lat=n_lat, n_lon=n_lon, patch_size=patch, aggregation_queries=queries)
    model = random_forecaster(config)
    fields, _, hours = random_inputs(config, samples=1)
    expected = published_copy(model)(fields, hours)
    assert expected.shape == (1, 5, n_lat, n_lon)
    torch.testing.assert_close(model.forecast(fields, hours), expected, rtol=1e-9, atol=1e-10)


def test_91_variables() -> None:
    config = small(variables=[f"humidity_{level}" for level in range(1, 92)], n_layers=1)
    model = random_forecaster(config)
    fields, _, hours = random_inputs(config, samples=1)
    torch.testing.assert_close(
        model.forecast(fields, hours), published_copy(model)(fields, hours), rtol=1e-9, atol=1e-9
    )


def test_a_subset_is_the_part_of_a_model_that_it_names() -> None:
    whole = random_forecaster(SMALL)
    part = random_forecaster(small(outputs=["2m_temperature", "temperature_850"]))
    fields, _, hours = random_inputs(SMALL)
    torch.testing.assert_close(part.forecast(fields, hours), whole.forecast(fields, hours)[:, [4, 1]])
    reordered = random_forecaster(small(inputs=list(reversed(NAMES))))
    torch.testing.assert_close(reordered.forecast(fields.flip(1), hours), whole.forecast(fields, hours))


@pytest.mark.parametrize("form", FORMS)
def test_parts_joined_are_the_whole(form: str) -> None:
    config = FORMS[form]
    fields, targets, hours = random_inputs(config)
    whole = random_forecaster(config)
    expected = whole(fields, targets, lead_hours_B=hours)
    names = dict(whole.named_parameters())
    x, seen = fields, 0
    for first, end in pairwise((0, 1, 3)):
        part = random_forecaster(config, part=ModelChunk(range(first, end), first == 0, end == 3))
        assert {name for name, _ in part.named_parameters()} <= names.keys()
        seen += len(list(part.parameters()))
        x = part.hidden(x, part.all_positions(CPU), lead_hours_B=hours)
        if end == 3:
            torch.testing.assert_close(part.head(x, targets, fields_BVHW=fields), expected)
    assert seen == len(names)


@pytest.mark.parametrize("form", FORMS)
def test_rows_can_be_shared_out(form: str) -> None:
    config = FORMS[form]
    model = random_forecaster(config)
    fields, targets, hours = random_inputs(config)
    targets[0, 0, :3] = torch.nan
    hidden = model.embedding(fields, hours, model.all_positions(CPU))
    total = torch.zeros(1, dtype=torch.float64)
    for rows in torch.arange(config.n_tokens).split(config.n_tokens // 3):
        part = model.embedding(fields, hours, Positions(torch.arange(config.n_tokens), rows))
        torch.testing.assert_close(part, hidden[:, rows])
        total = total + model.head(hidden[:, rows], targets, rows, fields_BVHW=fields)
    torch.testing.assert_close(total, model.head(hidden, targets, fields_BVHW=fields))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form: str) -> None:
    model = random_forecaster(FORMS[form])
    fields, targets, hours = random_inputs(model.config)
    targets[1, 0, 2, 3] = torch.nan
    model(fields, targets, lead_hours_B=hours).sum().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None and grad.isfinite().all(), name
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        ahead, behind = (_loss_at(model, parameter, direction * s, fields, targets, hours) for s in (1e-6, -1e-6))
        assert (ahead - behind) / 2e-6 == pytest.approx(float((grad * direction).sum()), rel=2e-5, abs=1e-4), name


@torch.no_grad()
def _loss_at(
    model: Forecaster, parameter: Tensor, shift: Tensor, fields: Tensor, targets: Tensor, hours: Tensor
) -> float:
    kept = parameter.clone()
    parameter.add_(shift)
    loss = float(model(fields, targets, lead_hours_B=hours))
    parameter.copy_(kept)
    return loss


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_activations_stay_close_to_float32(form: str) -> None:
    config = FORMS[form]
    fields, _, hours = random_inputs(config)
    full = random_forecaster(config, dtype=torch.float32).forecast(fields.float(), hours.float())
    half = random_forecaster(config, dtype=torch.bfloat16).forecast(fields.float(), hours.float())
    assert full.dtype == half.dtype == torch.float32
    error = (half - full).square().mean().sqrt() / full.square().mean().sqrt()
    assert error < 0.03


def test_a_model_of_changes_that_predicts_none_is_persistence() -> None:
    config = small(prediction="change", outputs=list(NAMES[1:3]), change_scales=[0.1, 0.2])
    model = random_forecaster(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.head.output.parameters():
            parameter.zero_()
    fields = random_fields(config, 2, 5).float()
    assert torch.equal(model.forecast(fields, torch.tensor([6.0, 12.0])), fields[:, 1:3])


def test_changes_are_scaled_by_variable() -> None:
    changes = {"prediction": "change", "outputs": list(NAMES[1:3])}
    plain, scaled = small(**changes), small(**changes, change_scales=[0.1, 20.0])
    fields, _, hours = random_inputs(plain)
    before = fields[:, 1:3]
    delta = random_forecaster(plain).forecast(fields, hours) - before
    expected = before + delta * torch.tensor([0.1, 20.0])[:, None, None]
    torch.testing.assert_close(random_forecaster(scaled).forecast(fields, hours), expected, rtol=1e-6, atol=1e-7)


def _context(samples: list[int], rows: Tensor, *, step: int = 3) -> DropoutContext:
    return DropoutContext.of_step(7, step, torch.tensor(samples), rows, width=32)


def test_dropout_depends_on_samples_and_places_not_on_their_company() -> None:
    config = small(dropout=0.2, drop_path=0.5)
    model = random_forecaster(config)
    fields, _, hours = random_inputs(config, samples=3)
    positions = model.all_positions(CPU)

    def hidden(which: list[int], step: int = 3) -> Tensor:
        numbers = [[40, 41, 42][place] for place in which]
        context = _context(numbers, positions.rows_S, step=step)
        return model.hidden(fields[which], positions, lead_hours_B=hours[which], dropout=context)

    whole = hidden([0, 1, 2])
    for place in range(3):
        torch.testing.assert_close(hidden([place])[0], whole[place])
    assert not torch.allclose(hidden([0, 1, 2], step=4), whole)
    assert torch.equal(hidden([2, 0, 1]), whole[[2, 0, 1]])
    embedded = model.embedding(fields, hours, positions, _context([40, 41, 42], positions.rows_S))
    rows = torch.arange(6, 12)
    part = model.embedding(fields, hours, Positions(rows, rows), _context([40, 41, 42], rows))
    torch.testing.assert_close(part, embedded[:, rows])


def test_each_block_drops_by_its_own_number_in_whatever_part_it_is() -> None:
    config = small(dropout=0.2, drop_path=0.5)
    model = random_forecaster(config)
    fields, _, hours = random_inputs(config)
    positions = model.all_positions(CPU)
    context = _context([8, 9], positions.rows_S)
    x = model.embedding(fields, hours, positions, context)
    for number, block in enumerate(model.blocks):
        own = context.at_layer(number)
        x = block(x, own, path_factors(config, number, own))
    torch.testing.assert_close(model.hidden(fields, positions, lead_hours_B=hours, dropout=context), x)
    first = random_forecaster(config, part=ModelChunk(range(2), last=False))
    rest = random_forecaster(config, part=ModelChunk(range(2, 3), first=False))
    between = first.hidden(fields, positions, lead_hours_B=hours, dropout=context)
    torch.testing.assert_close(rest.hidden(between, positions, lead_hours_B=hours, dropout=context), x)


def test_qk_norm_is_a_layer_norm_of_each_head() -> None:
    attention = random_forecaster(small(qk_norm=True)).blocks[0].attention
    assert attention.query_norm is not None and attention.key_norm is not None
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    query, key, value = attention.qkv(x).view(2, 24, 4, 3, 8).permute(3, 0, 2, 1, 4)
    query = F.layer_norm(query, (8,)) * attention.query_norm.weight
    key = F.layer_norm(key, (8,)) * attention.key_norm.weight
    mixed = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
    expected = attention.output(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


def test_skipped_branches_are_as_many_as_the_chance_says() -> None:
    config = small(n_layers=5, drop_path=0.4)
    samples = torch.arange(20_000)
    context = DropoutContext.of_step(0, 1, samples, torch.arange(1), width=1)
    assert path_factors(config, 0, context.at_layer(0)) is None
    assert path_factors(config, 4, None) is None
    seen = []
    for layer in (1, 4):
        factors = path_factors(config, layer, context.at_layer(layer))
        assert factors is not None and factors.shape == (2, 20_000)
        chance = 0.4 * layer / 4
        dropped = (factors == 0.0).double().mean(dim=1)
        assert (dropped - chance).abs().max() < 0.012
        assert factors.max() == pytest.approx(1 / (1 - chance))
        seen.append(factors == 0.0)
    # Branches and layers decide apart: both dropped as often as the product of the chances says.
    assert (seen[1][0] & seen[1][1]).double().mean() == pytest.approx(0.16, abs=0.01)
    assert (seen[0][0] & seen[1][0]).double().mean() == pytest.approx(0.04, abs=0.006)


def test_a_skipped_sample_passes_a_block_unchanged() -> None:
    model = random_forecaster(SMALL)
    x = torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    kept = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    block = model.blocks[1]
    out = block(x, None, kept)
    assert torch.equal(out[0], x[0])
    torch.testing.assert_close(out[1], block(x)[1])
    torch.testing.assert_close(out[2], (x + 2 * block.attention(block.attention_norm(x)))[2])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_patches_and_back(size: int) -> None:
    fields = random_fields(SMALL, 2, 3)
    patches = patches_of(fields, size)
    assert patches.shape == (2, 8 * 12 // size**2, 3, size**2)
    assert torch.equal(fields_of(patches, small(patch_size=size)), fields)
    assert torch.equal(patches[1, 12 // size + 1, 2], fields[1, 2, size : 2 * size, size : 2 * size].flatten())


def test_patches_beyond_the_grid_repeat_its_edge_and_are_dropped() -> None:
    fields = random_fields(SMALL, 2, 3)[..., :7, :10]
    patches = patches_of(fields, 4)
    assert patches.shape == (2, 2 * 3, 3, 16)
    corner = patches[1, -1, 2].view(4, 4)
    assert torch.equal(corner[:3, :2], fields[1, 2, 4:, 8:])
    assert (corner[3] == corner[2]).all() and (corner[:, 2:] == corner[:, 1:2]).all()
    assert torch.equal(fields_of(patches, small(n_lat=7, n_lon=10, patch_size=4)), fields)
    assert patches_of(fields, 4, beyond=torch.nan).isnan().sum() == 2 * 3 * (8 * 12 - 7 * 10)
