"""Scoring a loaded model on prepared data: which data, cut into which samples, and how many bytes its tokens stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.errors import ConfigError, DataError
from phalanx.families.language.data.manifest import Split
from phalanx.families.language.data.open import open_source
from phalanx.families.language.data.sources import TokenSource
from phalanx.families.language.evaluation.held_out import HeldOut, evaluate_split, sample_count, spread_samples
from phalanx.families.language.evaluation.load import LoadedModel
from phalanx.families.language.evaluation.text import TextTokenizer

DEFAULT_LENGTH = 2048
"""Tokens a sample for a model without a run, unless it has fewer positions."""


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


def score(
    loaded: LoadedModel,
    *,
    data: Path | None = None,
    split: Split = "validation",
    samples: int | None = None,
    sequence_length: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Score `loaded` on `split` of the prepared folder `data`, or of the run's own data.

    samples: how many samples to score, spread evenly over the split; None scores every token. sequence_length: tokens a
    sample; by default the run's, and 2048 or what the model has for imported weights. progress: called with the samples
    done and in all.

    Raises ConfigError where there is nothing to score or the length does not fit, DataError for data that is not usable
    or that another tokenizer made.
    """
    length = _length(loaded, sequence_length)
    sources = _open(loaded, data, split)
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
        total=sum(each[1:], start=each[0]),
    )


def _length(loaded: LoadedModel, wanted: int | None) -> int:
    limit = loaded.model.config.max_positions
    usual = min(limit, DEFAULT_LENGTH) if loaded.run is None else loaded.run.data.sequence_length
    length = usual if wanted is None else wanted
    if not 1 <= length <= limit:
        raise ConfigError(f"--length={length} must be from 1 to {limit}, the positions that the model has")
    return length


def _open(loaded: LoadedModel, data: Path | None, split: Split) -> list[TokenSource]:
    if data is not None:
        paths = [data]
    elif loaded.run is not None:
        paths = [Path(source.path) for source in loaded.run.data.sources]
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
    """Bytes of text that each token of `source` stands for; None where neither data nor model has a tokenizer."""
    ours = loaded.tokenizer
    if source.tokenizer is None:
        return None if ours is None else ours.byte_counts(loaded.model.config.vocab_size)
    theirs = TextTokenizer.from_file(source.tokenizer, source.end_of_document)
    if ours is not None and ours.vocabulary != theirs.vocabulary:
        raise DataError(
            f"{source.path} was prepared with another tokenizer than that of {loaded.where}; prepare the text again with it"
        )
    return theirs.byte_counts(loaded.model.config.vocab_size)
