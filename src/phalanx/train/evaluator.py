"""Held-out loss and sample text in the middle of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.config.schema import Evaluation
from phalanx.data.language.sources import TokenSource
from phalanx.data.language.tokenizer import Tokenizer
from phalanx.evaluate.held_out import HeldOut, evaluate_split
from phalanx.models.language.decoder import Decoder
from phalanx.models.language.sampling import generate_tokens


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model the same way each time: the same held-out samples, the same prompt, greedy continuation."""

    config: Evaluation
    sequence_length: int
    sources: list[TokenSource]
    """Validation splits; empty when the data has none."""
    tokenizer: Tokenizer | None
    """None when the data came without one; then there is no sample text."""
    device: torch.device

    def evaluate(self, model: Decoder) -> tuple[HeldOut | None, str | None]:
        """Held-out scores over `evaluation.samples` samples, and what the model writes after the prompt."""
        raise NotImplementedError
