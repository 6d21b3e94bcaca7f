"""Text from a decoder: prompt in, continuations out, token by token and piece by piece."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextStream
from phalanx.nn.attention import KeyValueCache

DEFAULT_TOKENS = 128
_ANY_LENGTH = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Attention kernels that begin at once, however many keys there are: cuDNN's plans for some 30 ms for each new number of
keys, so for each token (benchmarks/README.md)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's distribution."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Draw among this many most likely tokens only."""
    top_p: float | None = None
    """Draw among the fewest tokens whose probability reaches this sum (nucleus sampling, Holtzman et al. 2020)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be a finite number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k={self.top_k} must be at least 1; leave it out to draw from all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top-p={self.top_p} must be above 0 and at most 1; leave it out to draw from all tokens")


@dataclass(frozen=True)
class Continuation:
    """What the model wrote after the prompt."""

    seed: int
    text: str
    tokens: list[int]
    ended: bool
    """Whether the model ended the document itself, before the number of tokens was reached."""


@dataclass(frozen=True)
class Generation:
    """All continuations of one prompt."""

    prompt_tokens: int
    continuations: list[Continuation]
    seconds: float
    """From the start of the prompt's computation to the last token."""


def generate_text(
    loaded: LoadedModel,
    prompt: str,
    *,
    max_tokens: int | None,
    sampling: Sampling,
    seed: int,
    count: int = 1,
    rank: int = 0,
    ranks: int = 1,
    show: Callable[[int, str], None] = lambda index, piece: None,
) -> Generation:
    """Continue `prompt` `count` times; continuation i is drawn with seed + i, whatever `count` is.

    max_tokens: tokens to write at most; None stands for 128, or for fewer where the model has no more positions. rank,
    ranks: this rank among those of the process group, which share the continuations; each gets all. show: is called with the
    number of a continuation, among those of this rank, and its next piece of text as soon as there is one, the prompt first.

    Raises ConfigError for fewer continuations than ranks, where the model came without a tokenizer, and as `generate_batch`
    does.
    """
    if count < 1:
        raise ConfigError(f"count={count} must be at least 1")
    if count < ranks:
        raise ConfigError(f"count={count} leaves some of {ranks} ranks nothing to write; start at most {count} ranks")
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.where} came without a tokenizer; give one with --tokenizer")
    prompt_ids = loaded.tokenizer.encode_prompt(prompt)
    # A default that asks for more than the model's positions would fail for long prompts.
    room = loaded.model.config.max_positions - len(prompt_ids)
    # Numbered seeds: continuation i is the same however many are asked for.
    seeds = [seed + index for index in range(rank, count, ranks)]
    streams = [TextStream(loaded.tokenizer, prompt_ids) for _ in seeds]
    texts, tokens = [""] * len(seeds), [list[int]() for _ in seeds]

    def add(index: int, piece: str) -> None:
        texts[index] += piece
        if piece:
            show(index, piece)

    start = time.perf_counter()
    limit = max(1, min(DEFAULT_TOKENS, room)) if max_tokens is None else max_tokens
    ends = loaded.tokenizer.special.end
    steps = generate_batch(loaded.model, prompt_ids, max_tokens=limit, sampling=sampling, seeds=seeds, ends=ends)
    # Shown only now: an error of the prompt comes first.
    for index in range(len(seeds)):
        show(index, prompt)
    for step in steps:
        for index, token in enumerate(step):
            if token is not None:
                tokens[index].append(token)
                add(index, streams[index].push(token))
    for index, stream in enumerate(streams):
        add(index, stream.finish())
    written = [Continuation(s, text, ids, len(ids) < limit) for s, text, ids in zip(seeds, texts, tokens, strict=True)]
    if ranks > 1:
        parts = [written] * ranks
        dist.all_gather_object(parts, written)
        written = sorted(itertools.chain.from_iterable(parts), key=lambda continuation: continuation.seed)
    return Generation(len(prompt_ids), written, time.perf_counter() - start)


