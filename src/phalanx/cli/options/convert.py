"""Arguments, options and help of `phalanx convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import PRECISION_NAMES, Json, TokenizerPath
from phalanx.families.language.huggingface.folder_files import DEFAULT_SHARD_BYTES


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Run directory, one checkpoint of it, or a Hugging Face folder.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")],
    to: Annotated[
        Literal["huggingface", "phalanx"] | None, typer.Option(help="Form of OUT; by default the one IN does not have.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar=PRECISION_NAMES,
            help="Number format of OUT; by default that of IN for Hugging Face, and fp32 for Phalanx (training needs it).",
        ),
    ] = None,
    tokenizer: TokenizerPath = None,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Largest weight file of a Hugging Face folder, in GB (10^9 bytes).")
    ] = DEFAULT_SHARD_BYTES / 1e9,
    as_json: Json = False,
) -> None:
    """Import or export weights: Llama, GPT-2 and MPT.

    Nothing is fetched from a network, and nothing is computed: every number is carried over as it is, unless --dtype
    rounds it. An import has no optimizer state; train from it with training.init_from=OUT.
    """
