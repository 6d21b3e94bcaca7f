"""Language models as one: the mean of their probabilities for each token, and its held-out loss beside each member's.

Probabilities are formed in chunks of tokens and none is kept. By convexity the mean never does worse than members do on
average; the report says whether it does better than the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.ensemble.family import Progress
from phalanx.ensemble.members import (
    ALONE,
    EnsembleFile,
    Member,
    Share,
    member_entries,
    require_one_family,
    require_same,
)
from phalanx.errors import ConfigError, DataError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.open_tokens import open_source
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.held_out import HeldOut, Sharing, score_split, spread_samples
from phalanx.families.language.evaluation.load_weights import load_for_inference
from phalanx.nn.cross_entropy import IGNORED
from phalanx.nn.positions import Positions

_LOGITS = 2**24
"""Logits held at once, about."""


@dataclass(frozen=True)
class LanguageEnsemble:
    """An ensemble of language models, ready to be written and shown."""

    members: list[Member]
    losses: list[float]
    """Losses of the members on the validation split, in nats a token."""
    together: HeldOut
    """Loss of the mean of their probabilities."""

    def summary(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "family": "language",
            "members": [
                {
                    "name": one.name,
                    "checkpoint": str(one.checkpoint),
                    "step": one.step,
                    "weight": 1.0 / len(self.members),
                    "loss": loss,
                }
                for one, loss in zip(self.members, self.losses, strict=True)
            ],
            "split": "validation",
            "loss": self.together.loss,
            "perplexity": self.together.perplexity,
            "tokens": self.together.tokens,
            "best_member_loss": min(self.losses),
        }

    def document(self, folder: Path) -> EnsembleFile:
        """Return the document that is written into `folder`."""
        members = member_entries(self.members, [1.0 / len(self.members)] * len(self.members), folder)
        return EnsembleFile(family="language", members=members, facts=self.summary())


def build_language(
    members: Sequence[Member],
    device: torch.device,
    *,
    samples: int | None = None,
    share: Share = ALONE,
    progress: Progress = lambda what, done, total: None,
) -> LanguageEnsemble:
    """Score all members and their mean on the validation split. Every rank calls it; all members fit one device.

    samples: how many samples, spread evenly over the split; None scores every token. Raises ConfigError for members that do
    not go together, DataError for a split without tokens.
    """
    if len(members) < 2:
        raise ConfigError("an ensemble has at least two members; name more runs")
    require_one_family(members)
    runs = [member.run for member in members if isinstance(member.run, LanguageRun)]
    assert len(runs) == len(members)
    described = [
        {
            "data.sources": ", ".join(source.path for source in run.data.sources),
            "data.sequence_length": run.data.sequence_length,
            "data.document_mask": run.data.document_mask,
            "model.vocab_size": run.model.vocab_size,
        }
        for run in runs
    ]
    require_same(members, described, "read the same text")
    models = [load_for_inference(member.checkpoint, device).model for member in members]
    opened = [open_source(Path(source.path), "validation") for source in runs[0].data.sources]
    sources = [source for source in opened if source is not None and source.tokens > 1]
    length = runs[0].data.sequence_length
    chosen = spread_samples(sources, length, samples)
    total, done = sum(map(len, chosen)), 0
    if not total:
        raise DataError(f"the validation split of {runs[0].data.sources[0].path} holds no token; prepare more text")

    def report(scored: int) -> None:
        nonlocal done
        done += scored
        progress("validation", done, total)

    # One pass over the tokens gives the loss of the mean and of every member.
    mean = _MeanOfProbabilities(models, device)
    each = [
        score_split(
            mean,
            source,
            vocab_size=models[0].config.vocab_size,
            sequence_length=length,
            device=device,
            numbers=numbers,
            document_mask=runs[0].data.document_mask,
            sharing=Sharing(share.rank, share.ranks),
            progress=report,
        )
        for source, numbers in zip(sources, chosen, strict=True)
    ]
    together = sum(each[1:], start=each[0])
    return LanguageEnsemble(list(members), mean.losses(together.tokens), together)


class _MeanOfProbabilities:
    """Scores batches by the mean probability of several models, and adds up what each of them would have lost."""

    def __init__(self, models: Sequence[Decoder], device: torch.device) -> None:
        self._models = list(models)
        self._nats_M = torch.zeros(len(models), dtype=torch.float64, device=device)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the summed loss of the mean (nats, 0-dim)."""
        there_N = batch.targets.flatten() != IGNORED
        logs_MN = torch.stack([target_logs(model, batch)[there_N] for model in self._models])
        self._nats_M -= logs_MN.sum(1)
        return -(logs_MN.logsumexp(0) - math.log(len(self._models))).sum()

    def losses(self, tokens: int) -> list[float]:
        """Return the mean loss of each model over all ranks' tokens."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._nats_M)
        found: list[float] = (self._nats_M / tokens).tolist()
        return found


def target_logs(model: Decoder, batch: TokenBatch) -> Tensor:
    """Return the logarithm of the probability of each target [B * S], float64; anything where there is none."""
    positions_S = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    hidden = model.hidden(batch.tokens, Positions(positions_S, positions_S), document_ids_BS=batch.document_ids)
    hidden_ND, targets_N1 = hidden.flatten(0, 1), batch.targets.flatten().clamp(min=0)[:, None]
    tied = model.embedding.weight if model.config.tied_head else None
    size = max(1, _LOGITS // model.config.vocab_size)
    parts = []
    for start in range(0, len(hidden_ND), size):
        logits_NV = model.head.logits(hidden_ND[None, start : start + size], tied)[0].float()
        picked_N1 = logits_NV.gather(1, targets_N1[start : start + size])
        parts.append(picked_N1[:, 0].double() - logits_NV.logsumexp(1).double())
    return torch.cat(parts)