def generate_tokens(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eod: int | Collection[int] | None = None,
) -> Iterator[int]:
    """Return the tokens that follow `prompt_ids`, at most `max_tokens`, one by one as they are drawn.

    eod: token (or tokens) that end a document; drawing one ends the iteration, and it is not given out. The same seed
    gives the same tokens. Raises ConfigError for an empty prompt, a token outside the vocabulary, and a prompt that
    leaves too few of the model's positions.
    """
    sampling = Sampling(temperature, top_k, top_p)
    ends = (eod,) if isinstance(eod, int) else eod or ()
    steps = generate_batch(model, prompt_ids, max_tokens=max_tokens, sampling=sampling, seeds=[seed], ends=ends)
    return (token for (token,) in steps if token is not None)


def generate_batch(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    ends: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Return several continuations of one prompt at once, one a seed: each step gives a token a continuation, None
    once ended."""
    # Checked before the generator below is started, so that errors come from this very call.
    config = model.config
    if not prompt_ids:
        raise ConfigError("the prompt is empty and there is no token that begins a document; give some text")
    outside = next((token for token in prompt_ids if not 0 <= token < config.vocab_size), None)
    if outside is not None:
        raise ConfigError(
            f"the prompt holds token {outside}, but the model has {config.vocab_size}: the tokenizer is not the model's"
        )
    room = config.max_positions - len(prompt_ids)
    if max_tokens > room:
        fix = f"ask for at most {room}" if room > 0 else f"shorten the prompt to under {config.max_positions} tokens"
        raise ConfigError(
            f"a prompt of {len(prompt_ids)} tokens and {max_tokens} more need {len(prompt_ids) + max_tokens} positions, "
            f"but the model has {config.max_positions}; {fix}"
        )
    return _generate_steps(model, prompt_ids, max_tokens, sampling, seeds, ends)


@torch.no_grad()
def _generate_steps(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    ends: Collection[int],
) -> Iterator[list[int | None]]:
    """Yield the next token of each continuation, one a seed; None for those that have ended."""
    device = model.embedding.weight.device
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    ended = [False] * len(seeds)
    caches = model.new_caches()
    # The prompt is the same for all, so it is computed once.
    logits_B1V = _next_logits(model, torch.tensor([list(prompt_ids)], device=device), caches)
    logits_B1V = logits_B1V.expand(len(seeds), -1, -1)
    for cache in caches:
        cache.repeat(len(seeds))
    for step in range(max_tokens):
        # Drawn on the CPU, whose generator gives the same numbers beside every device.
        rows = logits_B1V.squeeze(1).float().cpu()
        tokens = [draw_token(row, sampling, draw) for row, draw in zip(rows, draws, strict=True)]
        ended = [was or token in ends for was, token in zip(ended, tokens, strict=True)]
        # Ended continuations are computed on until all have ended: rows leave a batch only together.
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, tokens, strict=True)]
        if step + 1 < max_tokens:
            logits_B1V = _next_logits(model, torch.tensor(tokens, device=device)[:, None], caches)


def _next_logits(model: Decoder, tokens_BS: Tensor, caches: list[KeyValueCache]) -> Tensor:
    """Return the logits [B, 1, V] of the token that follows `tokens_BS`."""
    # The choice of kernels is the whole process's: it ends before a token is given out.
    with sdpa_kernel(list(_ANY_LENGTH)):
        return model.logits(tokens_BS, caches, last_only=True)


def draw_token(logits_V: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """Return one token from logits [V] (float32, on the CPU): temperature comes first, then top-k, then top-p.

    Raises PhalanxError where the logits are not finite: there is nothing to draw from.
    """
    if not torch.isfinite(logits_V.max()):
        raise PhalanxError(
            "the model's logits are not finite numbers; its weights are damaged, or too large for this format"
        )
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    # Stable, so that equal logits keep the order of their ids on every device.
    ordered_V, tokens_V = torch.sort(logits_V.double() / sampling.temperature, descending=True, stable=True)
    probability_V = torch.softmax(ordered_V[: sampling.top_k], dim=0)
    summed_V = probability_V.cumsum(0)
    if sampling.top_p is not None:
        # Up to and including the token that reaches top_p, so never none.
        kept = int((summed_V < sampling.top_p).sum()) + 1
        summed_V = summed_V[:kept]
    # By inverting the distribution function: one uniform number a token, whatever the device or the vocabulary.
    point = torch.rand((), generator=draw, dtype=torch.float64) * summed_V[-1]
    return int(tokens_V[min(int(torch.searchsorted(summed_V, point, right=True)), len(summed_V) - 1)])
