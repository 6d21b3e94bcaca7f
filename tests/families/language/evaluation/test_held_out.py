"""Held-out loss against the definition, computed token by token."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.errors import DataError
from phalanx.families.language.data.token_source import Int64Array, TokenSource
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.held_out import HeldOut, evaluate_split, sample_count, spread_samples
from small_models import LLAMA, random_decoder, random_tokens
from token_data import in_files

CPU = torch.device("cpu")
BYTES = torch.arange(97)


class ListSource(TokenSource):
    """A split of given tokens, in documents of eleven tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.path = Path("list")
        self.tokens = len(tokens)
        self.fingerprint = "list"
        self.reads: list[int] = []
        self._stream = in_files([tokens.numpy()])

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        self.reads += starts.tolist()
        return self._stream.read(starts, length)

    def document_of(self, places: Int64Array) -> Int64Array:
        return places // 11

    def verify(self) -> None:
        raise AssertionError


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(LLAMA)


def by_definition(decoder: Decoder, tokens: torch.Tensor, length: int) -> float:
    """Summed loss of every token but the first, each given the tokens before it in its sample."""
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        part = tokens[start : start + length + 1]
        logits = decoder.logits(part[None, :-1])[0]
        total += float(F.cross_entropy(logits, part[1:], reduction="sum"))
    return total


@pytest.mark.parametrize("count", [2, 33, 64, 65, 66, 100, 321])
@pytest.mark.parametrize("microbatch", [1, 3, None])
def test_every_token_but_the_first_is_scored_once(decoder: Decoder, count: int, microbatch: int | None) -> None:
    tokens = random_tokens(count)
    scores = evaluate_split(
        decoder, ListSource(tokens), sequence_length=32, device=CPU, microbatch=microbatch, byte_counts=BYTES
    )
    assert scores.tokens == count - 1
    assert scores.nats == pytest.approx(by_definition(decoder, tokens, 32), rel=1e-5)
    assert scores.bytes == int(tokens[1:].sum())
    assert scores.loss == scores.nats / scores.tokens
    assert scores.perplexity == pytest.approx(math.exp(scores.loss))
    assert scores.bits_per_byte == pytest.approx(scores.nats / math.log(2) / int(tokens[1:].sum()))


def test_a_split_shorter_than_a_batch_leaves_samples_to_every_rank(decoder: Decoder) -> None:
    tokens = random_tokens(100)
    read = []
    for rank in range(2):
        source = ListSource(tokens)
        evaluate_split(decoder, source, sequence_length=32, device=CPU, rank=rank, ranks=2)
        read.append(source.reads)
    assert read == [[0, 32], [64, 96]]


def test_documents_keep_to_themselves_when_asked(decoder: Decoder) -> None:
    tokens = random_tokens(100)
    plain = evaluate_split(decoder, ListSource(tokens), sequence_length=32, device=CPU)
    masked = evaluate_split(decoder, ListSource(tokens), sequence_length=32, device=CPU, document_mask=True)
    expected = 0.0
    for start in range(0, 99, 32):
        end = min(start + 32, 99)
        cuts = sorted({start, end, *(place for place in range(start, end) if place % 11 == 0)})
        for a, b in pairwise(cuts):
            logits = decoder.logits(tokens[None, a:b])[0]
            expected += float(F.cross_entropy(logits, tokens[a + 1 : b + 1], reduction="sum"))
    assert masked.nats == pytest.approx(expected, rel=1e-5)
    assert abs(masked.nats - plain.nats) > 1.0


def test_dropout_and_z_loss_stay_out_and_training_mode_comes_back(decoder: Decoder) -> None:
    tokens = random_tokens(100)
    plain = evaluate_split(decoder, ListSource(tokens), sequence_length=32, device=CPU)
    other = random_decoder(LLAMA.model_copy(update={"dropout": 0.5})).train()
    other.head.z_loss = 1.0
    assert evaluate_split(other, ListSource(tokens), sequence_length=32, device=CPU) == plain
    assert other.training
    assert not any(parameter.grad is not None for parameter in other.parameters())


