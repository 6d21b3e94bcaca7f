"""The batches of a run: step k reads the same samples whatever the number of ranks, and costs the same for any k.

    global sample number -> (source, place in its reading) -> (epoch, sample) -> tokens

Every arrow is a pure function (see `data.sample_order`); the position of a run is one integer. A background thread reads
ahead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.counter_random import stable_key
from phalanx.data.batch_stream import ReadAheadStream, TensorBatch
from phalanx.data.sample_order import ORDER_VERSION, EpochShuffle, MixtureSchedule
from phalanx.errors import DataError
from phalanx.families.language.data.token_source import Int64Array, TokenSource
from phalanx.nn.cross_entropy import IGNORED


@dataclass(frozen=True)
class TokenBatch(TensorBatch):
    """Samples of one rank."""

    tokens: Tensor
    """int64 [B, S]."""
    targets: Tensor
    """int64 [B, S]: for each token the one after it."""
    document_ids: Tensor | None
    """int32 [B, S], equal within a document or a part of a sample; None where attention is over the whole of it."""
    sample_indices: Tensor
    """int64 [B]: global sample numbers."""

    def target_counts(self) -> Tensor:
        """Return the number of targets that take part in the loss, int64 [1]."""
        return (self.targets != IGNORED).sum()[None]

    def inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the token ids for the first stage; targets and document ids for every stage."""
        named = {"targets_BS": self.targets}
        if self.document_ids is not None:
            named["document_ids_BS"] = self.document_ids
        return self.tokens, named


class SampleReader:
    """Reads samples by global sample number from a weighted mixture of sources."""

    def __init__(
        self,
        sources: Sequence[tuple[TokenSource, float]],
        *,
        sequence_length: int,
        seed: int,
        documents: bool = False,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
        lengths: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Take the sources with their weights. Raises DataError for a source too short for one sample.

        changes: other weights, each with the number of the first sample that is drawn by them. lengths: tokens of the parts
        within which attention stays, each with the number of the first sample that has such parts; without any, and from
        `sequence_length` on, samples are whole.
        """
        self.sources = [source for source, _ in sources]
        self.sequence_length = sequence_length
        self.documents = documents
        for source in self.sources:
            source.require_samples(sequence_length)
        self._mixture = MixtureSchedule([(0, [weight for _, weight in sources]), *changes])
        self._orders = [
            EpochShuffle(source.samples(sequence_length), stable_key("samples", seed, index))
            for index, source in enumerate(self.sources)
        ]
        self._length_starts = np.array([0, *(start for start, _ in lengths)], dtype=np.int64)
        self._lengths = np.array([sequence_length, *(length for _, length in lengths)], dtype=np.int64)
        # Everything that decides what sample number n holds: a resumed run compares it.
        description = [
            ORDER_VERSION,
            seed,
            sequence_length,
            self._mixture.description,
            [s.fingerprint for s in self.sources],
            *([list(lengths)] if any(length < sequence_length for _, length in lengths) else []),
        ]
        self.fingerprint = hashlib.sha256(json.dumps(description).encode()).hexdigest()

    def locate(self, numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return for each global sample number its source and the number of the sample in that source."""
        source, place = self._mixture(numbers)
        sample = np.empty_like(place)
        for index, order in enumerate(self._orders):
            mine = np.flatnonzero(source == index)
            if mine.size:
                sample[mine] = order(place[mine])
        return source, sample

    def read(self, numbers: Int64Array) -> TokenBatch:
        """Read the samples with these global numbers, int64 [B]."""
        source, sample = self.locate(numbers)
        length = self.sequence_length
        rows = np.empty((len(numbers), length + 1), dtype=np.int64)
        # The part of its sample that each token is in, while a run begins with shorter samples.
        lengths = self._lengths[np.searchsorted(self._length_starts, numbers, side="right") - 1]
        parts = None if (lengths == length).all() else np.arange(length) // lengths[:, None]
        documents = np.zeros((len(numbers), length), dtype=np.int32) if self.documents or parts is not None else None
        for index, origin in enumerate(self.sources):
            mine = np.flatnonzero(source == index)
            if not mine.size:
                continue
            starts = sample[mine] * length
            # One token more than the inputs: the target of the last one.
            read = origin.read(starts, length + 1)
            rows[mine] = read
            if self._vocab_size is not None:
                wrong = (read < 0) | (read >= self._vocab_size)
                # An id outside the table would read other memory on a GPU, or end the run there without a reason.
                if wrong.any():
                    row = int(np.flatnonzero(wrong.any(axis=1))[0])
                    # A source that says how many ids it has was compared with the model's when it was opened.
                    why = (
                        ""
                        if origin.vocab_size is None
                        else "; the data are altered, phalanx data verify says which file"
                    )
                    raise DataError(
                        f"{origin.path}: sample {int(sample[mine][row])} holds token id {int(read[row][wrong[row]][0])}, "
                        f"outside model.vocab_size={self._vocab_size}{why}"
                    )
            if documents is not None and self.documents:
                # Attention compares ids within a sample only; counted from its first they fit into 32 bits.
                ids = origin.document_of(starts[:, None] + np.arange(length))
                documents[mine] = ids - ids[:, :1]
        if documents is not None and parts is not None:
            # Ids that change wherever the document or the part changes, from 0 on.
            changes = (np.diff(documents, axis=1) != 0) | (np.diff(parts, axis=1) != 0)
            documents = np.pad(changes, ((0, 0), (1, 0))).cumsum(axis=1, dtype=np.int32)
        tokens = torch.from_numpy(rows)
        return TokenBatch(
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            None if documents is None else torch.from_numpy(documents),
            torch.from_numpy(numbers),
        )

    def require_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model has no row for: now where a source says, else sample by sample."""
        self._vocab_size = vocab_size
        for source in self.sources:
            source.require_vocabulary(vocab_size)

    _vocab_size: int | None = None


class TokenBatchStream(ReadAheadStream[TokenBatch]):
    """This rank's share of each global batch of text, step after step, read ahead in the background."""
