"""Counter-based numbers: exact values, the accuracy of the normal ones, their statistics, and dropout built on the bits."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from phalanx.counter_random import (
    CounterDropout,
    DropoutContext,
    _square_root,
    _tail_values,
    normal_values,
    random_bits,
    stream_key,
    uniform_values,
)
from phalanx.families.language.decoder import Decoder
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.layout.spec import Recompute
from phalanx.torch_compat.compiler import plain_graph
from small_models import GPT, random_decoder, random_tokens

MILLION = 10**6


# --- exact values ------------------------------------------------------------------------------------------------------


def test_bits_are_those_of_splitmix64() -> None:
    """The published first outputs of seed 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [bits % 2**64 for bits in random_bits(1234567, torch.arange(1, 6)).tolist()] == published


def test_keys_are_fixed_and_tell_their_parts_apart() -> None:
    assert stream_key("initial values", 0, "embedding.weight") == 4206469064587208209
    assert stream_key("initial values", 1, "blocks.0.attention.qkv.weight") == -4622270015865885899
    assert len({stream_key("a", "b"), stream_key("ab"), stream_key("b", "a"), stream_key("a", "b", "")}) == 4


GOLDEN_COUNTERS = [0, 1, 2, 4095, 2**31, 2**33 + 5, 10**12, 2**62]
GOLDEN = {
    (0, "embedding.weight"): "bf2bee24 beb8aec4 3e1595ab bda84fcb be3c5609 bf501d14 3e3eb1fc 3ebfc75c",
    (0, "blocks.0.attention.qkv.weight"): "3dd17b66 bf840a92 3f7edb41 bea7e85f bef1e8b3 bff39722 bf830703 bf08698c",
    (1, "blocks.0.attention.qkv.weight"): "3e156c8b bf824611 bf78cc8a bf3236bf be234578 bf89eb1d 3f3f1412 3eb0f855",
    (0, "blocks.31.mlp.down.weight"): "bf8c8a02 bef8ccc0 bdd4f982 bec45b7b 3e5ae798 3e266a69 3c65aca0 bf5e87cc",
    (2**40, "head.weight"): "be62e7ad 3d815748 bfdc47b5 4005648d 3f00d25c bf5eef40 bf25b647 be0b5ec4",
}


@pytest.mark.parametrize(("stream", "expected"), GOLDEN.items(), ids=str)
def test_normal_values_keep_their_bits(stream: tuple[int, str], expected: str) -> None:
    """A change here changes every model anybody has started from a seed."""
    key = stream_key("initial values", *stream)
    assert float32_bits(normal_values(key, torch.tensor(GOLDEN_COUNTERS))) == expected


def float32_bits(values: Tensor) -> str:
    return " ".join(f"{word % 2**32:08x}" for word in values.to(torch.float32).view(torch.int32).tolist())


def test_every_value_of_a_long_stretch_keeps_its_bits() -> None:
    """Central and tail values by the hundred thousand: one checksum of their float64 words and places."""
    words = normal_values(99, torch.arange(200_000)).view(torch.int64)
    assert int((words * torch.arange(1, 400_000, 2)).sum()) == -6344881498365991386


@pytest.mark.parametrize("neighbour", [0, 1, -1])
def test_square_roots_are_correctly_rounded_wherever_they_start(
    neighbour: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's are: C's `sqrt` is, by IEEE 754."""
    x = uniform_values(3, torch.arange(50_000)).mul_(37.0).add_(0.05)
    expected = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=torch.float64)
    start = torch.nextafter(expected, expected + neighbour)
    monkeypatch.setattr(Tensor, "sqrt", lambda _: start)
    assert torch.equal(_square_root(x), expected)


# --- uniform and normal values -----------------------------------------------------------------------------------------


def test_uniform_values_are_the_midpoints_of_equal_intervals() -> None:
    counters = torch.arange(100_000)
    values = uniform_values(5, counters)
    expected = [((bits % 2**64 >> 12) + 0.5) / 2**52 for bits in random_bits(5, counters).tolist()]
    assert values.tolist() == expected
    assert 0.0 < float(values.min()) < 1e-4
    assert 1.0 - 1e-4 < float(values.max()) < 1.0


def test_normal_values_invert_the_normal_distribution() -> None:
    counters = torch.arange(50_000)
    inverse = NormalDist().inv_cdf
    expected = torch.tensor([inverse(p) for p in uniform_values(8, counters).tolist()], dtype=torch.float64)
    torch.testing.assert_close(normal_values(8, counters), expected, rtol=2e-15, atol=2e-16)


@pytest.mark.parametrize("p", [2.0**-53, 1e-15, 1.3887e-11, 1.3888e-11, 1e-9, 1e-4, 0.02425, 0.0749, 0.9251, 0.9999])
def test_the_tail_satisfies_the_distribution_function(p: float) -> None:
    """erfc is the C library's: independent of any rational approximation of the inverse."""
    value = float(_tail_values(torch.tensor([p], dtype=torch.float64)))
    assert value == pytest.approx(NormalDist().inv_cdf(p), rel=5e-15)
    below = 0.5 * math.erfc(-value / math.sqrt(2.0))
    # A relative error e of the value shows as e * value^2 in the probability of its tail.
    assert min(below, 1 - below) == pytest.approx(min(p, 1 - p), rel=1e-12)


def test_tails_mirror_each_other() -> None:
    p = 2.0 ** -torch.arange(4, 53, dtype=torch.float64)
    assert torch.equal(_tail_values(p), -_tail_values(1.0 - p))


def test_moments_and_distance_from_the_normal_distribution() -> None:
    values = normal_values(stream_key("moments"), torch.arange(MILLION))
    assert abs(float(values.mean())) < 4e-3
    assert float(values.var()) == pytest.approx(1.0, abs=6e-3)
    assert abs(float((values**3).mean())) < 1.6e-2
    assert float((values**4).mean()) == pytest.approx(3.0, abs=0.04)
    below = 0.5 * torch.erfc(-values.sort().values / math.sqrt(2.0))
    distance = (below - (torch.arange(MILLION) + 0.5) / MILLION).abs().max()
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand random samples.
    assert float(distance) < 1.95 / math.sqrt(MILLION)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 768, 4096])
