"""`phalanx config`: list presets, show and check run files, explain their fields; the language family's without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from phalanx.cli.arguments import Json, Overrides, RunFile
from phalanx.cli.console import (
    open_output,
    print_json,
    print_pairs,
    print_table,
    print_warning,
    short_count,
    show_examples,
)
from phalanx.config.check import batch_sizes, global_batch_samples
from phalanx.config.document import show_value
from phalanx.config.families import DEFAULT_FAMILY, FAMILIES, check_parameter_count, find_family, sizes_of
from phalanx.config.fields import Field, SectionInfo, run_sections
from phalanx.config.load import dump_run, load_run
from phalanx.config.model import LanguageModel, Model
from phalanx.config.presets import Preset, describe_recipe, load_preset, preset_names, recipe_names
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, nearest_names
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.sizes import active_parameter_count, model_flops_per_token
from phalanx.families.materials.config import MaterialsRun
from phalanx.remote_files import local_path
from phalanx.report.table import Column, write_markdown_table

config_app = typer.Typer(
    help="Show, check and explain run files; list the presets.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UNLIKE = 0.045
"""Share by which a count differs from what a name says before the list says so: names are rounded."""
_FEWEST_TOKENS = 0.1
"""Training tokens a parameter below which a check warns: a 200th of the compute-optimal number."""
Language = tuple[Preset, LanguageModel]
Other = tuple[Preset, Model]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table, as in the guide.")]


@config_app.command("list", epilog=show_examples("phalanx config list", "phalanx config list mpt-7b"))
def list_presets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET", help="Tell everything about this one.", autocompletion=lambda: list(preset_names())
        ),
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List the model presets, and the recipes.

    Their sizes, shapes, and where the figures come from.
    """
    if name is not None and name not in preset_names():
        matches = nearest_names(name, preset_names())
        raise ConfigError(f"{name} is not a preset" + (f"\nnearest: {', '.join(matches)}" if matches else ""))
    presets = [load_preset(known) for known in preset_names() if name in (None, known)]
    recipes = [known for known in recipe_names() if name in (None, known)]
    if as_json:
        print_json(
            {
                "presets": [
                    {
                        "name": preset.name,
                        "about": preset.about,
                        "source": preset.source,
                        "family": preset.family,
                        "parameters": sizes_of(preset.model()).parameter_count(preset.model()),
                        "published": [
                            {"parameters": printed.parameters, "counts": printed.counts} for printed in preset.published
                        ],
                        "sequence_length": preset.sequence_length,
                        "model": preset.model().model_dump(mode="json"),
                    }
                    for preset in presets
                ],
                "recipes": [{"name": known, "about": describe_recipe(known)} for known in recipes],
            }
        )
    elif markdown:
        print("\n".join(write_markdown_presets(presets)))
    elif name is not None:
        print_preset(presets[0])
    else:
        print_presets(presets)
        print_recipes(recipes)


