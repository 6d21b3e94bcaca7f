"""`phalanx config`: list presets, show and check run files, explain their fields. Imports torch for checks alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.cli.arguments import Json, Overrides, RunFile, examples
from phalanx.cli.console import output, print_json, print_pairs, short_count
from phalanx.config.check import global_batch_samples
from phalanx.config.document import show_value
from phalanx.config.families import DEFAULT_FAMILY, FAMILIES, find_family
from phalanx.config.fields import Field, SectionInfo, nearest_names, sections
from phalanx.config.load import dump_run, load_run
from phalanx.config.model import LanguageModel, Model
from phalanx.config.presets import Preset, load_preset, preset_names
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.sizes import model_flops_per_token
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.sizes import check_parameter_count, sizes_of

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


@config_app.command("list", epilog=examples("phalanx config list", "phalanx config list mpt-7b"))
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
        print_json({"presets": [_preset_facts(preset) for preset in presets]})
    elif markdown:
        print("\n".join(_markdown_presets(presets)))
    elif name is not None:
        _print_preset(presets[0])
    else:
        _print_presets(presets)


@config_app.command(epilog=examples("phalanx config show examples/quickstart.yaml training.steps=900"))
def show(run: RunFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved run file.

    Every field, as it is after preset, run file and overrides.
    """
    loaded = load_run(run, overrides or [])
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        print(dump_run(loaded), end="")