def test_neighbours_are_unrelated(lag: int) -> None:
    values = normal_values(stream_key("neighbours"), torch.arange(MILLION // 2))
    assert abs(correlation(values[:-lag], values[lag:])) < 4 / math.sqrt(MILLION // 2)


@pytest.mark.parametrize(
    "other",
    [("initial values", 0, "b"), ("initial values", 1, "a"), ("initial values", -1, "a"), ("other", 0, "a")],
)
def test_streams_are_unrelated(other: tuple[str, int, str]) -> None:
    counters = torch.arange(MILLION // 2)
    first = normal_values(stream_key("initial values", 0, "a"), counters)
    assert abs(correlation(first, normal_values(stream_key(*other), counters))) < 4 / math.sqrt(MILLION // 2)


def test_each_bit_is_fair() -> None:
    bits = random_bits(stream_key("fair"), torch.arange(100_000))
    for place in range(64):
        ones = int(((bits >> place) & 1).sum())
        assert abs(ones - 50_000) < 4.5 * math.sqrt(25_000), place


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


# --- dropout -----------------------------------------------------------------------------------------------------------

SAMPLES, POSITIONS, WIDTH = torch.tensor([7, 1_000_000_007, 3, 4]), torch.arange(96), 128


def context(seed: int = 0, step: int = 5) -> DropoutContext:
    return DropoutContext.of_step(seed, step, SAMPLES, POSITIONS, WIDTH)


def kept(where: DropoutContext, p: float = 0.3, site: int = 0) -> Tensor:
    """Which of [B, S, WIDTH] ones survive."""
    ones = torch.ones(*where.rows_BS.shape, WIDTH)
    return CounterDropout(p, site=site)(ones, where) != 0.0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_are_dropped_with_probability_p_and_the_rest_scaled(p: float) -> None:
    dropped = CounterDropout(p, site=0)(torch.full((4, 96, WIDTH), 2.0), context())
    zeros = int((dropped == 0).sum())
    count = dropped.numel()
    assert abs(zeros - p * count) < 4 * math.sqrt(p * (1 - p) * count)
    torch.testing.assert_close(dropped[dropped != 0], torch.tensor(2.0 / (1 - p)).expand(count - zeros))


def test_rates_are_even_over_samples_positions_and_channels() -> None:
    keep = kept(context(), p=0.5).double()
    for dims in [(1, 2), (0, 2), (0, 1)]:
        rates = keep.mean(dim=dims)
        assert float((rates - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(keep.numel() / rates.numel())


def test_parts_of_batch_and_sequence_drop_what_the_whole_drops() -> None:
    whole = kept(context())
    for samples in (slice(0, 1), slice(1, 4), slice(2, 3)):
        for positions in (slice(0, 96), slice(0, 10), slice(48, 96)):
            part = DropoutContext.of_step(0, 5, SAMPLES[samples], POSITIONS[positions], WIDTH)
            assert torch.equal(kept(part), whole[samples, positions])
    assert torch.equal(kept(DropoutContext.of_step(0, 5, SAMPLES.flip(0), POSITIONS, WIDTH)), whole.flip(0))


def test_steps_seeds_layers_and_sites_drop_independently() -> None:
    places = {"step": kept(context()), "next step": kept(context(step=6)), "other seed": kept(context(seed=1))}
    places |= {f"layer {layer}": kept(context().at_layer(layer)) for layer in (0, 1, 2, 3, 125)}
    places |= {"other site": kept(context(), site=1), "its site": kept(context().at_layer(0), site=1)}
    names = list(places)
    for index, name in enumerate(names):
        for other in names[:index]:
            both = correlation(places[name].double().flatten(), places[other].double().flatten())
            assert abs(both) < 4.5 / math.sqrt(4 * 96 * WIDTH), (name, other)


def test_samples_positions_and_channels_drop_independently() -> None:
    keep = kept(context()).double()
    for dim in range(3):
        first, second = keep.narrow(dim, 0, keep.shape[dim] - 1), keep.narrow(dim, 1, keep.shape[dim] - 1)
        assert abs(correlation(first.flatten(), second.flatten())) < 4.5 / math.sqrt(first.numel())


def test_gradient_is_the_scaled_mask() -> None:
    x = torch.randn(4, 96, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    dropped = CounterDropout(0.3, site=0)(x, context())
    dropped.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, kept(context()) * torch.tensor(1 / 0.7))


def test_identity_without_a_context_or_a_probability() -> None:
    x = torch.randn(4, 96, WIDTH)
    assert CounterDropout(0.3, site=0)(x, None) is x
    assert CounterDropout(0.0, site=0)(x, context()) is x


def test_low_precision_keeps_its_format_and_its_mask() -> None:
    dropped = CounterDropout(0.3, site=0)(torch.ones(4, 96, WIDTH, dtype=torch.bfloat16), context())
    assert dropped.dtype == torch.bfloat16
    assert torch.equal(dropped != 0, kept(context()))


def test_dropped_elements_keep_their_places() -> None:
    """A change here changes every run with dropout: one checksum of which elements of two layers survive."""
    places = torch.arange(1, 2 * SAMPLES.numel() * POSITIONS.numel() * WIDTH, 2)
    sums = [int((kept(context(seed=3).at_layer(layer), site=1).flatten() * places).sum()) for layer in (0, 7)]
    assert sums == [1687234694, 1685282560]


@pytest.mark.parametrize("width", [WIDTH, 100])
def test_compiled_drops_what_eager_drops(width: int) -> None:
    """100 channels are no whole number of vectors: the compiled loop has to end where the eager one does."""
    x = torch.randn(4, 96, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    dropout = CounterDropout(0.3, site=1)
    compiled = torch.compile(dropout, fullgraph=True, dynamic=False)
    for layer in (0, 7):
        where = DropoutContext.of_step(0, 5, SAMPLES, POSITIONS, width).at_layer(layer)
        found, wanted = compiled(x, where), dropout(x, where)
        assert torch.equal(found, wanted)
        assert torch.equal(*(torch.autograd.grad(y, x, torch.ones_like(x))[0] for y in (found, wanted)))


def test_the_compiler_counts_nothing_by_itself() -> None:
    """Inductor computes with what it counts as with positions in memory: in 32 bits on a GPU, unwrapped on a CPU."""
    x = torch.randn(4, 96, WIDTH)
    graph = plain_graph(lambda x, *where: CounterDropout(0.3, site=1)(x, DropoutContext(*where)), (x, *context()))
    called = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert any("mul" in name for name in called)
    assert not [name for name in called if "arange" in name or "iota" in name]


# --- the decoder with dropout ------------------------------------------------------------------------------------------

DROPPING = GPT.model_copy(update={"dropout": 0.2, "n_layers": 4})


def gradients(decoder: Decoder, samples: slice) -> dict[str, Tensor]:
    tokens, targets = random_tokens(4, 24), random_tokens(4, 24, seed=2)
    where = DropoutContext.of_step(0, 9, torch.arange(100, 104)[samples], torch.arange(24), DROPPING.d_model)
    decoder.zero_grad()
    decoder(tokens[samples], targets[samples], dropout=where).total.backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


def test_micro_batches_sum_to_the_gradient_of_the_batch() -> None:
    decoder = random_decoder(DROPPING, dtype=torch.float64)
    whole = gradients(decoder, slice(0, 4))
    parts = gradients(decoder, slice(0, 1)), gradients(decoder, slice(1, 4))
    assert whole.keys() == dict(decoder.named_parameters()).keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_drops_the_same_elements_again(mode: Recompute) -> None:
    plain = gradients(random_decoder(DROPPING), slice(0, 4))
    decoder = random_decoder(DROPPING)
    for block in decoder.blocks:
        recompute_block(block, mode)
    for name, gradient in gradients(decoder, slice(0, 4)).items():
        assert torch.equal(gradient, plain[name]), name
