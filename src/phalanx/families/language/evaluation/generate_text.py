"""Text from a loaded model: prompt in, continuations out, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextStream
from phalanx.families.language.model.sampling import Sampling, generate_batch

DEFAULT_TOKENS = 128


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
    show: Callable[[int, str], None] = lambda index, piece: None,
) -> Generation:
    """Continue `prompt` `count` times; continuation i is drawn with seed + i, whatever `count` is.

    max_tokens: tokens to write at most; None stands for 128, or for fewer where the model has no more positions. show: is
    called with the number of a continuation and its next piece of text as soon as there is one, the prompt first.

    Raises ConfigError where the model came without a tokenizer, and as `generate_batch` does.
    """
    if count < 1:
        raise ConfigError(f"count={count} must be at least 1")
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.where} came without a tokenizer; give one with --tokenizer")
    prompt_ids = loaded.tokenizer.encode_prompt(prompt)
    # A default that asks for more than the model's positions would fail for long prompts.
    room = loaded.model.config.max_positions - len(prompt_ids)
    # Numbered seeds: continuation i is the same however many are asked for.
    seeds = [seed + index for index in range(count)]
    streams = [TextStream(loaded.tokenizer, prompt_ids) for _ in seeds]
    texts = [""] * count
    tokens: list[list[int]] = [[] for _ in seeds]

    def add(index: int, piece: str) -> None:
        texts[index] += piece
        if piece:
            show(index, piece)

    start = time.perf_counter()
    limit = max(1, min(DEFAULT_TOKENS, room)) if max_tokens is None else max_tokens
    steps = generate_batch(
        loaded.model,
        prompt_ids,
        max_tokens=limit,
        sampling=sampling,
        seeds=seeds,
        ends=loaded.tokenizer.special.end,
    )
    # Shown only now: an error of the prompt comes first.
    for index in range(count):
        show(index, prompt)
    for step in steps:
        for index, token in enumerate(step):
            if token is not None:
                tokens[index].append(token)
                add(index, streams[index].push(token))
    for index, stream in enumerate(streams):
        add(index, stream.finish())
    written = [Continuation(s, text, ids, len(ids) < limit) for s, text, ids in zip(seeds, texts, tokens, strict=True)]
    return Generation(len(prompt_ids), written, time.perf_counter() - start)
