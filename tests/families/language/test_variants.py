"""Options of today's decoders: caches, masks, compilation, sizes and splits hold for each as for the older ones."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F

from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.sizes import matmul_parameters, parameter_count
from phalanx.nn.attention import AttentionKernel
from phalanx.nn.layers import Linear, Norm
from small_models import VARIANTS, random_decoder, random_tokens

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 20 + [2] * 13])
variants = pytest.mark.parametrize("name", VARIANTS)


@variants
def test_logits_from_caches_equal_those_of_the_whole_sequence(name: str) -> None:
    decoder = random_decoder(VARIANTS[name], dtype=torch.float64)
    tokens = random_tokens(3, 24)
    whole = decoder.logits(tokens)
    caches = decoder.new_caches()
    pieces = [decoder.logits(tokens[:, a:b], caches) for a, b in ((0, 9), (9, 10), (10, 15), (15, 16), (16, 24))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-10, atol=1e-10)


@variants
def test_one_prompt_goes_on_in_several_ways(name: str) -> None:
    decoder = random_decoder(VARIANTS[name], dtype=torch.float64)
    prompt, ends = random_tokens(1, 11), random_tokens(2, 5, seed=4)
    caches = decoder.new_caches()
    decoder.logits(prompt, caches)
    for cache in caches:
        cache.repeat(2)
    found = decoder.logits(ends, caches)
    whole = decoder.logits(torch.cat((prompt.expand(2, -1), ends), dim=1))
    torch.testing.assert_close(found, whole[:, 11:], rtol=1e-10, atol=1e-10)


@variants
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    decoder = random_decoder(VARIANTS[name], dtype=torch.float64)
    tokens = random_tokens(1, 30)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 97
    before, after = decoder.logits(tokens), decoder.logits(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@variants
def test_documents_packed_in_a_sample_do_not_see_each_other(name: str, kernel: AttentionKernel) -> None:
    decoder = random_decoder(VARIANTS[name])
    decoder.kernel = kernel
    tokens, targets = random_tokens(1, 40), random_tokens(1, 40, seed=2)
    apart = torch.zeros(())
    for part in (slice(0, 7), slice(7, 27), slice(27, 40)):
        apart = apart + decoder(tokens[:, part], targets[:, part]).total
    packed = decoder(tokens, targets, document_ids_BS=DOCUMENTS).total
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-4)
    assert abs(decoder(tokens, targets).total - packed) > 1e-2, "without the mask documents do see each other"


@variants
def test_loss_and_gradients_are_those_of_the_logits(name: str) -> None:
    """The head forms its gradients by hand, chunk by chunk; autograd's go through the logits."""
    decoder = random_decoder(VARIANTS[name], dtype=torch.float64)
    tokens, targets = random_tokens(2, 30), random_tokens(2, 30, seed=2)
    found = decoder(tokens, targets).total
    by_hand = torch.autograd.grad(found, list(decoder.parameters()))
    with torch.enable_grad():
        logits = Decoder.logits.__wrapped__(decoder, tokens)  # type: ignore[attr-defined]
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        by_autograd = torch.autograd.grad(expected, list(decoder.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(by_hand, by_autograd, rtol=1e-9, atol=1e-9)
    for (parameter, _), grad in zip(decoder.named_parameters(), by_hand, strict=True):
        assert grad.abs().max() > 0, parameter


@variants
def test_a_block_compiles_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    decoder = random_decoder(VARIANTS[name])
    tokens, targets = random_tokens(1, 40), random_tokens(1, 40, seed=2)
    plain = decoder(tokens, targets, document_ids_BS=DOCUMENTS).total
    expected = torch.autograd.grad(plain, list(decoder.parameters()))
    for block in decoder.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled = decoder(tokens, targets, document_ids_BS=DOCUMENTS).total
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-5)
    found = torch.autograd.grad(compiled, list(decoder.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@variants
def test_sizes_are_those_of_the_module(name: str) -> None:
    model = VARIANTS[name]
    with torch.device("meta"):
        decoder = Decoder(model)
    assert sum(p.numel() for p in decoder.parameters()) == parameter_count(model)
    in_blocks = sum(m.weight.numel() for m in decoder.blocks.modules() if isinstance(m, Linear))
    assert matmul_parameters(model) == in_blocks + 97 * 48


@variants
def test_kinds_and_splits_are_those_of_the_modules(name: str) -> None:
    """Every matrix of a block is split but those that every rank computes its own positions with."""
    declared = DeclaredLanguage(VARIANTS[name], 1)
    with torch.device("meta"):
        decoder = Decoder(VARIANTS[name])
    splits = declared.splits()
    for path, module in decoder.named_modules():
        for parameter, value in module.named_parameters(path, recurse=False):
            kind = declared.parameter_kind(parameter)
            if parameter.endswith("sinks.weight"):
                assert kind == "bias"
            elif isinstance(module, Norm):
                assert kind == ("bias" if value is module.bias else "norm")
            elif isinstance(module, Linear):
                assert kind == ("bias" if value is module.bias else "matrix")
        if isinstance(module, Linear):
            split = any(fnmatchcase(path, pattern) for pattern, _ in splits)
            assert split != path.endswith(("query_down", "key_value_down")), path
    assert len(splits) == len(set(splits)), "kinds of layers share their modules"
