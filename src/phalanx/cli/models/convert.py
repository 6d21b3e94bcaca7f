"""`phalanx convert`: import and export Hugging Face checkpoints, and import weights of mace-torch and of ClimaX."""

from __future__ import annotations

import re

import torch

from phalanx.cli.console import make_progress_bar, open_output, print_json, short_count
from phalanx.cli.options.models import ConvertArguments
from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.convert_weights import convert_weights
from phalanx.families.weather.evaluation.climax_weights import PUBLISHED_HEADS, holds_climax, import_climax
from phalanx.nn.precision import find_number_format


def run_convert(asked: ConvertArguments) -> None:
    """Run the subcommand."""
    climax = asked.source.is_file() and holds_climax(asked.source)
    if not climax:
        for option, value in (("--variables", asked.variables), ("--heads", asked.heads), ("--grid", asked.grid)):
            if value is not None:
                raise ConfigError(f"{option} counts for the state dict of a ClimaX alone; leave it out")
    # Single files are state dicts of other programs; folders are of Hugging Face or ours.
    if asked.source.is_file():
        _refuse_language_options(asked)
        if climax:
            _import_forecaster(asked)
        else:
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


def _refuse_language_options(asked: ConvertArguments) -> None:
    for option, value in (
        ("--to", asked.to),
        ("--tokenizer", asked.tokenizer),
        ("--architecture", asked.architecture),
        ("--ema", asked.ema or None),
    ):
        if value is not None:
            raise ConfigError(f"{option} counts for language models alone, which come as folders; leave it out")


def _import_forecaster(asked: ConvertArguments) -> None:
    """Import the state dict of a ClimaX."""
    done = import_climax(
        asked.source,
        asked.target,
        find_number_format(asked.dtype, "--dtype") or torch.float32,
        variables=None if asked.variables is None else [name.strip() for name in asked.variables.split(",")],
        heads=asked.heads or PUBLISHED_HEADS,
        grid=None if asked.grid is None else _parse_grid(asked.grid),
    )
    model = done.model
    _print_imported(
        asked,
        done.parameters,
        f"ClimaX, {short_count(done.parameters)} parameters, {len(model.variables)} variables on {model.n_lat} x "
        f"{model.n_lon} points",
        "fields",
        variables=model.variables,
        grid=[model.n_lat, model.n_lon],
    )


def _parse_grid(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise ConfigError(f"--grid={text} must be ROWSxCOLUMNS, as in --grid 32x64")
    return int(match[1]), int(match[2])


def _import_potential(asked: ConvertArguments) -> None:
    """Import the state dict of a MACE of mace-torch."""
    # Their constants come from e3nn, which is an optional extra.
    try:
        from phalanx.families.materials.evaluation.mace_torch import import_mace_torch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{asked.source}: MACE needs the package {error.name}; pip install "phalanx-train[materials]"'
        ) from None
    dtype = find_number_format(asked.dtype, "--dtype") or torch.float32
    done = import_mace_torch(asked.source, asked.target, dtype)
    words = f"{short_count(done.parameters)} parameters, {len(done.elements)} elements, cutoff {done.model.cutoff:g} A"
    _print_imported(asked, done.parameters, f"MACE, {words}", "structures", elements=done.elements)


def _print_imported(asked: ConvertArguments, parameters: int, words: str, data: str, **found: object) -> None:
    """Say what was written. words: which model it is. data: what its run file still has to name. found: facts for JSON."""
    if asked.as_json:
        made = {"source": str(asked.source), "target": str(asked.target), "form": "phalanx", "parameters": parameters}
        print_json(made | found)
        return
    console = open_output()
    console.print(f"{asked.target}: Phalanx checkpoint of a {words}")
    console.print(f"train from it with phalanx train {asked.target}/run.yaml, once its data.sources name your {data}")
