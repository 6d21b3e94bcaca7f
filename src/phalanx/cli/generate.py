"""`phalanx generate`: write text with a checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phalanx.cli.arguments import Json
from phalanx.cli.console import print_json
from phalanx.cli.inference import Device, ModelPath, PrecisionName, TokenizerPath, load
from phalanx.evaluate.generate import Generation, generate_text
from phalanx.evaluate.load import LoadedModel
from phalanx.models.language.sampling import Sampling


def generate(
    checkpoint: ModelPath,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from stdin.")] = "",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to write at most; by default 128, or as many as there is room for."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1 safer, above 1 wilder; 0 takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among this many most likely tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the fewest tokens that together have this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Continuations to write, with seeds SEED, SEED+1, ...")] = 1,
    tokenizer: TokenizerPath = None,
    device: Device = "auto",
    precision: PrecisionName = None,
    as_json: Json = False,
) -> None:
    """Write text with a checkpoint, from the newest one where a run directory is given.

    Text goes to stdout as it comes. It ends where the model ends the document, or after --tokens. With an empty prompt
    the model begins a document of its own.
    """
    sampling = Sampling(temperature, top_k, top_p)
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(checkpoint, device=device, precision=precision, tokenizer=tokenizer)
    streaming = count == 1 and not as_json
    generation = generate_text(
        loaded,
        text,
        max_tokens=tokens,
        sampling=sampling,
        seed=seed,
        count=count,
        show=_print_piece if streaming else lambda index, piece: None,
    )
    if as_json:
        print_json(_facts(loaded, text, sampling, generation))
    elif streaming:
        print()
    else:
        _print_all(text, generation)


def _print_piece(_index: int, piece: str) -> None:
    print(piece, end="", flush=True)


def _print_all(prompt: str, generation: Generation) -> None:
    for number, continuation in enumerate(generation.continuations, start=1):
        print(f"--- {number} of {len(generation.continuations)}, seed {continuation.seed}")
        print(prompt + continuation.text)


def _facts(loaded: LoadedModel, prompt: str, sampling: Sampling, generation: Generation) -> dict[str, object]:
    written = sum(len(continuation.tokens) for continuation in generation.continuations)
    return {
        "checkpoint": str(loaded.where),
        "step": loaded.step,
        "prompt": prompt,
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