@config_app.command("show", epilog=show_examples("phalanx config show examples/quickstart.yaml training.steps=900"))
def show_run(run: RunFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved run file.

    Every field, as it is after preset, run file and overrides.
    """
    loaded = load_run(run, overrides or [])
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        print(dump_run(loaded), end="")


@config_app.command(
    "check",
    epilog=show_examples(
        "phalanx config check examples/quickstart.yaml",
        "phalanx config check examples/llama3-8b.yaml --nproc 64 --no-data",
    ),
)
def check_run(
    run: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--devices",
            metavar="N",
            min=1,
            help="Ranks that will train; by default as few as the degrees multiply to.",
        ),
    ] = None,
    no_data: Annotated[
        bool, typer.Option("--no-data", help="Do not look for the data: they are on another machine.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a run file.

    What train would refuse is refused: fields, layout, missing data. Prints what follows from it: parameters, layout, data,
    batch, tokens, floating-point operations. Exit code 2 if it is wrong.
    """
    loaded = load_run(run, overrides or [])
    check_parameter_count(loaded.model)
    # numpy, and for some runs torch, which completion and the other subcommands do without
    beside = import_module("phalanx.cli.config_check").check_layout_and_data(loaded, ranks, data=not no_data)
    summary = summarise_run_file(loaded) | beside
    if as_json:
        print_json(summary)
        return
    open_output().print(f"{run} is sound", style="green")
    print_pairs(_describe_summary(loaded, summary))
    if summary["transfer"]:
        open_output().print()
        print_table(
            import_module("phalanx.training.transfer").TRANSFER_COLUMNS, summary["transfer"], indent="", folded=True
        )
    if summary.get("tokens_per_parameter", math.inf) < _FEWEST_TOKENS:
        print_warning(
            f"{summary['tokens_per_parameter']:.2g} tokens a parameter: a model that learns from its size takes about 20 "
            f"(Hoffmann et al. 2022, arXiv:2203.15556); raise training.steps, or take a smaller model"
        )


@config_app.command(
    "fields", epilog=show_examples("phalanx config fields layout", "phalanx config fields data --family weather")
)
def explain_fields(
    section: Annotated[
        str | None,
        typer.Argument(
            help="Only this section.",
            autocompletion=lambda: [section.name for section in run_sections(find_family(DEFAULT_FAMILY).run)],
        ),
    ] = None,
    family: Annotated[
        str, typer.Option(help="Model family whose run file it is.", autocompletion=FAMILIES.names)
    ] = DEFAULT_FAMILY,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Explain the fields of a run file.

    What each does, what it may be, and what it is by default.
    """
    if family not in FAMILIES.names():
        raise ConfigError(f"--family {family} is not a model family\nnearest: {', '.join(FAMILIES.names())}")
    table = run_sections(find_family(family).run)
    known = [info.name for info in table]
    if section is not None and section not in known:
        matches = nearest_names(section, known)
        raise ConfigError(f"{section} is not a section\nnearest: {matches[0] if matches else ', '.join(known)}")
    chosen = [info for info in table if section in (None, info.name)]
    if as_json:
        # Fields have more than what a program that reads this may rely on.
        told = ("name", "description", "allowed", "required", "default", "choices")
        sections = [
            {
                "name": info.name,
                "description": info.description,
                "required": info.required,
                "fields": [{name: getattr(field, name) for name in told} for field in info.fields],
            }
            for info in chosen
        ]
        print_json({"sections": sections})
    elif markdown:
        print("\n".join(line for info in chosen for line in write_markdown_section(info)))
    else:
        for info in chosen:
            print_section(info)


def summarise_run_file(run: Run) -> dict[str, Any]:
    """Return what follows from a run file alone: sizes, batch, tokens and floating-point operations."""
    samples, sizes = global_batch_samples(run), sizes_of(run.model)
    # What every family can say of itself; text has more to say below.
    summary: dict[str, Any] = {
        "parameters": sizes.parameter_count(run.model),
        "matmul_parameters": sizes.matmul_parameters(run.model),
        "steps": run.training.steps,
        "global_batch_samples": samples,
        "samples": batch_sizes(run).samples_through(run.training.steps),
    }
    # Structures differ in size: what a step computes is not known before.
    if isinstance(run, MaterialsRun):
        return summary | _describe_units(run)
    if not isinstance(run, LanguageRun):
        return summary
    # A warm-up of batches reads fewer samples than steps times the final batch.
    tokens = summary["samples"] * run.data.sequence_length
    per_token = model_flops_per_token(run.model, run.data.sequence_length, run.training.flops)
    return summary | {
        "active_parameters": active_parameter_count(run.model),
        "global_batch_tokens": samples * run.data.sequence_length,
        "tokens": tokens,
        "tokens_per_parameter": tokens / summary["parameters"],
        "flops_convention": run.training.flops,
        "flops_per_token": per_token,
        "flops": per_token * tokens,
    }


def _describe_units(run: MaterialsRun) -> dict[str, Any]:
    """Return what the run file leaves to the training data, in words: the values, where the data are prepared."""
    # Fitting reads manifests by way of torch, which other run files are checked without.
    fitting = import_module("phalanx.families.materials.fitted_units")
    unstated = fitting.unstated_units(run.model)
    if not unstated:
        return {}
    if all(
        (local_path(f"{run.data.prepared}/{source.name}") / "manifest.json").exists() for source in run.data.sources
    ):
        model = fitting.with_units(run.model, fitting.fitting_units(run))
        return {"units_from_data": list(fitting.units_in_words(model, unstated))}
    return {"units_from_data": [*unstated, "known once the data are prepared (phalanx data prepare-graphs)"]}


def _describe_summary(run: Run, summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of `summarise_run_file` for a person, as names and texts."""
    preset = f"{run.model.preset}: " if run.model.preset else ""
    yield "model", f"{preset}{sizes_of(run.model).in_words(run.model)}"
    yield "parameters", f"{summary['parameters']:,} ({short_count(summary['matmul_parameters'])} in matmuls)"
    yield "layout", summary["layout"]
    if summary["data"] is not None:
        yield "data", summary["data"]
    if not isinstance(run, LanguageRun):
        yield "global batch", f"{summary['global_batch_samples']:,} samples"
        yield "run", f"{summary['steps']:,} steps, {short_count(summary['samples'])} samples"
        if summary.get("units_from_data"):
            yield "units from the data", "; ".join(summary["units_from_data"])
        return
    yield (
        "global batch",
        f"{summary['global_batch_samples']:,} samples x {run.data.sequence_length:,} = "
        f"{summary['global_batch_tokens']:,} tokens",
    )
    yield (
        "run",
        f"{summary['steps']:,} steps, {short_count(summary['tokens'])} tokens, "
        f"{summary['tokens_per_parameter']:.3g} a parameter",
    )
    halved = "attention halved" if run.training.flops == "causal" else "attention not halved"
    yield (
        "model FLOPs",
        f"{summary['flops']:.3g} ({short_count(summary['flops_per_token'])} a token; {run.training.flops}: {halved})",
    )


# --- presets and fields as tables and text ------------------------------------------------------------------------------


def _count_parameters(model: Model) -> str:
    return short_count(sizes_of(model).parameter_count(model))


def _describe_shape(model: Model) -> str:
    return str(sizes_of(model).in_words(model))


def _describe_heads(model: LanguageModel, kv_heads: str) -> str:
    return str(model.n_heads) + ("" if model.kv_heads == model.n_heads else kv_heads.format(model.kv_heads))


LANGUAGE_COLUMNS: tuple[Column[Language], ...] = (
    Column("preset", lambda row: row[0].name, "left"),
    Column("params", lambda row: _count_parameters(row[1])),
    Column("depth", lambda row: row[1].n_layers),
    Column("width", lambda row: row[1].d_model),
    Column("heads", lambda row: _describe_heads(row[1], "/{}")),
    Column("vocab", lambda row: row[1].vocab_size),
    Column("seq", lambda row: row[0].sequence_length),
)
OTHER_COLUMNS: tuple[Column[Other], ...] = (
    Column("preset", lambda row: row[0].name, "left"),
    Column("family", lambda row: row[1].family),
    Column("params", lambda row: _count_parameters(row[1])),
    Column("shape", lambda row: _describe_shape(row[1]), "left"),
)


def _split_presets(presets: list[Preset]) -> tuple[list[Language], list[Other]]:
    """Return presets with their models: those of language models, which have columns of their own, and the others."""
    rows = [(preset, preset.model()) for preset in presets]
    language = [(preset, model) for preset, model in rows if isinstance(model, LanguageModel)]
    return language, [(preset, model) for preset, model in rows if not isinstance(model, LanguageModel)]


def print_presets(presets: list[Preset]) -> None:
    """Print presets as tables, and where their figures come from."""
    language, others = _split_presets(presets)
    console = open_output()
    print_table(LANGUAGE_COLUMNS, language, indent="")
    console.print("\nheads: query/key-value; seq: tokens a sample when published.")
    if others:
        console.print()
        print_table(OTHER_COLUMNS, others, indent="", folded=True)
    console.print("\nSources:")
    for source, group in groupby(presets, key=lambda preset: preset.source):
        names = [preset.name for preset in group]
        listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        console.print(Padding(Text(f"{listed}: {source}", "dim"), (0, 0, 0, 2), expand=False))
    unlike = []
    for preset in presets:
        named, model = preset.named_size, preset.model()
        if named is not None and abs(sizes_of(model).parameter_count(model) / named - 1.0) > _UNLIKE:
            unlike.append(f"{preset.name} has {_count_parameters(model)}")
    if unlike:
        console.print(f"Parameters are counted; names are those of the publications: {', '.join(unlike)}.")
    console.print("Use one as model.preset=NAME; phalanx config list NAME tells more.")


def print_recipes(names: Sequence[str]) -> None:
    """Print recipes and what each trains."""
    console = open_output()
    console.print("\nRecipes, whole run files by name, as in phalanx train NAME:")
    width = max(map(len, names))
    for name in names:
        about = Text.assemble(name.ljust(width + 2), (describe_recipe(name), "dim"))
        console.print(Padding(about, (0, 0, 0, 2), expand=False))


def print_preset(preset: Preset) -> None:
    """Print everything about one preset."""
    model = preset.model()
    open_output().print(f"{preset.name}: {preset.about}", style="bold")
    print_pairs(
        [
            ("shape", _describe_shape(model)),
            ("parameters", f"{sizes_of(model).parameter_count(model):,}"),
            *(("published", f"{printed.parameters} ({printed.counts})") for printed in preset.published),
            ("source", preset.source),
            *((field, show_value(value)) for field, value in preset.fields.items()),
        ]
    )


def print_section(info: SectionInfo) -> None:
    """Print the fields of a section of the run file: what each does, what it may be, and its default."""
    console = open_output()
    console.print(Text.assemble((info.name, "bold"), f"  {info.description}"))
    for field in info.fields:
        default = (" required", "yellow") if field.required else (f" = {field.default}", "dim")
        console.print(Text.assemble(f"  {field.name}", default))
        console.print(Padding(f"{field.description} May be {field.allowed}.", (0, 0, 0, 6), expand=False))
    console.print()


def write_markdown_section(info: SectionInfo) -> Iterator[str]:
    """Yield the lines of a Markdown table of a section's fields."""
    columns: tuple[Column[Field], ...] = (
        Column("field", lambda field: f"`{field.name.removeprefix(info.name + '.')}`", "left"),
        Column("default", lambda field: "required" if field.required else f"`{field.default}`", "left"),
        Column("may be", lambda field: field.allowed, "left"),
        Column("what it does", lambda field: field.description, "left"),
    )
    yield from (f"### {info.name}", "", info.description, "")
    yield from write_markdown_table(columns, info.fields)
    yield ""


def _describe_published(preset: Preset) -> str:
    return "; ".join(f"{row.parameters}, {row.counts}" for row in preset.published)


MARKDOWN_LANGUAGE: tuple[Column[Language], ...] = (
    Column("preset", lambda row: f"`{row[0].name}`", "left"),
    Column("parameters", lambda row: f"{sizes_of(row[1]).parameter_count(row[1]):,}"),
    Column("layers", lambda row: row[1].n_layers),
    Column("width", lambda row: row[1].d_model),
    Column("heads", lambda row: _describe_heads(row[1], " ({} kv)")),
    Column("MLP", lambda row: row[1].ff_size),
    Column("vocabulary", lambda row: row[1].vocab_size),
    Column("positions", lambda row: row[1].positions, "left"),
    Column("published as", lambda row: _describe_published(row[0]), "left"),
    Column("source", lambda row: row[0].source, "left"),
)
MARKDOWN_OTHER: tuple[Column[Other], ...] = (
    Column("preset", lambda row: f"`{row[0].name}`", "left"),
    Column("family", lambda row: row[1].family, "left"),
    Column("parameters", lambda row: f"{sizes_of(row[1]).parameter_count(row[1]):,}"),
    Column("shape", lambda row: _describe_shape(row[1]), "left"),
    Column("published as", lambda row: _describe_published(row[0]), "left"),
    Column("source", lambda row: row[0].source, "left"),
)


def write_markdown_presets(presets: list[Preset]) -> Iterator[str]:
    """Yield the lines of Markdown tables of presets."""
    language, others = _split_presets(presets)
    yield from write_markdown_table(MARKDOWN_LANGUAGE, language)
    if others:
        yield ""
        yield from write_markdown_table(MARKDOWN_OTHER, others)
