"""Samples to verify with: a function of their number alone, with uneven targets and documents, and no file behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.config.schema import Run
from phalanx.counter_random import random_bits, stream_key
from phalanx.data.language.batches import TokenBatch
from phalanx.models.language.loss import IGNORED

_LONGEST_DOCUMENT = 16


def samples(run: Run, step: int, first: int, count: int, global_batch: int) -> TokenBatch:
    """Samples `first` to `first + count` of the global batch of `step` (from 1).

    Some targets are left out, more in some samples than in others, so that an average over ranks in place of a sum over
    targets shows.
    """
    length = run.data.sequence_length
    numbers = torch.arange(first, first + count) + (step - 1) * global_batch
    tokens = _draw("tokens", numbers, length + 1) % run.model.vocab_size
    targets = tokens[:, 1:].clone()
    # Between an eighth and a half of a sample's targets, by its number.
    left_out = _draw("left out", numbers, length) % 8 < 1 + numbers[:, None] % 4
    targets[left_out] = IGNORED
    documents = None
    if run.data.document_mask:
        begins = _draw("documents", numbers, length) % _LONGEST_DOCUMENT == 0
        documents = begins.cumsum(1).to(torch.int32)
    return TokenBatch(tokens[:, :-1].contiguous(), targets, documents, numbers)


def _draw(what: str, numbers: Tensor, length: int) -> Tensor:
    """Non-negative random integers [samples, length]."""
    counter = numbers[:, None] * (1 << 32) + torch.arange(length)
    return random_bits(stream_key("verify", what), counter).bitwise_and((1 << 62) - 1)
