"""Both attention kernels against each other, and documents in one sample against documents run by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from phalanx.config.model import LanguageModel
from phalanx.nn.attention import AttentionKernel, attend, attention_context
from phalanx.nn.cross_entropy import IGNORED
from phalanx.torch_compat import common as compat
from small_models import FAMILIES, LLAMA, MPT, random_decoder, random_tokens

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 20 + [2] * 13, [0] * 39 + [1]])


def mixed_values(
    model: LanguageModel, kernel: AttentionKernel, documents: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Attention over random queries, keys and values of 40 positions: the result."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, 40, model.head_size) for heads in (model.n_heads, model.kv_heads, model.kv_heads)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    context = attention_context(
        model.layer(0).attention, torch.arange(40), dtype, kernel=kernel, document_ids_BS=documents
    )
    return attend(*inputs, context)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_gives_the_numbers_of_sdpa(family: str, documents: torch.Tensor | None) -> None:
    model = FAMILIES[family]
    sdpa = mixed_values(model, "sdpa", documents, torch.float32)
    flex = mixed_values(model, "flex", documents, torch.float32)
    torch.testing.assert_close(flex, sdpa, rtol=1e-5, atol=1e-5)


def test_only_plain_causal_masks_run_without_the_guard_for_masked_rows() -> None:
    """On a GPU, unguarded document masks give NaN: a query meets blocks of keys that it may not see at all."""
    positions = torch.arange(40)
    assert attention_context(MPT.layer(0).attention, positions, torch.float32, kernel="flex").rows_safe
    packed = attention_context(
        MPT.layer(0).attention, positions, torch.float32, kernel="flex", document_ids_BS=DOCUMENTS
    )
    assert not packed.rows_safe


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_keys_give_the_numbers_of_shared_ones(dtype: torch.dtype, documents: torch.Tensor | None) -> None:
    assert LLAMA.kv_heads < LLAMA.n_heads
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, 40, LLAMA.head_size) for heads in (LLAMA.n_heads, LLAMA.kv_heads, LLAMA.kv_heads)]
    inputs = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator, dtype=dtype)
    found = {}
    kernels: tuple[AttentionKernel, ...] = ("sdpa", "efficient")
    for kernel in kernels:
        context = attention_context(
            LLAMA.layer(0).attention, torch.arange(40), dtype, kernel=kernel, document_ids_BS=documents
        )
        assert context.repeated == (kernel == "efficient")
        out = attend(*inputs, context)
        found[kernel] = (out, *torch.autograd.grad(out, inputs, grad))
    bound = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found["efficient"], found["sdpa"], rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "documents", "rocm", "repeated"),
    [
        (torch.bfloat16, None, False, False),
        (torch.bfloat16, DOCUMENTS, False, False),
        (torch.bfloat16, DOCUMENTS, True, True),
        (torch.float32, None, False, True),
        (torch.float32, None, True, True),
        (torch.float32, DOCUMENTS, False, True),
    ],
)
def test_accelerators_get_keys_for_every_head_where_no_fused_kernel_shares_them(
    dtype: torch.dtype, documents: torch.Tensor | None, rocm: bool, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "is_rocm", lambda: rocm)
    context = attention_context(LLAMA.layer(0).attention, torch.arange(40), dtype, document_ids_BS=documents)
    query, key = (
        torch.empty(2, heads, 40, LLAMA.head_size, dtype=dtype, device="meta")
        for heads in (LLAMA.n_heads, LLAMA.kv_heads)
    )
    given: list[tuple[int, bool]] = []

    def sdpa(_query: torch.Tensor, key: torch.Tensor, *_: Any, enable_gqa: bool, **__: Any) -> torch.Tensor:
        given.append((key.shape[1], enable_gqa))
        return key

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    attend(query, key, key, context)
    assert given == [(LLAMA.n_heads, False) if repeated else (LLAMA.kv_heads, True)]


def test_alibi_bias_is_slope_times_distance() -> None:
    context = attention_context(MPT.layer(0).attention, torch.arange(5), torch.float64)
    assert context.bias is not None
    slope = 2.0 ** -(8 * 2 / 8)  # head 0 of 6 takes the second slope of 8
    expected = torch.tensor([-3 * slope, -2 * slope, -slope, 0.0, -torch.inf], dtype=torch.float64)
    torch.testing.assert_close(context.bias[0, 0, 3], expected)


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_documents_packed_in_a_sample_do_not_see_each_other(family: str, kernel: AttentionKernel) -> None:
    """With relative positions, a packed document has the loss it has by itself."""
    decoder = random_decoder(FAMILIES[family])
    decoder.kernel = kernel
    tokens, targets = random_tokens(1, 40), random_tokens(1, 40, seed=2)
    apart = torch.zeros(())
    for part in (slice(0, 7), slice(7, 27), slice(27, 40)):
        apart = apart + decoder(tokens[:, part], targets[:, part]).total
    packed = decoder(tokens, targets, document_ids_BS=DOCUMENTS[:1]).total
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-4)
    together = decoder(tokens, targets).total
    assert abs(together - packed) > 1e-2, "without the mask documents do see each other"


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_do_not_change_earlier_logits(family: str) -> None:
    decoder = random_decoder(FAMILIES[family])
    tokens = random_tokens(1, 30)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 97
    before, after = decoder.logits(tokens), decoder.logits(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_caches_equal_those_of_the_whole_sequence(family: str) -> None:
    decoder = random_decoder(FAMILIES[family])
    tokens = random_tokens(3, 24)
    whole = decoder.logits(tokens)
    caches = decoder.new_caches()
    pieces = [decoder.logits(tokens[:, a:b], caches) for a, b in ((0, 9), (9, 10), (10, 15), (15, 16), (16, 24))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
    last = decoder.logits(tokens, last_only=True)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-5, atol=1e-5)


def test_queries_and_keys_are_normalised_a_head() -> None:
    model = LLAMA.model_copy(update={"qk_norm": True})
    attention = random_decoder(model).blocks[0].attention
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    query, key, value = attention._project(x)
    attention.query_norm = attention.key_norm = None
    plain_query, plain_key, plain_value = attention._project(x)
    attention = random_decoder(model).blocks[0].attention
    for ours, plain, norm in ((query, plain_query, attention.query_norm), (key, plain_key, attention.key_norm)):
        scale = (plain.square().mean(-1, keepdim=True) + model.norm_eps).rsqrt()
        torch.testing.assert_close(ours, plain * scale * norm.weight)
    assert torch.equal(value, plain_value)


def test_clipping_clamps_queries_keys_and_values() -> None:
    model = LLAMA.model_copy(update={"clip_qkv": 0.3})
    attention = random_decoder(model).blocks[0].attention
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    clipped = attention._project(x)
    attention.clip = None
    for ours, plain in zip(clipped, attention._project(x), strict=True):
        assert plain.abs().max() > 0.3
        assert torch.equal(ours, plain.clamp(-0.3, 0.3))


@pytest.mark.parametrize("samples_length", [(2, 16), (1, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("clip", [None, 6.0])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_get_rows_that_begin_at_multiples_of_16_bytes(
    family: str, qk_norm: bool, clip: float | None, samples_length: tuple[int, int]
) -> None:
    """The memory-efficient kernel refuses other strides of float32, also those of dims of one element."""
    model = FAMILIES[family].model_copy(update={"qk_norm": qk_norm, "clip_qkv": clip})
    attention = random_decoder(model).blocks[0].attention
    seen: list[torch.Tensor] = []

    def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: Any) -> torch.Tensor:
        seen.extend((query, key, value))
        return attend(query, key, value, context)

    attention.attend = core
    samples, length = samples_length
    context = attention_context(model.layer(0).attention, torch.arange(length), torch.float32)
    attention(torch.ones(samples, length, model.d_model), context).sum().backward()
    assert len(seen) == 3
    for x in seen:
        assert x.stride(-1) == 1
        assert all(stride % 4 == 0 for stride in (*x.stride()[:-1], x.storage_offset())), x.stride()


def test_padding_targets_and_chunks_leave_the_loss_alone() -> None:
    decoder = random_decoder(LLAMA)
    tokens, targets = random_tokens(2, 20), random_tokens(2, 20, seed=2)
    short = decoder(tokens[:, :13], targets[:, :13])
    targets[:, 13:] = IGNORED
    padded = decoder(tokens, targets)
    assert padded.count == short.count == 26
    torch.testing.assert_close(padded.total, short.total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_query_meets_no_kernel_that_checks_its_strides(family: str) -> None:
    """The memory-efficient kernel refuses what the compiler makes of one query: products of matrices take any strides."""
    model = FAMILIES[family]
    generator = torch.Generator().manual_seed(5)
    heads = (model.n_heads, model.kv_heads, model.kv_heads)
    query, key, value = (
        torch.randn(2, number, length, model.head_size, generator=generator, dtype=torch.float64)
        for number, length in zip(heads, (1, 40, 40), strict=True)
    )
    found = {}
    for kernel in ("sdpa", "efficient"):
        context = attention_context(model.layer(0).attention, torch.tensor([39]), torch.float64, kernel=kernel, past=39)
        graphs: list[str] = []

        def keep(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor], graphs: list[str] = graphs) -> Any:
            graphs.append(str(graph.graph))
            return graph

        compiled = torch.compile(attend, backend=keep, fullgraph=True, dynamic=False)
        found[kernel] = compiled(query, key, value, context)
        assert ("scaled_dot_product_attention" in graphs[0]) == (kernel == "sdpa")
    torch.testing.assert_close(found["efficient"], found["sdpa"], rtol=1e-12, atol=1e-12)
