"""`phalanx generate`: write text with a checkpoint."""

from __future__ import annotations

import sys

from phalanx.cli.console import make_safe_for_terminal, print_json
from phalanx.cli.options.models import GenerateArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.generation import Sampling, generate_text
from phalanx.families.language.evaluation.load_weights import load_for_inference
from phalanx.layout.mesh import leave_process_group
from phalanx.nn.precision import find_number_format

_MOST_BYTES = 2**24
"""Bytes of the longest prompt; no model has room for so many."""


def run_generate(asked: GenerateArguments) -> None:
    """Run the subcommand."""
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    if asked.nproc is not None and asked.prompt == "-":
        raise ConfigError("--nproc starts ranks that cannot share standard input; give the text by --prompt TEXT")
    text = _read_prompt(asked.prompt)
    dtype = find_number_format(asked.precision, "--precision")
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    loaded = load_for_inference(asked.checkpoint, device, dtype=dtype, tokenizer=asked.tokenizer, ema=asked.ema)
    # Several continuations come at once, and would be mixed up.
    streaming = asked.count == 1 and not asked.as_json

    def print_piece(_index: int, piece: str) -> None:
        print(make_safe_for_terminal(piece), end="", flush=True)

    generation = generate_text(
        loaded,
        text,
        max_tokens=asked.tokens,
        sampling=sampling,
        seed=asked.seed,
        count=asked.count,
        rank=ranks.rank,
        ranks=ranks.world_size,
        show=print_piece if streaming else lambda index, piece: None,
    )
    leave_process_group()
    if not ranks.first:
        return
    if asked.as_json:
        written = sum(len(continuation.tokens) for continuation in generation.continuations)
        print_json(
            {
                "checkpoint": str(loaded.where),
                "step": loaded.step,
                "prompt": text,
                "prompt_tokens": generation.prompt_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "samples": [
                    {"seed": c.seed, "text": c.text, "tokens": len(c.tokens), "token_ids": c.tokens, "ended": c.ended}
                    for c in generation.continuations
                ],
                "seconds": generation.seconds,
                "tokens_per_second": written / generation.seconds,
            }
        )
    elif streaming:
        print()
    else:
        for number, continuation in enumerate(generation.continuations, start=1):
            print(f"--- {number} of {len(generation.continuations)}, seed {continuation.seed}")
            print(make_safe_for_terminal(text + continuation.text))


def _read_prompt(given: str) -> str:
    """Return the prompt that was given, or that stands on standard input. Raises ConfigError for what is no text."""
    if given == "-":
        content = sys.stdin.buffer.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"standard input holds more than {_MOST_BYTES:,} bytes, which no prompt is")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input is not UTF-8 text (byte {error.start}); convert it, for example with iconv"
            ) from None
    if any("\ud800" <= character <= "\udfff" for character in given):
        raise ConfigError(f"--prompt {ascii(given)[:80]} is not valid text in this terminal's encoding")
    return given
