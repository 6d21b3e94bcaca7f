"""In-context scores of a model in the layout that it trains in: every rank takes part, and no rank holds the whole model.

Batches have the shape of training's micro-batches, which sharded, pipelined and compiled stages want; filling stands behind
each candidate, where a causal model does not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.families.language.config import TaskEvaluation
from phalanx.families.language.evaluation.icl_tasks import Task
from phalanx.families.language.evaluation.in_context import Candidate, EndOfText, TaskScore, score_tasks_with
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.families.language.layout import EACH_TARGET
from phalanx.layout.execute import Executor
from phalanx.nn.cross_entropy import IGNORED
from phalanx.training.inputs import Finding


@dataclass(frozen=True)
class LayoutScorer:
    """See `in_context.CandidateScorer`."""

    executor: Executor
    positions: int
    """Tokens of a sample in training; longer prompts lose their beginning."""
    ends: tuple[int, ...]
    """Tokens that end a text."""
    device: torch.device

    def score(self, candidates: Sequence[Candidate]) -> tuple[Tensor, Tensor]:
        """See `CandidateScorer`."""
        sums_N2 = torch.zeros(len(candidates), 2, dtype=torch.float64, device=self.device)
        for place in self._own_rounds(len(candidates)):
            rows = [candidates[index] for index in place]
            texts = [[*row.context, *row.targets[:-1]] for row in rows]
            targets_BS = self._fill([[IGNORED] * (len(row.context) - 1) + list(row.targets) for row in rows], IGNORED)
            scores = self._run(self._fill(texts, 0), targets_BS)
            if scores is None:
                continue
            nats_BS, likeliest_BS = scores
            missed_BS = (targets_BS != IGNORED) & (likeliest_BS != targets_BS)
            found_B2 = torch.stack((nats_BS.sum(1), (~missed_BS.any(1)).double()), dim=1)
            sums_N2[place.start : place.stop] = found_B2[: len(place)]
        sums_N2 = self._add_over_ranks(sums_N2).cpu()
        return sums_N2[:, 0], sums_N2[:, 1].bool()

    def write(self, prompts: Sequence[Sequence[int]], most: int, has_ended: EndOfText) -> list[list[int]]:
        """See `CandidateScorer`.

        Each token takes a pass over whole samples: stages keep no keys and values.
        """
        written: list[list[int]] = [[] for _ in prompts]
        over = [False] * len(prompts)
        group = self.executor.layout.microbatch * self.executor.layout.data_ranks
        for first in range(0, len(prompts), group):
            places = range(first, min(first + group, len(prompts)))
            for _ in range(most):
                tokens = self._next_tokens([[*prompts[index], *written[index]] for index in places])
                for index, token in zip(places, tokens, strict=True):
                    over[index] = over[index] or token in self.ends
                    if not over[index]:
                        written[index].append(token)
                        over[index] = has_ended(written[index])
                # The same on all ranks, which know all tokens.
                if all(over[index] for index in places):
                    break
        return written

    def _next_tokens(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Return the likeliest token after each of at most a micro-batch of texts a data-parallel rank."""
        tokens_N = torch.zeros(len(texts), dtype=torch.float64, device=self.device)
        for place in self._own_rounds(len(texts)):
            rows = [texts[index] for index in place]
            # Any target will do: asked for is the likeliest token at its position.
            targets_BS = self._fill([[IGNORED] * (len(row) - 1) + [0] for row in rows], IGNORED)
            scores = self._run(self._fill(rows, 0), targets_BS)
            if scores is not None:
                likeliest_BS = scores[1]
                ends = [len(row) - 1 for row in rows]
                tokens_N[place.start : place.stop] = likeliest_BS[list(range(len(rows))), ends]
        return [int(token) for token in self._add_over_ranks(tokens_N).tolist()]

    def _own_rounds(self, count: int) -> list[range]:
        """Return the rows of each of this rank's passes; some of the last may have none: all ranks run as often."""
        rows, ranks = self.executor.layout.microbatch, self.executor.layout.data_ranks
        starts = range(self.executor.mesh.data_rank * rows, -(-count // (rows * ranks)) * rows * ranks, rows * ranks)
        return [range(min(start, count), min(start + rows, count)) for start in starts]

    def _fill(self, rows: Sequence[Sequence[int]], filling: int) -> Tensor:
        """Return the rows as int64 [B, S] of the shape of a micro-batch."""
        filled = torch.full((self.executor.layout.microbatch, self.positions), filling, dtype=torch.int64)
        for place, row in enumerate(rows):
            filled[place, : len(row)] = torch.tensor(row)
        return filled.to(self.device)

    def _run(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor | None:
        """Return loss and likeliest token of each target, float64 [2, B, S], on one of the ranks that have them."""
        inputs = {"targets_BS": targets_BS, EACH_TARGET: torch.ones((), device=self.device)}
        scores = self.executor.infer(tokens_BS, inputs, torch.arange(len(tokens_BS), device=self.device))
        mesh = self.executor.mesh
        return scores if mesh.tp.rank == mesh.cp.rank == 0 else None

    def _add_over_ranks(self, sums: Tensor) -> Tensor:
        # Each number comes from one rank, so the sum is exact.
        if self.executor.mesh.world is not None:
            dist.all_reduce(sums, group=self.executor.mesh.world)
        return sums


@dataclass(frozen=True)
class TaskEvaluator:
    """Scores in-context tasks in training, the same questions each time."""

    asked: TaskEvaluation
    tasks: list[Task]
    tokenizer: TextTokenizer
    positions: int
    """Tokens of a sample."""
    device: torch.device

    def evaluate(self, executor: Executor) -> list[Finding]:
        """Return the scores on all tasks."""
        scorer = LayoutScorer(executor, self.positions, self.tokenizer.special.end, self.device)
        scores = score_tasks_with(scorer, self.tokenizer, self.tasks, questions=self.asked.questions)
        mean = sum(score.accuracy for score in scores) / len(scores)
        each = ", ".join(f"{_name_score(score)} {score.accuracy:.1%}" for score in scores)
        parts = {_name_score(score): score.accuracy for score in scores}
        fields = {"mean_accuracy": mean, "tasks": [score.as_dict() for score in scores]}
        return [Finding("tasks", fields, f"in-context accuracy {mean:.1%}: {each}", parts)]


def _name_score(score: TaskScore) -> str:
    return f"{score.task} {score.shots}-shot"