def test_a_few_samples_are_spread_and_always_the_same() -> None:
    sources = [
        ListSource(random_tokens(32 * 30 + 1)),
        ListSource(random_tokens(32 * 9 + 5)),
        ListSource(random_tokens(1)),
    ]
    assert [sample_count(source, 32) for source in sources] == [30, 10, 0]
    assert spread_samples(sources, 32, None) == [list(range(30)), list(range(10)), []]
    assert spread_samples(sources, 32, 1000) == spread_samples(sources, 32, None)
    assert spread_samples(sources, 32, 8) == [[0, 5, 10, 15, 20, 25], [0, 5], []]


def test_chosen_samples_are_those_scored(decoder: Decoder) -> None:
    tokens = random_tokens(200)
    source = ListSource(tokens)
    seen: list[int] = []
    some = evaluate_split(
        decoder, source, sequence_length=32, device=CPU, numbers=[1, 6], microbatch=1, progress=seen.append
    )
    assert source.reads == [32, 192]
    assert seen == [1, 1]
    assert some.tokens == 32 + 7
    assert some.nats == pytest.approx(
        by_definition(decoder, tokens[32:65], 32) + by_definition(decoder, tokens[192:], 32), rel=1e-5
    )
    assert evaluate_split(decoder, source, sequence_length=32, device=CPU, numbers=[]).tokens == 0


def test_ranks_share_the_work_and_run_equally_often(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven samples for three ranks: all get three calls, and their sums make the whole."""
    tokens = random_tokens(32 * 7 + 1)
    alone = evaluate_split(decoder, ListSource(tokens), sequence_length=32, device=CPU, byte_counts=BYTES)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    calls = 0
    forward = decoder.forward

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder, "forward", counted)
    parts = []
    for rank in range(3):
        calls = 0
        options = {"microbatch": 1, "byte_counts": BYTES, "rank": rank, "ranks": 3}
        parts.append(evaluate_split(decoder, ListSource(tokens), sequence_length=32, device=CPU, **options))
        assert calls == 3
    together = sum(parts[1:], start=parts[0])
    assert [part.tokens for part in parts] == [96, 64, 64]
    assert (together.tokens, together.bytes) == (alone.tokens, alone.bytes)
    assert together.nats == pytest.approx(alone.nats, rel=1e-6)


def test_scores_add_up_and_read_well() -> None:
    one, two = HeldOut(30.0, 10, 40), HeldOut(60.0, 20, 80)
    assert one + two == HeldOut(90.0, 30, 120)
    assert (one + HeldOut(1.0, 1, None)).bits_per_byte is None
    assert str(one) == "held-out loss 3.0000 (perplexity 20.09, 1.0820 bits/byte, 10 tokens)"
    assert str(HeldOut(30.0, 10, None)) == "held-out loss 3.0000 (perplexity 20.09, 10 tokens)"
    assert math.isnan(HeldOut(0.0, 0, None).loss)
    assert HeldOut(1e6, 10, None).perplexity == math.inf
    assert one.as_dict() == {
        "loss": 3.0,
        "perplexity": math.exp(3.0),
        "bits_per_byte": 30 / math.log(2) / 40,
        "tokens": 10,
        "bytes": 40,
    }


def test_tokens_without_a_row_are_refused(decoder: Decoder) -> None:
    tokens = random_tokens(100)
    tokens[99] = 97
    source = ListSource(tokens)
    message = "list has tokens up to 97, but the model has 97 rows: it was prepared with another tokenizer"
    with pytest.raises(DataError, match=message):
        evaluate_split(decoder, source, sequence_length=32, device=CPU)
    source = ListSource(random_tokens(100))
    source.vocab_size = 98
    with pytest.raises(DataError, match=message):
        evaluate_split(decoder, source, sequence_length=32, device=CPU)
    assert source.reads == []
