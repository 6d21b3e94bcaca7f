"""Arguments that several subcommands take, so that they read, complete and are explained the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.config.families import DEFAULT_FAMILY, find_family
from phalanx.config.fields import all_fields
from phalanx.config.load import full_name, load_run
from phalanx.config.presets import preset_names
from phalanx.errors import PhalanxError


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a `section.field=value` argument for a shell: the fields, then the words a field accepts, or the presets."""
    name, equals, begun = incomplete.partition("=")
    # The family of the run file that is named before; most common is the default, where there is none or a wrong one.
    try:
        family = load_run(Path(str(context.params.get("run")))).model.family
    except PhalanxError:
        family = DEFAULT_FAMILY
    fields = all_fields(find_family(family).run)
    if equals and name == "model.preset":
        return [f"{name}={preset}" for preset in preset_names() if preset.startswith(begun)]
    if equals:
        field = fields.get(full_name(name))
        return [f"{name}={choice}" for choice in (field.choices if field else ()) if choice.startswith(begun)]
    known = [one for one in fields if ".N." not in one]
    short = [one.removeprefix("layout.") for one in known if one.startswith("layout.")] if name else []
    return [f"{one}=" for one in [*known, *short] if one.startswith(name)]


RunFile = Annotated[Path, typer.Argument(metavar="RUN", help="Run file, folder of a run, or name of a recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.FIELD=VALUE",
        help="Fields to change, e.g. training.steps=100; those of the layout also as tp=2.",
        autocompletion=complete_override,
    ),
]
Nproc = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Start N ranks on this machine, one for each device.")
]
ThisDevice = Annotated[str, typer.Option(help="auto, cpu, or the type of this machine's accelerator.")]
BestLayoutFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")]
StudyPage = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the study as one HTML page.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
PRECISION_NAMES = "|".join(all_fields()["layout.precision"].choices)
ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Run directory (its newest whole checkpoint), one checkpoint, or a Hugging Face folder.",
    ),
]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="A tokenizer.json, or a folder with one, in place of the model's own.")
]
AveragedWeights = Annotated[
    bool, typer.Option("--ema", help="Take the moving averages of the weights, of a run with training.ema.")
]
Device = Annotated[str, typer.Option(help="Device type: auto takes the accelerator PyTorch finds, else the CPU.")]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        metavar=PRECISION_NAMES,
        help="Number format; by default that of the run, and for imported models bf16 (fp32 on the CPU).",
    ),
]
