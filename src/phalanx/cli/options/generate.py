"""Arguments, options and help of `phalanx generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.arguments import Device, Json, ModelPath, PrecisionName, TokenizerPath


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
