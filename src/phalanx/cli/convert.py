"""`phalanx convert`: import and export Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import Json
from phalanx.cli.console import output, print_json, short_count
from phalanx.cli.inference import TokenizerPath, precision_named, progress_bar
from phalanx.evaluate.convert import Conversion
from phalanx.evaluate.convert import convert as convert_weights
from phalanx.layout.precision import PRECISIONS
from phalanx.models.language.huggingface.write import DEFAULT_SHARD_BYTES


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
            metavar="|".join(PRECISIONS),
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
    chosen = None if dtype is None else precision_named(dtype, "--dtype")
    with progress_bar() as bar:
        task = bar.add_task("weights")
        done = convert_weights(
            source,
            target,
            to=to,
            dtype=chosen,
            tokenizer=tokenizer,
            shard_bytes=round(shard_gb * 1e9),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json(_facts(done))
    else:
        _print_result(done)


def _facts(done: Conversion) -> dict[str, object]:
    return {
        "source": str(done.source),
        "target": str(done.target),
        "form": done.form,
        "architecture": done.architecture,
        "parameters": done.parameters,
        "dtype": done.dtype,
        "tokenizer": done.tokenizer,
    }


def _print_result(done: Conversion) -> None:
    console = output()
    form = f"Hugging Face folder ({done.architecture})" if done.architecture else "Phalanx checkpoint"
    console.print(f"{done.target}: {form}, {short_count(done.parameters)} parameters, {done.dtype}")
    if not done.tokenizer:
        console.print("no tokenizer went along: none was found; give one with --tokenizer", style="yellow")
    if done.form == "phalanx":
        console.print(f"train from it with training.init_from={done.target} and the model section in model.yaml")
