from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.check import BatchSizes
from phalanx.errors import DataError
from phalanx.families.language.data.token_batches import SampleReader, TokenBatch, TokenBatchStream
from phalanx.families.language.data.token_source import Int64Array, TokenSource
from token_data import in_files


class CountingSource(TokenSource):
    """Tokens 0, 1, 2, ...: a token says where it was read. Documents of ten tokens."""

    def __init__(self, name: str, tokens: int, *, vocab_size: int | None = None, first: int = 0) -> None:
        self.path = Path(name)
        self.tokens = tokens
        self.fingerprint = f"{name} {tokens}"
        self.vocab_size = vocab_size
        self.reads = 0
        half = tokens // 2
        values = np.arange(first, first + tokens, dtype=np.uint32)
        self._stream = in_files([values[:half], values[half:]])

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        self.reads += len(starts)
        return self._stream.read(starts, length)

    def document_of(self, places: Int64Array) -> Int64Array:
        return places // 10

    def verify(self) -> None:
        raise DataError(f"{self.path}: nothing to verify")


def reader(
    *sizes: int, weights: tuple[float, ...] = (), length: int = 8, seed: int = 3, documents: bool = False
) -> SampleReader:
    sources = [CountingSource(f"source-{i}", size) for i, size in enumerate(sizes)]
    return SampleReader(
        list(zip(sources, weights or [1.0] * len(sizes), strict=True)),
        sequence_length=length,
        seed=seed,
        documents=documents,
    )


