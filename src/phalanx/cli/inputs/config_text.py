"""Presets and fields of run files as tables and text, for terminals and for the guides."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.padding import Padding
from rich.text import Text

from phalanx.cli.console import open_output, print_pairs, print_table, short_count
from phalanx.config.document import show_value
from phalanx.config.families import sizes_of
from phalanx.config.fields import Field, SectionInfo
from phalanx.config.model import LanguageModel, Model
from phalanx.config.presets import Preset
from phalanx.report.table import Column, write_markdown_table

Language = tuple[Preset, LanguageModel]
Other = tuple[Preset, Model]
_UNLIKE = 0.045
"""Share by which a count differs from what a name says before the list says so: names are rounded."""


def _count_parameters(model: Model) -> str:
    return short_count(sizes_of(model).parameter_count(model))


def _describe_shape(model: Model) -> str:
    return str(sizes_of(model).in_words(model))


def _describe_heads(model: LanguageModel, kv_heads: str) -> str:
    return str(model.n_heads) + ("" if model.kv_heads == model.n_heads else kv_heads.format(model.kv_heads))


LANGUAGE_COLUMNS: tuple[Column[Language], ...] = (
    Column("preset", lambda row: row[0].name, "left"),
    Column("params", lambda row: _count_parameters(row[1])),
    Column("layers", lambda row: row[1].n_layers),
    Column("width", lambda row: row[1].d_model),
    Column("heads", lambda row: _describe_heads(row[1], "/{}")),
    Column("vocab", lambda row: row[1].vocab_size),
    Column("length", lambda row: row[0].sequence_length),
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
    console.print("\nheads: query/key-value; length: tokens a sample when published.")
    if others:
        console.print()
        print_table(OTHER_COLUMNS, others, indent="", folded=True)
    console.print("\nSources:")
    for source, group in groupby(presets, key=lambda preset: preset.source):
        names = [preset.name for preset in group]
        listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        console.print(Padding(Text(f"{listed}: {source}", "dim"), (0, 0, 0, 2), expand=False))
    unlike = [
        f"{preset.name} has {_count_parameters(preset.model())}" for preset in presets if _differs_from_name(preset)
    ]
    if unlike:
        console.print(f"Parameters are counted; names are those of the publications: {', '.join(unlike)}.")
    console.print("Use one as model.preset=NAME; phalanx config list NAME tells more.")


def _differs_from_name(preset: Preset) -> bool:
    """Return whether a preset has clearly more or fewer parameters than its name says."""
    named, model = preset.named_size, preset.model()
    return named is not None and abs(sizes_of(model).parameter_count(model) / named - 1.0) > _UNLIKE


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
