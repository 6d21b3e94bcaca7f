"""Scores of a model on in-context tasks, as LLM Foundry scores them, over any number of ranks.

A candidate's score is that of its own tokens given the prompt. Candidates are sorted by length and filled up behind their
last token, which a causal model cannot see: batches change no score but by rounding.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import ConfigError, DataError
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.generation import generate_tokens
from phalanx.families.language.evaluation.held_out import WHOLE, Sharing
from phalanx.families.language.evaluation.icl_tasks import Prompt, Task
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer

_BATCH_LOGITS = 2**26
"""Logits computed at a time, unless one candidate alone has more."""
_SPARE_TOKENS = 10
"""Tokens that an answer with reasoning may have beyond the longest of its task (as in Foundry)."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
Progress = Callable[[int, int], None]
EndOfText = Callable[[Sequence[int]], bool]
"""Whether an answer is over, by the tokens written so far."""


@dataclass(frozen=True)
class Candidate:
    """A continuation of a prompt, in tokens."""

    context: tuple[int, ...]
    """At least one token."""
    targets: tuple[int, ...]
    characters: int
    """Length of the continuation's text as the task's file has it."""


@dataclass(frozen=True)
class TaskScore:
    """Scores of one task; shares from 0 to 1."""

    task: str
    kind: str
    shots: int
    questions: int
    accuracy: float
    """As LLM Foundry counts it: the candidate of the lowest mean loss a token, or every target the likeliest token, or a
    generated text that begins with an answer."""
    accuracy_sum: float | None
    """Share of questions whose right candidate has the highest probability, whatever its length; None without candidates."""
    accuracy_per_character: float | None
    """The same of the log-probability over the characters of the candidate."""
    perplexity: float | None
    """exp of the mean over questions of the right continuation's summed loss (nats); None for generation."""

    def as_dict(self) -> dict[str, float | int | str | None]:
        """Return all figures by name."""
        return asdict(self)


@dataclass(frozen=True)
class HarnessScore:
    """One metric of a task, or of a group of tasks, as lm-evaluation-harness computes it."""

    task: str
    metric: str
    value: float
    questions: int | None
    """None for a group."""


class CandidateScorer(Protocol):
    """A model that scores candidates and writes answers; all ranks call it alike and get the same."""

    @property
    def positions(self) -> int:
        """Return the most tokens of a prompt and what follows it."""

    def score(self, candidates: Sequence[Candidate]) -> tuple[Tensor, Tensor]:
        """Return each candidate's summed loss in nats, float64 [N], and whether each of its tokens is the likeliest."""

    def write(self, prompts: Sequence[Sequence[int]], most: int, has_ended: EndOfText) -> list[list[int]]:
        """Return the likeliest tokens after each prompt, at most `most`, until `has_ended` or a token ends the text."""


def score_tasks(
    loaded: LoadedModel,
    tasks: Sequence[Task],
    *,
    questions: int | None = None,
    sharing: Sharing = WHOLE,
    progress: Progress = lambda done, total: None,
) -> list[TaskScore]:
    """Score `loaded` on each task, in order.

    questions: how many of each to ask, from the first; None asks all. sharing: every rank holds the whole model, scores
    its batches and gets all scores, which do not depend on the number of ranks. progress: called with the tasks done and
    in all.

    Raises ConfigError where the model came without a tokenizer, DataError for a continuation that is longer than the
    model's positions.
    """
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.where} came without a tokenizer; give one with --tokenizer")
    scorer = WholeModelScorer(loaded.model, loaded.tokenizer.special.end, sharing)
    return score_tasks_with(scorer, loaded.tokenizer, tasks, questions=questions, progress=progress)


def score_tasks_with(
    scorer: CandidateScorer,
    tokenizer: TextTokenizer,
    tasks: Sequence[Task],
    *,
    questions: int | None = None,
    progress: Progress = lambda done, total: None,
) -> list[TaskScore]:
    """Return the scores that `scorer` gets on each task, in order; see `score_tasks`."""
    scores = []
    for done, task in enumerate(tasks):
        score = _score_generation if task.kind == "generation_task_with_answers" else _score_candidates
        scores.append(score(scorer, tokenizer, task, task.prompts(questions)))
        progress(done + 1, len(tasks))
    return scores


