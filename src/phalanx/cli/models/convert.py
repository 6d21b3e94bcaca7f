"""`phalanx convert`: import and export Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from phalanx.cli.console import make_progress_bar, open_output, print_json, short_count
from phalanx.families.language.evaluation.convert_weights import convert_weights
from phalanx.nn.precision import find_number_format


def run_convert(
    *,
    source: Path,
    target: Path,
    to: Literal["huggingface", "phalanx"] | None,
    dtype: str | None,
    tokenizer: Path | None,
    architecture: str | None,
    shard_gb: float,
    as_json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.models` declares its arguments."""
    with make_progress_bar() as bar:
        task = bar.add_task("weights")
        done = convert_weights(
            source,
            target,
            to=to,
            dtype=find_number_format(dtype, "--dtype"),
            tokenizer=tokenizer,
            architecture=architecture,
            shard_bytes=round(shard_gb * 1e9),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json(
            {
                "source": str(done.source),
                "target": str(done.target),
                "form": done.form,
                "architecture": done.architecture,
                "parameters": done.parameters,
                "dtype": done.dtype,
                "tokenizer": done.tokenizer,
            }
        )
    else:
        console = open_output()
        form = f"Hugging Face folder ({done.architecture})" if done.architecture else "Phalanx checkpoint"
        console.print(f"{done.target}: {form}, {short_count(done.parameters)} parameters, {done.dtype}")
        if not done.tokenizer:
            console.print("no tokenizer went along: none was found; give one with --tokenizer", style="yellow")
        if done.form == "phalanx":
            console.print(f"train from it with training.init_from={done.target} and the model section in model.yaml")
