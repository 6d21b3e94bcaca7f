"""Arguments, options and help of `phalanx evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Device, Json, ModelPath, PrecisionName, TokenizerPath


def evaluate(
    checkpoint: ModelPath,
    data: Annotated[
        Path | None, typer.Option(help="Folder that phalanx data prepare wrote; by default the data of the run.")
    ] = None,
    split: Annotated[Literal["validation", "train"], typer.Option(help="Which part of the data.")] = "validation",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Score this many samples, spread evenly over the split; by default all.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens a sample; by default that of the run (2048 for imported models).")
    ] = None,
    tokenizer: TokenizerPath = None,
    device: Device = "auto",
    precision: PrecisionName = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on held-out text: the newest one where a run directory is given.

    Each token of the split is a target once, given the tokens before it in its sample.
    """
