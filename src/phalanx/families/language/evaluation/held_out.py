"""Held-out loss of a model on a split, every token once; the trainer uses it as `phalanx evaluate` does.

A split is one stream of tokens. Samples cut it without overlap, so each token but the first is a target exactly once; the
last sample may be shorter, and is filled up with positions that do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import ConfigError, DataError
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.language.data.token_shards import Split
from phalanx.families.language.data.token_source import TokenSource
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.nn.cross_entropy import IGNORED, LossSum

DEFAULT_LENGTH = 2048
"""Tokens a sample for a model without a run, unless it has fewer positions."""
_BATCH_TOKENS = 16384
"""Tokens computed at a time where the caller does not say how many samples."""
Score = Callable[[TokenBatch], Tensor]
"""Gives this rank's part of the summed loss of a batch (nats, 0-dim)."""


@dataclass(frozen=True)
class Scores:
    """Held-out scores, of each source and of all together."""

    split: Split
    sequence_length: int
    samples: int
    """Samples scored."""
    samples_in_all: int
    """Samples that the split has."""
    sources: dict[str, HeldOut]
    """By path."""
    total: HeldOut


def score_model(
    loaded: LoadedModel,
    *,
    data: Path | None = None,
    split: Split = "validation",
    samples: int | None = None,
    sequence_length: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Score `loaded` on `split` of the prepared folder `data`, or of the run's own data.

    samples: how many samples to score, spread evenly over the split; None scores every token. sequence_length: tokens a
    sample; by default the run's, and 2048 or what the model has for imported weights. rank, ranks: who shares the samples;
    all get the result. progress: called with the samples done and in all.

    Raises ConfigError where there is nothing to score or the length does not fit, DataError for data that is not usable
    or that another tokenizer made.
    """
    length = _sample_length(loaded, sequence_length)
    sources = _open_sources(loaded, data, split)
    chosen = spread_samples(sources, length, samples)
    total = sum(map(len, chosen))
    if total == 0:
        paths = ", ".join(str(source.path) for source in sources)
        raise DataError(
            f"the {split} split of {paths} holds no token to score; prepare more text, or name another split"
        )
    done = 0

    def report(scored: int) -> None:
        nonlocal done
        done += scored
        progress(done, total)

    each = [
        evaluate_split(
            loaded.model,
            source,
            sequence_length=length,
            device=loaded.model.embedding.weight.device,
            numbers=numbers,
            document_mask=loaded.run is not None and loaded.run.data.document_mask,
            byte_counts=_byte_counts(loaded, source),
            rank=rank,
            ranks=ranks,
            progress=report,
        )
        for source, numbers in zip(sources, chosen, strict=True)
    ]
    return Scores(
        split=split,
        sequence_length=length,
        samples=total,
        samples_in_all=sum(sample_count(source, length) for source in sources),
        sources={str(source.path): scores for source, scores in zip(sources, each, strict=True)},
        # Sums of nats and tokens, not means: sources differ in length.
        total=sum(each[1:], start=each[0]),
    )


def _sample_length(loaded: LoadedModel, wanted: int | None) -> int:
    limit = loaded.model.config.max_positions
    usual = min(limit, DEFAULT_LENGTH) if loaded.run is None else loaded.run.data.sequence_length
    length = usual if wanted is None else wanted
    if not 1 <= length <= limit:
        raise ConfigError(f"--length={length} must be from 1 to {limit}, the positions that the model has")
    return length


def _open_sources(loaded: LoadedModel, data: Path | None, split: Split) -> list[TokenSource]:
    if data is not None:
        paths = [data]
    elif loaded.run is not None:
        paths = [token_path(source.path) for source in loaded.run.data.sources]
    else:
        raise ConfigError(f"{loaded.where} names no data; give a folder that `phalanx data prepare` wrote with --data")
    opened = [open_source(path, split) for path in paths]
    found = [source for source in opened if source is not None and source.tokens > 1]
    if not found:
        raise DataError(
            f"{', '.join(map(str, paths))}: the {split} split is empty; prepare more text, or name another split"
        )
    return found


def _byte_counts(loaded: LoadedModel, source: TokenSource) -> torch.Tensor | None:
    """Return bytes of text that each token of `source` stands for; None where neither data nor model has a tokenizer."""
    ours = loaded.tokenizer
    if source.tokenizer is None:
        return None if ours is None else ours.byte_counts(loaded.model.config.vocab_size)
    theirs = TextTokenizer.from_file(source.tokenizer, source.end_of_document)
    if ours is not None and ours.vocabulary != theirs.vocabulary:
        # Ids that mean other text would give a loss that looks like a bad model.
        raise DataError(
            f"{source.path} was prepared with another tokenizer than that of {loaded.where}; prepare the text again with it"
        )
    return theirs.byte_counts(loaded.model.config.vocab_size)


@dataclass(frozen=True)
class HeldOut:
    """Scores of held-out tokens; two of them add up to the scores of both together."""

    nats: float
    """Cross-entropy summed over the targets, in nats."""
    tokens: int
    """Targets."""
    bytes: int | None
    """UTF-8 bytes of the text that the targets stand for; None where no tokenizer says."""

    @property
    def loss(self) -> float:
        """Return mean cross-entropy in nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss) if self.loss < 700.0 else self.loss * math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Return cross-entropy in bits a byte of text, comparable between tokenizers; None where the bytes are not known."""
        return self.nats / math.log(2.0) / self.bytes if self.bytes else None

    def __add__(self, other: HeldOut) -> HeldOut:
        known = self.bytes is not None and other.bytes is not None
        return HeldOut(
            self.nats + other.nats,
            self.tokens + other.tokens,
            (self.bytes or 0) + (other.bytes or 0) if known else None,
        )

    def as_dict(self) -> dict[str, float | int | None]:
        """Return all figures by name."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits/byte"
        return f"held-out loss {self.loss:.4f} (perplexity {self.perplexity:.2f}{bits}, {self.tokens:,} tokens)"


