"""Held-out loss of a model on a split, every token once. Knows no files; the trainer uses it as `phalanx evaluate` does.

A split is one stream of tokens. Samples cut it without overlap, so each token but the first is a target exactly once; the
last sample may be shorter, and is filled up with positions that do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.language.sources import TokenSource
from phalanx.errors import DataError
from phalanx.models.language.decoder import Decoder
from phalanx.models.language.loss import IGNORED

_BATCH_TOKENS = 16384
"""Tokens computed at a time where the caller does not say how many samples."""


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
        """Mean cross-entropy in nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700.0 else self.loss * math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Cross-entropy in bits a byte of text, comparable between tokenizers; None where the bytes are not known."""
        return self.nats / math.log(2.0) / self.bytes if self.bytes else None

    def __add__(self, other: HeldOut) -> HeldOut:
        known = self.bytes is not None and other.bytes is not None
        return HeldOut(
            self.nats + other.nats,
            self.tokens + other.tokens,
            (self.bytes or 0) + (other.bytes or 0) if known else None,
        )

    def as_dict(self) -> dict[str, float | int | None]:
        """All figures by name."""
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


@torch.no_grad()
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
    """Score `model` on the split `source`, dropout off.

    sequence_length: tokens a sample. numbers: the samples to score, see `spread_samples`; None scores all. microbatch:
    samples computed at a time. document_mask: whether attention stops at document boundaries. byte_counts: bytes of text
    that each token stands for, int64 [V]. rank, ranks: this process among those that share the work; every one of them
    gets the result and runs the model as often as the others, so a sharded model may be given. progress: called with the
    number of samples just scored.

    Raises DataError for tokens that the model has no row for.
    """
    _check_vocabulary(source, source.vocab_size or 0, model.config.vocab_size)
    numbers = range(sample_count(source, sequence_length)) if numbers is None else numbers
    size = min(microbatch or max(1, _BATCH_TOKENS // sequence_length), max(1, len(numbers)))
    batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    bytes_of = None if byte_counts is None else byte_counts.to(device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for start in range(0, len(batches), ranks):
        # A rank without a batch of its own computes an empty one: a sharded model needs all ranks.
        mine = batches[start + rank] if start + rank < len(batches) else []
        batch = _read(source, mine, sequence_length, size, document_mask)
        _check_vocabulary(source, batch.highest + 1, model.config.vocab_size)
        targets = batch.targets.to(device)
        documents = None if batch.documents is None else batch.documents.to(device)
        loss = model(batch.tokens.to(device), targets, document_ids_BS=documents)
        scored = targets[targets != IGNORED]
        text_bytes = scored.new_zeros(()) if bytes_of is None else bytes_of[scored].sum()
        sums += torch.stack((loss.total.double(), loss.count.double(), text_bytes.double()))
        progress(sum(map(len, batches[start : start + ranks])))
    model.train(was_training)
    if ranks > 1:
        dist.all_reduce(sums)
    nats, count, text_bytes = sums.tolist()
    return HeldOut(nats, int(count), None if byte_counts is None else int(text_bytes))


def sample_count(source: TokenSource, sequence_length: int) -> int:
    """Samples that hold every target of a split once, the last one perhaps in part."""
    return max(0, math.ceil((source.tokens - 1) / sequence_length))


def spread_samples(sources: Sequence[TokenSource], sequence_length: int, samples: int | None) -> list[list[int]]:
    """For each source the numbers of the samples to score: all, or `samples` in all, spread evenly over the sources.

    Always the same ones, so that scores can be compared.
    """
    ends = np.cumsum([0, *(sample_count(source, sequence_length) for source in sources)])
    total = int(ends[-1])
    count = total if samples is None else min(samples, total)
    chosen = np.arange(count, dtype=np.int64) * total // max(1, count)
    return [(chosen[(a <= chosen) & (chosen < b)] - a).tolist() for a, b in pairwise(ends)]


class _Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    highest: int
    """Largest token id."""


def _read(source: TokenSource, numbers: Sequence[int], length: int, size: int, document_mask: bool) -> _Batch:
    """Samples as int64 [size, length]: the shape never changes, so nothing recompiles."""
    tokens = np.zeros((size, length), dtype=np.int64)
    targets = np.full((size, length), IGNORED, dtype=np.int64)
    documents = np.zeros((size, length), dtype=np.int32)
    highest = 0
    for row, number in enumerate(numbers):
        start = number * length
        width = min(length, source.tokens - 1 - start)
        read = source.read(np.array([start]), width + 1)[0]
        tokens[row, :width], targets[row, :width] = read[:-1], read[1:]
        highest = max(highest, int(read.max()))
        if document_mask:
            ids = source.document_of(np.arange(start, start + width))
            documents[row, :width] = ids - ids[0]
    kept = torch.from_numpy(documents) if document_mask else None
    return _Batch(torch.from_numpy(tokens), torch.from_numpy(targets), kept, highest)


def _check_vocabulary(source: TokenSource, tokens: int, rows: int) -> None:
    if tokens > rows:
        raise DataError(
            f"{source.path} has tokens up to {tokens - 1}, but the model has {rows} rows: "
            f"it was prepared with another tokenizer than the model's"
        )