@config_app.command(
    epilog=examples(
        "phalanx config check examples/quickstart.yaml",
        "phalanx config check examples/llama3-8b.yaml --nproc 64 --no-data",
    )
)
def check(
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
    # What models may be split into is declared beside them, with torch, which the other subcommands do without.
    beside = import_module("phalanx.cli.config_check").check_beside(loaded, ranks, data=not no_data)
    facts = run_facts(loaded) | beside
    if as_json:
        print_json(facts)
        return
    output().print(f"{run} is sound", style="green")
    print_pairs(_facts_in_words(loaded, facts))


@config_app.command(epilog=examples("phalanx config fields layout", "phalanx config fields data --family weather"))
def fields(
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
        print_json({"sections": [_section_facts(info) for info in chosen]})
    elif markdown:
        print("\n".join(line for info in chosen for line in _markdown_section(info)))
    else:
        for info in chosen:
            _print_section(info)


def run_facts(run: Run) -> dict[str, Any]:
    """What follows from a run file without knowing the devices: sizes, batch, tokens and floating-point operations."""
    samples, sizes = global_batch_samples(run), sizes_of(run.model)
    facts: dict[str, Any] = {
        "parameters": sizes.parameter_count(run.model),
        "matmul_parameters": sizes.matmul_parameters(run.model),
        "steps": run.training.steps,
        "global_batch_samples": samples,
        "samples": samples * run.training.steps,
    }
    if isinstance(run, MaterialsRun):
        return facts | _units_from_data(run)
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


def _units_from_data(run: MaterialsRun) -> dict[str, Any]:
    """Return what the run file leaves to the training data, in words: the values, where the data are prepared."""
    fitting = import_module("phalanx.families.materials.data.fitted_units")
    unstated = fitting.unstated_units(run.model)
    if not unstated:
        return {}
    if all((Path(run.data.prepared) / source.name / "manifest.json").exists() for source in run.data.sources):
        model = fitting.with_units(run.model, fitting.fitting_units(run))
        return {"units_from_data": list(fitting.units_in_words(model, unstated))}
    return {"units_from_data": [*unstated, "known once the data are prepared (phalanx data prepare-graphs)"]}


def _facts_in_words(run: Run, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
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


def _print_presets(presets: list[Preset]) -> None:
    console = output()
    console.print(_language_table([(p, m) for p in presets if isinstance(m := p.model(), LanguageModel)]))
    console.print("\nheads: query/key-value; length: tokens a sample when published.")
    others = [(p, m) for p in presets if not isinstance(m := p.model(), LanguageModel)]
    if others:
        console.print()
        console.print(_other_table(others))
    unlike = [f"{preset.name} has {_parameters(preset.model())}" for preset in presets if _unlike_its_name(preset)]
    console.print("\nSources:")
    for source, group in groupby(presets, key=lambda preset: preset.source):
        names = [preset.name for preset in group]
        listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        console.print(Padding(Text(f"{listed}: {source}", "dim"), (0, 0, 0, 2), expand=False))
    if unlike:
        console.print(f"Parameters are counted; names are those of the publications: {', '.join(unlike)}.")
    console.print("Use one as model.preset=NAME; phalanx config list NAME tells more.")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("preset", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _language_table(presets: list[tuple[Preset, LanguageModel]]) -> Table:
    table = _table("params", "layers", "width", "heads", "vocab", "length")
    for preset, model in presets:
        heads = f"{model.n_heads}" if model.kv_heads == model.n_heads else f"{model.n_heads}/{model.kv_heads}"
        numbers = (model.n_layers, model.d_model, heads, model.vocab_size, preset.sequence_length)
        table.add_row(preset.name, _parameters(model), *map(str, numbers))
    return table


def _other_table(presets: list[tuple[Preset, Model]]) -> Table:
    table = _table("family", "params")
    table.add_column("shape")
    for preset, model in presets:
        table.add_row(preset.name, model.family, _parameters(model), sizes_of(model).in_words(model))
    return table


def _parameters(model: Model) -> str:
    return short_count(sizes_of(model).parameter_count(model))


def _unlike_its_name(preset: Preset) -> bool:
    """Whether a preset has clearly more or fewer parameters than its name says."""
    named, model = preset.named_size, preset.model()
    return named is not None and abs(sizes_of(model).parameter_count(model) / named - 1.0) > _UNLIKE


def _print_preset(preset: Preset) -> None:
    model = preset.model()
    output().print(f"{preset.name}: {preset.about}", style="bold")
    print_pairs(
        [
            ("shape", sizes_of(model).in_words(model)),
            ("parameters", f"{sizes_of(model).parameter_count(model):,}"),
            *(("published", f"{printed.parameters} ({printed.counts})") for printed in preset.published),
            ("source", preset.source),
            *((field, show_value(value)) for field, value in preset.fields.items()),
        ]
    )


def _print_section(info: SectionInfo) -> None:
    console = output()
    console.print(Text.assemble((info.name, "bold"), f"  {info.description}"))
    for field in info.fields:
        default = (" required", "yellow") if field.required else (f" = {field.default}", "dim")
        console.print(Text.assemble(f"  {field.name}", default))
        console.print(Padding(f"{field.description} May be {field.allowed}.", (0, 0, 0, 6), expand=False))
    console.print()


def _markdown_section(info: SectionInfo) -> Iterator[str]:
    yield f"### {info.name}"
    yield ""
    yield info.description
    yield ""
    yield "| field | default | may be | what it does |"
    yield "| --- | --- | --- | --- |"
    for field in info.fields:
        default = "required" if field.required else f"`{field.default}`"
        yield f"| `{field.name.removeprefix(info.name + '.')}` | {default} | {field.allowed} | {field.description} |"
    yield ""


def _markdown_presets(presets: list[Preset]) -> Iterator[str]:
    yield "| preset | parameters | layers | width | heads | MLP | vocabulary | positions | published as | source |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | --- |"
    others: list[str] = []
    for preset in presets:
        model, published = preset.model(), "; ".join(f"{row.parameters}, {row.counts}" for row in preset.published)
        count = f"{sizes_of(model).parameter_count(model):,}"
        if not isinstance(model, LanguageModel):
            shape = sizes_of(model).in_words(model)
            others.append(f"| `{preset.name}` | {model.family} | {count} | {shape} | {published} | {preset.source} |")
            continue
        heads = f"{model.n_heads}" if model.kv_heads == model.n_heads else f"{model.n_heads} ({model.kv_heads} kv)"
        yield (
            f"| `{preset.name}` | {count} | {model.n_layers} | {model.d_model} | {heads} "
            f"| {model.ff_size} | {model.vocab_size} | {model.positions} | {published} | {preset.source} |"
        )
    if others:
        yield from ("", "| preset | family | parameters | shape | published as | source |")
        yield "| --- | --- | ---: | --- | --- | --- |"
        yield from others


def _preset_facts(preset: Preset) -> dict[str, Any]:
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


def _section_facts(info: SectionInfo) -> dict[str, Any]:
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