@dataclass(frozen=True)
class WholeModelScorer:
    """A model that every rank holds whole: batches, or prompts, are shared among ranks."""

    model: Decoder
    ends: tuple[int, ...]
    """Tokens that end a text."""
    sharing: Sharing = WHOLE

    @property
    def positions(self) -> int:
        """See `CandidateScorer`."""
        return self.model.config.max_positions

    def score(self, candidates: Sequence[Candidate]) -> tuple[Tensor, Tensor]:
        """See `CandidateScorer`."""
        return score_candidates(self.model, candidates, sharing=self.sharing)

    def write(self, prompts: Sequence[Sequence[int]], most: int, has_ended: EndOfText) -> list[list[int]]:
        """See `CandidateScorer`."""
        # A rank's answers as numbers above 0, so that those of all ranks add up.
        tokens_NL = torch.zeros((len(prompts), most), dtype=torch.int64)
        for index in range(self.sharing.rank, len(prompts), self.sharing.shares):
            written: list[int] = []
            for token in generate_tokens(self.model, prompts[index], max_tokens=most, temperature=0.0, eod=self.ends):
                written.append(token)
                if has_ended(written):
                    break
            tokens_NL[index, : len(written)] = torch.tensor(written, dtype=torch.int64) + 1
        tokens_NL = _add_over_ranks(tokens_NL, self.model.embedding.weight.device, self.sharing)
        return [[token - 1 for token in row if token] for row in tokens_NL.tolist()]


def _score_candidates(
    scorer: CandidateScorer, tokenizer: TextTokenizer, task: Task, prompts: Sequence[Prompt]
) -> TaskScore:
    grouped = [tokenize_candidates(tokenizer, prompt, scorer.positions) for prompt in prompts]
    flat = [candidate for group in grouped for candidate in group]
    nats_N, greedy_N = scorer.score(flat)
    tokens_N = torch.tensor([len(candidate.targets) for candidate in flat])
    characters_N = torch.tensor([candidate.characters for candidate in flat])
    ends = torch.tensor([len(group) for group in grouped]).cumsum(0).tolist()
    places = [slice(end - len(group), end) for end, group in zip(ends, grouped, strict=True)]
    gold = [prompt.gold for prompt in prompts]
    losses = [float(nats_N[place][right]) for place, right in zip(places, gold, strict=True)]
    # Beyond exp(709) float64 overflows.
    perplexity = math.exp(min(700.0, _mean(losses)))
    share = partial(TaskScore, task.name, task.kind, task.shots, len(prompts), perplexity=perplexity)
    if task.kind == "language_modeling":
        return share(accuracy=_mean(greedy_N.tolist()), accuracy_sum=None, accuracy_per_character=None)

    def share_right(values_N: Tensor) -> float:
        return _mean(int(values_N[place].argmin()) == right for place, right in zip(places, gold, strict=True))

    return share(
        accuracy=share_right(nats_N / tokens_N),
        accuracy_sum=share_right(nats_N),
        accuracy_per_character=share_right(nats_N / characters_N),
    )


def tokenize_candidates(tokenizer: TextTokenizer, prompt: Prompt, positions: int) -> list[Candidate]:
    """Return the candidates of a question in tokens; prompts lose tokens at their beginning where `positions` are too few.

    Preamble, context and continuation are tokenized apart, the last with a space in front where the tokenizer has words
    that begin with one. Raises DataError for a continuation that leaves no position for a prompt.
    """
    preamble = _tokenize_preamble(tokenizer, prompt.preamble)
    # Tokenizers whose words begin with a space tell a continuation by it.
    spaced = len(tokenizer.encode(" a")) == 1
    found = []
    contexts = [preamble + tokenizer.encode(context) for context in prompt.contexts]
    for context in contexts:
        for text in prompt.continuations:
            targets = tokenizer.encode(f" {text}" if spaced and not text.startswith(" ") else text)
            room = positions - len(targets)
            if room < 1 or not targets:
                raise DataError(
                    f"a continuation of {len(targets)} tokens does not fit: it needs from 1 to {positions - 1}, "
                    f"one fewer than the model's positions; leave the task out"
                )
            before = (context or tokenizer.encode_prompt(""))[-room:]
            found.append(Candidate(tuple(before), tuple(targets), len(text)))
    return found


def _tokenize_preamble(tokenizer: TextTokenizer, text: str) -> list[int]:
    # Empty text would give the token that ends documents, which only a prompt without any text needs.
    if text or tokenizer.special.begin is not None:
        return tokenizer.encode_prompt(text)
    return []