@dataclass(frozen=True)
class Sharing:
    """This rank among those that score a split together."""

    rank: int = 0
    """Which share of the samples this rank scores."""
    shares: int = 1
    counts: bool = True
    """Whether this rank counts the targets of its share: one rank of those that score the same samples does."""


WHOLE = Sharing()
"""One rank that scores everything."""


def evaluate_split(
    model: Decoder,
    source: TokenSource,
    *,
    sequence_length: int,
    device: torch.device,
    numbers: Sequence[int] | None = None,
    microbatch: int | None = None,
    document_mask: bool = False,
    byte_counts: Tensor | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int], None] = lambda samples: None,
) -> HeldOut:
    """Score a whole model on the split `source`, dropout off; see `score_split`. rank, ranks: who shares the samples."""

    def score(batch: TokenBatch) -> Tensor:
        loss: LossSum = model(batch.tokens, batch.targets, document_ids_BS=batch.document_ids)
        return loss.total

    # Dropout would make the loss random; what the caller was doing goes on as before.
    was_training = model.training
    model.eval()
    result = score_split(
        score,
        source,
        vocab_size=model.config.vocab_size,
        sequence_length=sequence_length,
        device=device,
        numbers=numbers,
        microbatch=microbatch,
        document_mask=document_mask,
        byte_counts=byte_counts,
        sharing=Sharing(rank, ranks),
        progress=progress,
    )
    model.train(was_training)
    return result


