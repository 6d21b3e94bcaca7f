"""`phalanx convert`: import and export Hugging Face checkpoints, and import weights of mace-torch."""

from __future__ import annotations

import torch

from phalanx.cli.console import make_progress_bar, open_output, print_json, short_count
from phalanx.cli.options.models import ConvertArguments
from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.convert_weights import convert_weights
from phalanx.nn.precision import find_number_format


def run_convert(asked: ConvertArguments) -> None:
    """Run the subcommand."""
    if asked.source.is_file():
        _import_potential(asked)
        return
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


def _import_potential(asked: ConvertArguments) -> None:
    """Import the state dict of a MACE of mace-torch."""
    for option, value in (
        ("--to", asked.to),
        ("--tokenizer", asked.tokenizer),
        ("--architecture", asked.architecture),
        ("--ema", asked.ema or None),
    ):
        if value is not None:
            raise ConfigError(f"{option} counts for language models alone, which come as folders; leave it out")
    # Their constants come from e3nn, which is an optional extra.
    try:
        from phalanx.families.materials.evaluation.mace_torch import import_mace_torch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{asked.source}: MACE needs the package {error.name}; pip install "phalanx-train[materials]"'
        ) from None
    dtype = find_number_format(asked.dtype, "--dtype") or torch.float32
    done = import_mace_torch(asked.source, asked.target, dtype)
    if asked.as_json:
        print_json(
            {
                "source": str(asked.source),
                "target": str(asked.target),
                "form": "phalanx",
                "parameters": done.parameters,
                "elements": done.elements,
            }
        )
        return
    console = open_output()
    words = f"{short_count(done.parameters)} parameters, {len(done.elements)} elements, cutoff {done.model.cutoff:g} A"
    console.print(f"{done.target}: Phalanx checkpoint of a MACE, {words}")
    console.print(
        f"train from it with phalanx train {done.target}/run.yaml, once its data.sources name your structures"
    )
