"""`phalanx convert`: import and export Hugging Face checkpoints."""

from __future__ import annotations

from phalanx.cli.console import make_progress_bar, open_output, print_json, short_count
from phalanx.cli.options.models import ConvertArguments
from phalanx.families.language.evaluation.convert_weights import convert_weights
from phalanx.nn.precision import find_number_format


def run_convert(asked: ConvertArguments) -> None:
    """Run the subcommand."""
    with make_progress_bar() as bar:
        task = bar.add_task("weights")
        done = convert_weights(
            asked.source,
            asked.target,
            to=asked.to,
            dtype=find_number_format(asked.dtype, "--dtype"),
            tokenizer=asked.tokenizer,
            ema=asked.ema,
            architecture=asked.architecture,
            shard_bytes=round(asked.shard_gb * 1e9),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if asked.as_json:
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
