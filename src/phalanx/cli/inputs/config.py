"""`phalanx config`: list presets, show and check run files, explain their fields. Imports torch for checks alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.arguments import Json, Overrides, RunFile, show_examples
from phalanx.cli.console import open_output, print_json, print_pairs, short_count
from phalanx.cli.inputs.config_text import (
    print_preset,
    print_presets,
    print_section,
    write_markdown_presets,
    write_markdown_section,
)
from phalanx.config.check import global_batch_samples
from phalanx.config.families import DEFAULT_FAMILY, FAMILIES, check_parameter_count, find_family, sizes_of
from phalanx.config.fields import Field, SectionInfo, nearest_names, sections
from phalanx.config.load import dump_run, load_run
from phalanx.config.presets import Preset, load_preset, preset_names
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.sizes import model_flops_per_token
from phalanx.families.materials.config import MaterialsRun

config_app = typer.Typer(
    help="Show, check and explain run files; list the presets.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UNLIKE = 0.045
"""Share by which a count differs from what a name says before the list says so: names are rounded."""
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
    """List the model presets.

    Their sizes, shapes, and where the figures come from.
    """
    if name is not None and name not in preset_names():
        matches = nearest_names(name, preset_names())
        raise ConfigError(f"{name} is not a preset" + (f"\nnearest: {', '.join(matches)}" if matches else ""))
    presets = [load_preset(known) for known in preset_names() if name in (None, known)]
    if as_json:
        print_json({"presets": [_summarise_preset(preset) for preset in presets]})
    elif markdown:
        print("\n".join(write_markdown_presets(presets)))
    elif name is not None:
        print_preset(presets[0])
    else:
        print_presets(presets)


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
    # what models may be split into is declared beside them, with torch, which the other subcommands do without
    beside = import_module("phalanx.cli.inputs.check_run").check_layout_and_data(loaded, ranks, data=not no_data)
    facts = summarise_run_file(loaded) | beside
    if as_json:
        print_json(facts)
        return
    open_output().print(f"{run} is sound", style="green")
    print_pairs(_describe_facts(loaded, facts))


@config_app.command(
    "fields", epilog=show_examples("phalanx config fields layout", "phalanx config fields data --family weather")
)
def explain_fields(
    section: Annotated[
        str | None,
        typer.Argument(
            help="Only this section.",
            autocompletion=lambda: [section.name for section in sections(find_family(DEFAULT_FAMILY).run)],
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
    table = sections(find_family(family).run)
    known = [info.name for info in table]
    if section is not None and section not in known:
        matches = nearest_names(section, known)
        raise ConfigError(f"{section} is not a section\nnearest: {matches[0] if matches else ', '.join(known)}")
    chosen = [info for info in table if section in (None, info.name)]
    if as_json:
        print_json({"sections": [_summarise_section(info) for info in chosen]})
    elif markdown:
        print("\n".join(line for info in chosen for line in write_markdown_section(info)))
    else:
        for info in chosen:
            print_section(info)


def summarise_run_file(run: Run) -> dict[str, Any]:
    """Return what follows from a run file alone: sizes, batch, tokens and floating-point operations."""
    samples, sizes = global_batch_samples(run), sizes_of(run.model)
    facts: dict[str, Any] = {
        "parameters": sizes.parameter_count(run.model),
        "matmul_parameters": sizes.matmul_parameters(run.model),
        "steps": run.training.steps,
        "global_batch_samples": samples,
        "samples": samples * run.training.steps,
    }
    if isinstance(run, MaterialsRun):
        return facts | _describe_units(run)
    if not isinstance(run, LanguageRun):
        return facts
    tokens = samples * run.data.sequence_length * run.training.steps
    per_token = model_flops_per_token(run.model, run.data.sequence_length, run.training.flops)
    return facts | {
        "global_batch_tokens": samples * run.data.sequence_length,
        "tokens": tokens,
        "tokens_per_parameter": tokens / facts["parameters"],
        "flops_convention": run.training.flops,
        "flops_per_token": per_token,
        "flops": per_token * tokens,
    }


def _describe_units(run: MaterialsRun) -> dict[str, Any]:
    """Return what the run file leaves to the training data, in words: the values, where the data are prepared."""
    fitting = import_module("phalanx.families.materials.fitted_units")
    unstated = fitting.unstated_units(run.model)
    if not unstated:
        return {}
    if all((Path(run.data.prepared) / source.name / "manifest.json").exists() for source in run.data.sources):
        model = fitting.with_units(run.model, fitting.fitting_units(run))
        return {"units_from_data": list(fitting.units_in_words(model, unstated))}
    return {"units_from_data": [*unstated, "known once the data are prepared (phalanx data prepare-graphs)"]}


def _describe_facts(run: Run, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    preset = f"{run.model.preset}: " if run.model.preset else ""
    yield "model", f"{preset}{sizes_of(run.model).in_words(run.model)}"
    yield "parameters", f"{facts['parameters']:,} ({short_count(facts['matmul_parameters'])} in matmuls)"
    yield "layout", facts["layout"]
    if facts["data"] is not None:
        yield "data", facts["data"]
    if not isinstance(run, LanguageRun):
        yield "global batch", f"{facts['global_batch_samples']:,} samples"
        yield "run", f"{facts['steps']:,} steps, {short_count(facts['samples'])} samples"
        if facts.get("units_from_data"):
            yield "units from the data", "; ".join(facts["units_from_data"])
        return
    yield (
        "global batch",
        f"{facts['global_batch_samples']:,} samples x {run.data.sequence_length:,} = "
        f"{facts['global_batch_tokens']:,} tokens",
    )
    yield (
        "run",
        f"{facts['steps']:,} steps, {short_count(facts['tokens'])} tokens, "
        f"{facts['tokens_per_parameter']:.3g} a parameter",
    )
    halved = "attention halved" if run.training.flops == "causal" else "attention not halved"
    yield (
        "model FLOPs",
        f"{facts['flops']:.3g} ({short_count(facts['flops_per_token'])} a token; {run.training.flops}: {halved})",
    )


def _summarise_preset(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "about": preset.about,
        "source": preset.source,
        "family": preset.family,
        "parameters": sizes_of(preset.model()).parameter_count(preset.model()),
        "published": [{"parameters": printed.parameters, "counts": printed.counts} for printed in preset.published],
        "sequence_length": preset.sequence_length,
        "model": preset.model().model_dump(mode="json"),
    }


def _summarise_section(info: SectionInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "description": info.description,
        "required": info.required,
        "fields": [_field_facts(field) for field in info.fields],
    }


def _field_facts(field: Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "description": field.description,
        "allowed": field.allowed,
        "required": field.required,
        "default": field.default,
        "choices": list(field.choices),
    }