@torch.no_grad()
def score_split(
    score: Score,
    source: TokenSource,
    *,
    vocab_size: int,
    sequence_length: int,
    device: torch.device,
    numbers: Sequence[int] | None = None,
    microbatch: int | None = None,
    document_mask: bool = False,
    byte_counts: Tensor | None = None,
    sharing: Sharing = WHOLE,
    progress: Callable[[int], None] = lambda samples: None,
) -> HeldOut:
    """Score the split `source`.

    sequence_length: tokens a sample. numbers: the samples to score, see `spread_samples`; None scores all. microbatch:
    samples computed at a time. document_mask: whether attention stops at document boundaries. byte_counts: bytes of text
    that each token stands for, int64 [V]. sharing: every rank gets the result and scores as often as the others, so a
    model that needs all ranks may be scored. progress: called with the number of samples just scored.

    Raises DataError for tokens that the model has no row for.
    """
    # Where the format says how many ids there are, before anything is computed; else batch by batch.
    _check_vocabulary(source, source.vocab_size or 0, vocab_size)
    numbers = range(sample_count(source, sequence_length)) if numbers is None else numbers
    # No more samples than there are, or than leave some to every rank: a short split is not filled up to a whole batch.
    size = microbatch or min(max(1, _BATCH_TOKENS // sequence_length), math.ceil(len(numbers) / sharing.shares))
    size = max(1, min(size, len(numbers)))
    batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    bytes_of = None if byte_counts is None else byte_counts.to(device)
    # Kept on the device: reading them each batch would make it wait for the CPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for start in range(0, len(batches), sharing.shares):
        # A rank without a batch of its own scores an empty one: a sharded model needs all ranks.
        mine = batches[start + sharing.rank] if start + sharing.rank < len(batches) else []
        batch, highest = _read_samples(source, mine, sequence_length, size, document_mask)
        _check_vocabulary(source, highest + 1, vocab_size)
        batch = batch.to(device)
        sums[0] += score(batch).double()
        scored = batch.targets[batch.targets != IGNORED]
        if sharing.counts:
            sums[1] += len(scored)
            sums[2] += scored.new_zeros(()) if bytes_of is None else bytes_of[scored].sum()
        progress(sum(map(len, batches[start : start + sharing.shares])))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    nats, count, text_bytes = sums.tolist()
    return HeldOut(nats, int(count), None if byte_counts is None else int(text_bytes))


def sample_count(source: TokenSource, sequence_length: int) -> int:
    """Return how many samples hold every target of a split once, the last one perhaps in part."""
    return max(0, math.ceil((source.tokens - 1) / sequence_length))


def spread_samples(sources: Sequence[TokenSource], sequence_length: int, samples: int | None) -> list[list[int]]:
    """Return for each source the numbers of the samples to score: all, or `samples` in all, spread evenly over the sources.

    Always the same ones, so that scores can be compared.
    """
    ends = np.cumsum([0, *(sample_count(source, sequence_length) for source in sources)])
    total = int(ends[-1])
    count = total if samples is None else min(samples, total)
    # Whole numbers: no rounding decides which samples are scored.
    chosen = np.arange(count, dtype=np.int64) * total // max(1, count)
    return [(chosen[(a <= chosen) & (chosen < b)] - a).tolist() for a, b in pairwise(ends)]


def _read_samples(
    source: TokenSource, numbers: Sequence[int], length: int, size: int, document_mask: bool
) -> tuple[TokenBatch, int]:
    """Read samples as int64 [size, length], whose shape never changes, so nothing recompiles; also return the largest id."""
    tokens_BS = np.zeros((size, length), dtype=np.int64)
    targets_BS = np.full((size, length), IGNORED, dtype=np.int64)
    documents_BS = np.zeros((size, length), dtype=np.int32)
    highest = 0
    for row, number in enumerate(numbers):
        start = number * length
        width = min(length, source.tokens - 1 - start)
        read = source.read(np.array([start]), width + 1)[0]
        tokens_BS[row, :width], targets_BS[row, :width] = read[:-1], read[1:]
        highest = max(highest, int(read.max()))
        # Counted from the sample's first, as in training.
        if document_mask:
            ids = source.document_of(np.arange(start, start + width))
            documents_BS[row, :width] = ids - ids[0]
    kept = torch.from_numpy(documents_BS) if document_mask else None
    indices = torch.zeros(size, dtype=torch.int64)
    return TokenBatch(torch.from_numpy(tokens_BS), torch.from_numpy(targets_BS), kept, indices), highest


def _check_vocabulary(source: TokenSource, tokens: int, rows: int) -> None:
    if tokens > rows:
        raise DataError(
            f"{source.path} has tokens up to {tokens - 1}, but the model has {rows} rows: "
            f"it was prepared with another tokenizer than the model's"
        )