@torch.no_grad()
def score_candidates(
    model: Decoder, candidates: Sequence[Candidate], *, batch_tokens: int | None = None, sharing: Sharing = WHOLE
) -> tuple[Tensor, Tensor]:
    """Return each candidate's summed loss in nats, float64 [N], and whether each of its tokens is the likeliest, bool [N].

    batch_tokens: tokens computed at a time, filling included; by default as many as give 64M logits. sharing: batches are
    the same for any number of ranks.
    """
    limit = batch_tokens or max(1, _BATCH_LOGITS // model.config.vocab_size)
    device = model.embedding.weight.device
    sums_N2 = torch.zeros(len(candidates), 2, dtype=torch.float64)
    lengths = [len(candidate.context) + len(candidate.targets) for candidate in candidates]
    batches: list[list[int]] = []
    # The longest first, so that what does not fit in memory fails at once.
    for index in sorted(range(len(candidates)), key=lambda index: -lengths[index]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= limit:
            batches[-1].append(index)
        else:
            batches.append([index])
    for batch in batches[sharing.rank :: sharing.shares]:
        rows = [(*candidates[index].context, *candidates[index].targets) for index in batch]
        width = max(map(len, rows)) - 1
        tokens_BS = torch.tensor([[*row[:-1], *[0] * (width + 1 - len(row))] for row in rows], device=device)
        logits_BSV = model.logits(tokens_BS)
        for place, index in enumerate(batch):
            start, count = len(candidates[index].context) - 1, len(candidates[index].targets)
            logits_SV = logits_BSV[place, start : start + count]
            # In float64: of many candidates some lie closer together than the rounding of a sum.
            targets_S = torch.tensor(candidates[index].targets, device=device)
            nats = F.cross_entropy(logits_SV.double(), targets_S, reduction="sum")
            sums_N2[index] = torch.stack((nats, (logits_SV.argmax(-1) == targets_S).all().double())).cpu()
    sums_N2 = _add_over_ranks(sums_N2, device, sharing)
    return sums_N2[:, 0], sums_N2[:, 1].bool()


def _score_generation(
    scorer: CandidateScorer, tokenizer: TextTokenizer, task: Task, prompts: Sequence[Prompt]
) -> TaskScore:
    stops, delimiter = task.settings.early_stopping_criteria, task.settings.cot_delimiter
    answers = (
        task.answer_text(row, answer) for row in task.rows for answer in (row["answer"], *row.get("aliases", []))
    )
    longest = max(len(tokenizer.encode(answer)) for answer in answers)
    length = max(1, longest + (_SPARE_TOKENS if delimiter else 0))
    room = scorer.positions - length
    if room < 1:
        raise DataError(
            f"{task.name}: answers of up to {length} tokens leave the model no position; leave the task out"
        )
    prompt_ids = []
    for prompt in prompts:
        ids = _tokenize_preamble(tokenizer, prompt.preamble) + tokenizer.encode(prompt.contexts[0])
        prompt_ids.append((ids or tokenizer.encode_prompt(""))[-room:])
    written = scorer.write(prompt_ids, length, lambda ids: any(stop in tokenizer.decode(ids) for stop in stops))
    right = []
    for ids, prompt in zip(written, prompts, strict=True):
        text = tokenizer.decode(ids)
        # The answer stands before what ends the text, which Foundry reads as patterns here, and behind its reasoning.
        text = re.split("|".join(stops), text)[0] if stops else text
        text = text.split(delimiter)[-1] if delimiter else text
        right.append(matches_answer(text, prompt.answers, normalise=task.settings.do_normalization))
    accuracy = _mean(right)
    return TaskScore(task.name, task.kind, task.shots, len(prompts), accuracy, None, None, None)


def matches_answer(text: str, answers: Iterable[str], *, normalise: bool = True) -> bool:
    """Return whether `text` begins with one of `answers`; normalise: both as `normalise_answer` gives them."""
    clean: Callable[[str], str] = normalise_answer if normalise else str
    return any(clean(text).startswith(clean(answer)) for answer in answers)


def normalise_answer(text: str) -> str:
    """Return `text` in lower case without punctuation, articles and extra spaces (TriviaQA, Joshi et al. 2017)."""
    plain = text.replace("_", " ").lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _add_over_ranks(sums: Tensor, device: torch.device, sharing: Sharing) -> Tensor:
    if sharing.shares == 1:
        return sums
    # Each number comes from one rank, so the sum is exact.
    everywhere = sums.to(device)
    dist.all_reduce(everywhere)
    return everywhere.cpu()


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
