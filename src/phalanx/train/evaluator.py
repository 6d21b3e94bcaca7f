"""Held-out loss and sample text in the middle of a run, measured the same way each time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config.schema import Run
from phalanx.data.language.sources import TokenSource
from phalanx.evaluate.held_out import HeldOut, Sharing, score_split, spread_samples
from phalanx.evaluate.text import TextTokenizer
from phalanx.layout.execute import Executor
from phalanx.models.language.sampling import generate_tokens


@dataclass(frozen=True)
class Evaluator:
    """Evaluates one model again and again: the same samples, the same prompt, greedy continuation."""

    run: Run
    sources: list[TokenSource]
    """Validation splits that hold text; empty when there is none."""
    tokenizer: TextTokenizer | None
    """None when the data came without one; then there is no sample text and no bits per byte."""
    token_bytes_V: Tensor | None
    """UTF-8 bytes each token stands for, int64 [V]."""
    device: torch.device

    def evaluate(self, executor: Executor) -> tuple[HeldOut | None, str | None]:
        """Scores over `evaluation.samples` held-out samples, and what the model writes after `evaluation.prompt`."""
        return self._scores(executor), self._continue(executor)

    def _scores(self, executor: Executor) -> HeldOut | None:
        if not self.sources:
            return None
        length = self.run.data.sequence_length
        total = HeldOut(0.0, 0, 0)
        mesh = executor.mesh
        chosen = spread_samples(self.sources, length, self.run.evaluation.samples)
        for source, numbers in zip(self.sources, chosen, strict=True):
            total += score_split(
                executor.evaluate,
                source,
                vocab_size=self.run.model.vocab_size,
                sequence_length=length,
                device=self.device,
                numbers=numbers,
                microbatch=self.run.layout.microbatch,
                document_mask=self.run.data.document_mask,
                byte_counts=self.token_bytes_V,
                sharing=Sharing(mesh.data_rank, executor.layout.data_ranks, counts=mesh.reads_first),
            )
        return total

    def _continue(self, executor: Executor) -> str | None:
        prompt = self.run.evaluation.prompt
        # Generation reads whole parameters and positions one by one, which only a rank alone has.
        if prompt is None or self.tokenizer is None or executor.layout.world_size > 1:
            return None
        model = executor.applied.stages[0].part
        ids = self.tokenizer.encode_prompt(prompt)
        room = min(self.run.evaluation.prompt_tokens, model.config.max_positions - len(ids))
        model.eval()
        tokens = list(generate_tokens(model, ids, max_tokens=room, temperature=0.0))
        model.train()
        return self.tokenizer.decode(ids + tokens)[len(self.tokenizer.decode(ids)) :]