def global_batches(source: SampleReader, *, ranks: int, steps: int, batch: int = 12) -> list[list[list[int]]]:
    """Tokens of every sample of each global batch, put together from all ranks."""
    streams = [TokenBatchStream(source, global_batch=batch, rank=r, ranks=ranks, prefetch=0) for r in range(ranks)]
    return [[row for stream in streams for row in stream.next().tokens.tolist()] for _ in range(steps)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_every_number_of_ranks_reads_the_same_global_batches(ranks: int) -> None:
    source = reader(1000, 333, weights=(0.7, 0.3))
    assert global_batches(source, ranks=ranks, steps=5) == global_batches(source, ranks=1, steps=5)


def test_targets_are_the_next_tokens_also_across_shards_and_sample_ends() -> None:
    batch = TokenBatchStream(reader(1000), global_batch=100, prefetch=0).next()
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_an_epoch_reads_every_sample_once() -> None:
    source = reader(8 * 50 + 1)
    first_tokens = source.read(np.arange(50)).tokens[:, 0].tolist()
    assert sorted(first_tokens) == [8 * i for i in range(50)]
    assert first_tokens != sorted(first_tokens)
    second = source.read(np.arange(50, 100)).tokens[:, 0].tolist()
    assert sorted(second) == sorted(first_tokens)
    assert second != first_tokens


def test_weights_hold_exactly_over_a_period() -> None:
    source = reader(10_000, 10_000, weights=(0.75, 0.25))
    origin, _ = source.locate(np.arange(400))
    assert [int((origin == i).sum()) for i in range(2)] == [300, 100]


@settings(max_examples=30, deadline=None)
@given(step=st.integers(1, 10**12), batch=st.integers(1, 64), seed=st.integers(0, 2**63 - 1))
def test_a_batch_is_a_pure_function_of_its_step(step: int, batch: int, seed: int) -> None:
    ahead = TokenBatchStream(reader(5000, seed=seed), global_batch=batch, prefetch=2)
    ahead.seek(step - 1)
    try:
        assert torch.equal(
            ahead.next().tokens, TokenBatchStream(reader(5000, seed=seed), global_batch=batch).batch(step).tokens
        )
    finally:
        ahead.close()


def test_resuming_far_into_a_run_reads_only_what_it_needs() -> None:
    source = CountingSource("large", 10**6)
    stream = TokenBatchStream(SampleReader([(source, 1.0)], sequence_length=8, seed=0), global_batch=4, prefetch=0)
    stream.seek(10**9 // 4)
    numbers = stream.next().sample_indices.tolist()
    assert numbers == [10**9, 10**9 + 1, 10**9 + 2, 10**9 + 3]
    assert source.reads == 4


def test_another_seed_gives_another_order() -> None:
    assert global_batches(reader(1000, seed=1), ranks=1, steps=1) != global_batches(
        reader(1000, seed=2), ranks=1, steps=1
    )


def test_document_ids_count_from_zero_in_every_sample() -> None:
    batch = reader(1000, length=32, documents=True).read(np.arange(10))
    assert batch.document_ids is not None
    expected = batch.tokens // 10 - batch.tokens[:, :1] // 10
    assert torch.equal(batch.document_ids.long(), expected)


def test_without_document_mask_there_are_no_document_ids() -> None:
    assert reader(1000).read(np.arange(2)).document_ids is None


def test_splitting_a_batch_keeps_everything_in_order() -> None:
    batch = reader(1000, documents=True).read(np.arange(6))
    parts = list(batch.split(3))
    assert [len(part.tokens) for part in parts] == [2, 2, 2]
    for name in ("tokens", "targets", "document_ids", "sample_indices"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))


def test_the_fingerprint_changes_with_anything_that_changes_the_samples() -> None:
    base = reader(1000, 500, weights=(1, 1)).fingerprint
    assert base == reader(1000, 500, weights=(2, 2)).fingerprint
    others = [
        reader(1000, 500, weights=(1, 2)),
        reader(1000, 501),
        reader(1000, 500, seed=4),
        reader(1000, 500, length=16),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 5


def test_a_source_too_short_for_a_sample_is_refused() -> None:
    with pytest.raises(DataError, match=r"source-0 holds 8 tokens, too few for one sample of data.sequence_length=8"):
        reader(8)


def test_a_tokenizer_larger_than_the_model_is_refused_at_once() -> None:
    source = CountingSource("corpus", 1000, vocab_size=50_000)
    samples = SampleReader([(source, 1.0)], sequence_length=8, seed=0)
    with pytest.raises(DataError, match=r"corpus: its tokenizer has 50000 tokens, model.vocab_size=32000; raise"):
        samples.require_vocabulary(32_000)


def test_an_id_that_the_tokenizer_does_not_have_is_told_from_altered_data() -> None:
    samples = SampleReader([(CountingSource("corpus", 100, vocab_size=90), 1.0)], sequence_length=8, seed=0)
    samples.require_vocabulary(90)
    with pytest.raises(DataError, match=r"sample 11 holds token id 90, outside .*=90; the data are altered"):
        samples.read(np.arange(12))


def test_where_the_format_says_nothing_a_token_outside_the_vocabulary_names_its_sample() -> None:
    samples = SampleReader([(CountingSource("corpus", 100), 1.0)], sequence_length=8, seed=0)
    samples.require_vocabulary(90)
    with pytest.raises(DataError, match=r"corpus: sample 11 holds token id 90, outside model.vocab_size=90"):
        samples.read(np.arange(12))


def test_an_error_while_reading_ahead_reaches_the_training_loop() -> None:
    samples = SampleReader([(CountingSource("corpus", 100), 1.0)], sequence_length=8, seed=0)
    samples.require_vocabulary(50)
    stream = TokenBatchStream(samples, global_batch=12, prefetch=2)
    for _ in range(2):  # the second time there is no thread left to wait for
        with pytest.raises(DataError, match="corpus: sample"):
            stream.next()
    stream.close()


def test_closing_while_the_reader_is_ahead_does_not_hang() -> None:
    stream = TokenBatchStream(reader(1000), global_batch=2, prefetch=3)
    stream.next()
    stream.close()
    stream.seek(0)
    assert torch.equal(stream.next().tokens, stream.batch(1).tokens)
    stream.close()


SIZES = BatchSizes(12, ((2, 4), (3, 8)))
CHANGES = ((10, (0.0, 1.0)), (40, (0.5, 0.5)))


def changing() -> SampleReader:
    sources = [(CountingSource("a", 1000), 1.0), (CountingSource("b", 1000, first=5000), 0.0)]
    return SampleReader(sources, sequence_length=8, seed=3, changes=CHANGES)


@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_that_grow_and_mixtures_that_change_are_the_same_on_any_number_of_ranks_and_from_any_step(
    ranks: int,
) -> None:
    def batches(rank: int, of: int, after: int = 0) -> list[TokenBatch]:
        stream = TokenBatchStream(changing(), global_batch=SIZES, rank=rank, ranks=of, prefetch=0)
        stream.seek(after)
        return [stream.next() for _ in range(8 - after)]

    whole = batches(0, 1)
    assert [len(batch.tokens) for batch in whole] == [4, 4, 8, 8, 8, 12, 12, 12]
    # No sample is left out or read twice.
    assert torch.cat([batch.sample_indices for batch in whole]).tolist() == list(range(68))
    shares = [batches(rank, ranks) for rank in range(ranks)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([share[step].tokens for share in shares]), batch.tokens)
    for after in (1, 4, 6):
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches(0, 1, after), whole[after:], strict=True))
    first = torch.cat([batch.tokens for batch in whole])[:, 0]
    assert (first[:10] < 1000).all() and (first[10:40] >= 5000).all() and 0 < (first[40:] >= 5000).sum() < 28


