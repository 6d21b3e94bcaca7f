"""`phalanx convert`: import and export Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from phalanx.cli.console import output, print_json, short_count
from phalanx.cli.inference import precision_named, progress_bar
from phalanx.families.language.evaluation.convert_weights import Conversion, convert_weights


def convert(
    *,
    source: Path,
    target: Path,
    to: Literal["huggingface", "phalanx"] | None,
    dtype: str | None,
    tokenizer: Path | None,
    shard_gb: float,
    as_json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.convert` declares its arguments."""
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
