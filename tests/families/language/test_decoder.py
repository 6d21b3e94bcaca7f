"""The decoder as a whole: sizes, formats, and the loss against its own logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.families.language.decoder import Decoder
from phalanx.nn.declared_layers import gate_block
from small_models import FAMILIES, LLAMA, random_decoder, random_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_the_cross_entropy_of_the_logits(family: str) -> None:
    decoder = random_decoder(FAMILIES[family], dtype=torch.float64)
    tokens, targets = random_tokens(2, 30), random_tokens(2, 30, seed=2)
    result = decoder(tokens, targets)
    logits = decoder.logits(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(result.total.detach(), expected, rtol=1e-12, atol=0)
    assert result.count == 60


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_finite_differences(family: str) -> None:
    decoder = random_decoder(FAMILIES[family].model_copy(update={"n_layers": 1}), dtype=torch.float64)
    tokens, targets = random_tokens(1, 12), random_tokens(1, 12, seed=2)
    decoder(tokens, targets).total.backward()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in decoder.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-6
        with torch.no_grad():
            ahead = decoder_loss_at(decoder, parameter, direction * step, tokens, targets)
            behind = decoder_loss_at(decoder, parameter, -direction * step, tokens, targets)
        assert parameter.grad is not None
        slope = float((parameter.grad * direction).sum())
        assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-5), name


def decoder_loss_at(
    decoder: Decoder, parameter: torch.Tensor, shift: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor
) -> float:
    kept = parameter.clone()
    parameter.add_(shift)
    loss = float(decoder(tokens, targets).total)
    parameter.copy_(kept)
    return loss


@pytest.mark.parametrize("family", [name for name, model in FAMILIES.items() if model.positions != "learned"])
def test_parts_of_a_sample_are_samples_of_their_own(family: str) -> None:
    decoder = random_decoder(FAMILIES[family], dtype=torch.float64)
    tokens, targets = random_tokens(2, 24), random_tokens(2, 24, seed=2)
    parts = (torch.arange(24) // 8).expand(2, 24)
    found = decoder(tokens, targets, document_ids_BS=parts).total
    alone = decoder(tokens.reshape(6, 8), targets.reshape(6, 8)).total
    # Rotary angles are float32: those of later positions are rounded otherwise.
    torch.testing.assert_close(found, alone, rtol=1e-7, atol=0)


def test_z_loss_is_added_in_training_only() -> None:
    decoder = random_decoder(LLAMA)
    tokens, targets = random_tokens(2, 30), random_tokens(2, 30, seed=2)
    plain = decoder(tokens, targets).total
    decoder.head.z_loss = 0.01
    z = torch.logsumexp(decoder.logits(tokens), dim=-1)
    torch.testing.assert_close(decoder(tokens, targets).total, plain + 0.01 * z.square().sum(), rtol=1e-5, atol=0)
    decoder.eval()
    assert torch.equal(decoder(tokens, targets).total, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_activations_stay_close_to_float32(family: str) -> None:
    tokens = random_tokens(2, 30)
    full = random_decoder(FAMILIES[family]).logits(tokens)
    half = random_decoder(FAMILIES[family], dtype=torch.bfloat16).logits(tokens)
    assert half.dtype == torch.bfloat16
    error = (half.float() - full).square().mean().sqrt() / full.square().mean().sqrt()
    assert error < 0.03


@pytest.mark.parametrize("d_ff", [1, 7, 32, 33, 65, 96, 130, 896, 5461, 14336, 53248])
def test_groups_of_gate_and_up_rows_fill_the_matrix(d_ff: int) -> None:
    assert d_ff % gate_block(d_ff) == 0
    assert gate_block(14336) == 64


@pytest.mark.parametrize("d_ff", [65, 96])
def test_swiglu_is_silu_of_gate_times_up(d_ff: int) -> None:
    decoder = random_decoder(LLAMA.model_copy(update={"d_ff": d_ff}))
    mlp = decoder.blocks[0].mlp
    groups = mlp.gate_up.weight.unflatten(0, (-1, 2, gate_block(d_ff)))
    gate, up = groups[:, 0].flatten(0, 1), groups[:, 1].flatten(0, 1)
    x = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(0))
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected)