def test_what_changes_of_batches_and_mixtures_is_part_of_the_fingerprint() -> None:
    plain = SampleReader([(CountingSource("a", 1000), 1.0)], sequence_length=8, seed=3)
    assert (
        TokenBatchStream(plain, global_batch=12).fingerprint
        == TokenBatchStream(plain, global_batch=BatchSizes(12)).fingerprint
    )
    assert (
        TokenBatchStream(plain, global_batch=12).fingerprint != TokenBatchStream(plain, global_batch=SIZES).fingerprint
    )
    other = SampleReader(
        [(CountingSource("a", 1000), 1.0), (CountingSource("b", 1000, first=5000), 0.0)],
        sequence_length=8,
        seed=3,
        changes=CHANGES[:1],
    )
    assert changing().fingerprint != other.fingerprint


@pytest.mark.parametrize("documents", [False, True])
def test_samples_of_a_length_warmup_are_cut_into_parts_by_their_number(documents: bool) -> None:
    # Documents of ten tokens in samples of eight, cut at three and, from the fifth sample on, not at all.
    source = [(CountingSource("a", 1000), 1.0)]
    cut = SampleReader(source, sequence_length=8, seed=3, documents=documents, lengths=((0, 3), (5, 8)))
    whole = SampleReader(source, sequence_length=8, seed=3, documents=documents)
    early, late = cut.read(np.arange(5)), cut.read(np.arange(5, 9))
    assert torch.equal(early.tokens, whole.read(np.arange(5)).tokens)
    assert early.document_ids is not None and early.document_ids.dtype == torch.int32
    parts = torch.arange(8) // 3
    begins = early.tokens // 10 if documents else torch.zeros_like(early.tokens)
    for ids, begin in zip(early.document_ids, begins, strict=True):
        same = (parts[:, None] == parts) & (begin[:, None] == begin)
        assert torch.equal(ids[:, None] == ids, same)
    expected = whole.read(np.arange(5, 9)).document_ids
    assert (late.document_ids is None and expected is None) or torch.equal(late.document_ids, expected)  # type: ignore[arg-type]
    assert cut.fingerprint != whole.fingerprint
    same_as_whole = SampleReader(source, sequence_length=8, seed=3, documents=documents, lengths=((0, 8),))
    assert same_as_whole.fingerprint == whole.fingerprint
