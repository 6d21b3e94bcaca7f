"""What a run reads: the training stream of this rank, the held-out samples and the tokenizer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.config.schema import Run
from phalanx.data.language.batches import SampleReader, TokenBatchStream
from phalanx.data.language.open import open_source
from phalanx.data.language.sources import TokenSource
from phalanx.errors import DataError
from phalanx.evaluate.text import TextTokenizer
from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.models.language.huggingface.tokens import TOKENIZER, SpecialTokens, TokenizerFiles
from phalanx.train.evaluator import Evaluator


@dataclass(frozen=True)
class Inputs:
    """Opened data of a run."""

    stream: TokenBatchStream
    evaluator: Evaluator
    tokenizer: TokenizerFiles
    """The tokenizer of the first source that has one; empty when none has."""
    verification: Verification
    """Checks the training data's checksums while training begins."""


class Verification:
    """Reads all of some sources in the background and compares checksums, so that training need not wait for it."""

    def __init__(self, sources: list[TokenSource]) -> None:
        self._sources = sources
        self._error: DataError | None = None
        if sources:
            threading.Thread(target=self._run, name="verify-data", daemon=True).start()

    def raise_if_failed(self) -> None:
        """Raise the DataError of the first altered file found so far, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for source in self._sources:
                source.verify()
        except DataError as error:
            self._error = error


def open_inputs(run: Run, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
    """Open every source of the run file. first: whether this rank does what is done once.

    Raises DataError for missing, truncated or unsuitable data."""
    weights = [source.weight for source in run.data.sources]
    training = [open_source(Path(source.path), "train") for source in run.data.sources]
    reader = SampleReader(
        list(zip(training, weights, strict=True)),
        sequence_length=run.data.sequence_length,
        seed=run.training.seed,
        documents=run.data.document_mask,
    )
    reader.require_vocabulary(run.model.vocab_size)
    stream = TokenBatchStream(
        reader,
        global_batch=layout.global_batch,
        rank=mesh.data_rank,
        ranks=layout.data_ranks,
        prefetch=run.data.prefetch,
        pin_memory=device.type != "cpu",
    )
    files = _tokenizer_files(training)
    tokenizer = TextTokenizer.from_files(files, training[0].path) if files.files else None
    evaluator = Evaluator(
        run=run,
        sources=_held_out(run),
        tokenizer=tokenizer,
        token_bytes_V=None if tokenizer is None else tokenizer.byte_counts(run.model.vocab_size),
        device=device,
    )
    return Inputs(stream, evaluator, files, Verification(training if run.data.verify and first else []))


def _held_out(run: Run) -> list[TokenSource]:
    """The validation splits that hold anything to predict."""
    opened = [open_source(Path(source.path), "validation") for source in run.data.sources]
    return [source for source in opened if source is not None and source.tokens > 1]


def _tokenizer_files(sources: list[TokenSource]) -> TokenizerFiles:
    for source in sources:
        if source.tokenizer is not None:
            end = () if source.end_of_document is None else (source.end_of_document,)
            return TokenizerFiles({TOKENIZER: source.tokenizer.read_bytes()}, SpecialTokens(begin=None, end=end))
    return TokenizerFiles({}, SpecialTokens())
