"""`phalanx data`: prepare text, structures and fields; look at them, verify them; make small data to begin with.

Structures and fields are prepared as the run file says. What that needs beyond the core is imported when it runs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from phalanx.cli.arguments import Json, Overrides, RunFile
from phalanx.cli.console import (
    print_error,
    print_json,
    print_lines,
    print_pairs,
    print_warning,
    short_count,
    show_examples,
    show_preparation,
)
from phalanx.config.load import load_run
from phalanx.data.prepared_folder import MANIFEST, SampleManifest, file_record
from phalanx.errors import ConfigError
from phalanx.families.language.data.documents import MAX_DOCUMENT_BYTES
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.families.language.data.prepare_text import Options, prepare_text
from phalanx.families.language.data.sample_text import write_tasks, write_text
from phalanx.families.language.data.token_shards import read_token_manifest
from phalanx.families.language.data.token_source import TokenSource
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.weather.config import WeatherRun

if TYPE_CHECKING:
    from phalanx.families.materials.data.graph_shards import Manifest, Statistics

data_app = typer.Typer(
    help="Prepare text, structures and fields; look at them, verify them; make small data to begin with.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
sample_app = typer.Typer(no_args_is_help=True, help="Make data to try the examples with; nothing is downloaded.")
data_app.add_typer(sample_app, name="sample")
_DEFAULTS = Options()
_SHOWN = {"totals", "splits", "statistics", "left_out"}
"""Parts of the manifest of prepared structures that are printed as JSON."""


@data_app.command("prepare", epilog=show_examples("phalanx data prepare texts/ more.jsonl.gz --out data/texts"))
def prepare_data(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files (.txt .jsonl .parquet .arrow .py, also .gz .zst), folders, python-stdlib."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a folder with one; by default one is trained on the text.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Entries of a tokenizer trained here.")] = _DEFAULTS.vocab_size,
    end_token: Annotated[str | None, typer.Option(help="Token that ends documents, if not a usual one.")] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = _DEFAULTS.text_field,
    validation_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of documents held out.")
    ] = _DEFAULTS.validation_fraction,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a shard.")] = _DEFAULTS.shard_tokens,
    max_document_bytes: Annotated[
        int, typer.Option(min=1, help="Longest document taken; tokenizing one takes some 170 times its size in memory.")
    ] = MAX_DOCUMENT_BYTES,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    json_output: Json = False,
) -> None:
    """Tokenize text into memory-mappable shards.

    Stopped at any point, the same command goes on where it was. Run again when all is done, it does nothing.
    """
    options = Options(
        tokenizer=None if tokenizer is None else str(tokenizer),
        vocab_size=vocab_size,
        end_token=end_token,
        text_field=text_field,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
    )
    try:
        with show_preparation() as report:
            prepare_text(inputs, out, options, workers=workers, max_document_bytes=max_document_bytes, progress=report)
    except KeyboardInterrupt:
        # whole shards stay, so nothing is lost
        print_error("stopped; what is done is kept: the same command goes on from there")
        raise
    _print_sources(str(out), json_output)


@data_app.command("show", epilog=show_examples("phalanx data show data/texts"))
def show_data(
    path: Annotated[str, typer.Argument(help="Prepared folder or its address, Megatron prefix, folder of MDS shards.")],
    json_output: Json = False,
) -> None:
    """Say what prepared data holds."""
    _print_sources(path, json_output)


@data_app.command("verify", epilog=show_examples("phalanx data verify data/texts"))
def verify_data(
    path: Annotated[str, typer.Argument(help="Prepared folder or its address, Megatron prefix, folder of MDS shards.")],
    json_output: Json = False,
) -> None:
    """Read everything and compare checksums; names the first file that was altered.

    Says so where the format has no checksums to compare.
    """
    splits = _open_splits(path)
    for source in splits.values():
        source.verify()
    tokens = sum(source.tokens for source in splits.values())
    unchecked = [source.unchecked for source in splits.values() if source.unchecked is not None]
    if json_output:
        print_json({"path": path, "verified": not unchecked, "tokens": tokens, "unchecked": unchecked})
        return
    # Both splits of a folder are in the same format: one sentence for both
    doubts = "; ".join(dict.fromkeys(unchecked))
    found = f"lengths and structure are sound, but {doubts}" if unchecked else "nothing altered"
    print_lines([f"{path}: {tokens:,} tokens, {found}"])


def _open_splits(address: str) -> dict[str, TokenSource]:
    path = token_path(address)
    validation = open_source(path, "validation")
    held_out = {} if validation is None else {"validation": validation}
    return {"train": open_source(path, "train"), **held_out}


def _print_sources(path: str, json_output: bool) -> None:
    """Print what a folder of tokens holds: sizes of its splits, its tokenizer, and what preparing left out."""
    splits = _open_splits(path)
    summary: dict[str, Any] = {
        name: {"tokens": source.tokens, "documents": source.documents, "text_bytes": source.text_bytes}
        for name, source in splits.items()
    }
    train = splits["train"]
    summary["vocab_size"] = train.vocab_size
    summary["tokenizer"] = None if train.tokenizer is None else str(train.tokenizer)
    folder = token_path(path)
    passed_over = read_token_manifest(folder).passed_over if (folder / MANIFEST).exists() else None
    if passed_over is not None:
        summary["passed_over"] = passed_over.model_dump()
    if json_output:
        print_json({"path": path, **summary})
        return
    print_lines([path])
    vocabulary = "not stated by the format" if train.vocab_size is None else f"{train.vocab_size:,}"
    pairs = [
        *((name, _describe_source(source)) for name, source in splits.items()),
        ("vocabulary", vocabulary),
        ("tokenizer", summary["tokenizer"] or "none beside the data"),
    ]
    if passed_over is not None:
        documents, files = passed_over.documents, passed_over.files
        left_out = (
            f"{documents:,} document{'' if documents == 1 else 's'} without text, "
            f"{files:,} file{'' if files == 1 else 's'} with other endings"
        )
        pairs.append(("left out", left_out))
    print_pairs(pairs)


def _describe_source(source: TokenSource) -> str:
    text = f"{short_count(source.tokens)} tokens"
    if source.documents is not None:
        text += f" in {source.documents:,} document{'' if source.documents == 1 else 's'}"
    if source.text_bytes and source.tokens:
        text += f", {short_count(source.text_bytes)} bytes of text ({source.text_bytes / source.tokens:.2f} a token)"
    return text


# --- structures and fields ---------------------------------------------------------------------------------------------


@data_app.command("prepare-graphs", epilog=show_examples("phalanx data prepare-graphs examples/materials-xtb.yaml"))
def prepare_graphs(
    run: RunFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    json_output: Json = False,
) -> None:
    """Prepare the structures of a materials run: check them, find neighbours, write shards into data.prepared.

    Says what there is, and the units of the model's branches that fit it. Stopped at any point, the same command goes on
    where it was. Run again when all is done, it only says so.
    """
    loaded = load_run(run, overrides or [], trains=False)
    if not isinstance(loaded, MaterialsRun):
        raise ConfigError(
            f"{run} has model.family={loaded.model.family}; prepare-graphs takes runs of family materials"
        )
    # Structures to score a trained model on need not have all labels that training takes.
    for problem in loaded.find_training_problems():
        print_warning(f"training would refuse this: {problem.text}")
    prepare = import_module("phalanx.families.materials.data.prepare_structures").prepare_graphs
    try:
        with show_preparation() as report:
            manifests: dict[str, Manifest] = prepare(loaded.data, workers=workers, progress=report)
    except KeyboardInterrupt:
        print_error("stopped; what is done is kept: the same command goes on from there")
        raise
    fitting = import_module("phalanx.families.materials.fitted_units").fitting_units(loaded, manifests)
    if json_output:
        described = {name: manifest.model_dump(mode="json", include=_SHOWN) for name, manifest in manifests.items()}
        print_json({"prepared": loaded.data.prepared, "sources": described, "model": fitting})
        return
    for name, manifest in manifests.items():
        parts = ", ".join(f"{part} {counts.structures:,}" for part, counts in manifest.splits.items())
        total = manifest.totals
        words = f"{total.structures:,} structures ({parts}), {total.atoms:,} atoms, {total.edges:,} edges"
        if manifest.left_out:
            words += f"; {manifest.left_out:,} left out, which no file of split lists"
        print_lines([f"{Path(loaded.data.prepared) / name}: {words}"])
        if said := describe_charges(manifest.statistics):
            print_lines([f"  {said}"])
    print_lines(["units that fit the training split, for the run file:"])
    print_lines([yaml.safe_dump({"model": fitting}, sort_keys=False, width=120).rstrip()])


def describe_charges(statistics: Statistics) -> str:
    """Return which total charges structures have, where not all of them are known to be neutral; else nothing."""
    counts = statistics.total_charges
    parts = [f"{charge:+d} in {count:,}" for charge, count in counts.items() if charge]
    ions = f"total charges: {', '.join(parts)}, 0 in {counts.get(0, 0):,} structures" if parts else ""
    unknown = statistics.taken_for_neutral
    taken = f"{unknown:,} structures say nothing of their total charge and are taken for neutral" if unknown else ""
    return "; ".join(part for part in (ions, taken) if part)


@data_app.command(
    "prepare-fields", epilog=show_examples("phalanx data prepare-fields examples/climax-small.yaml --out data/fields")
)
def prepare_fields(
    run: RunFile,
    out: Annotated[Path, typer.Option(help="Folder to write; of several sources, one folder each inside.")],
    overrides: Overrides = None,
    json_output: Json = False,
) -> None:
    """Write the fields of a weather run in the form that is read fastest, with everything checked on the way.

    Says what to put under data.sources in place of the files. Each folder appears when it is whole.
    """
    loaded = load_run(run, overrides or [])
    if not isinstance(loaded, WeatherRun):
        raise ConfigError(f"{run} has model.family={loaded.model.family}; prepare-fields takes runs of family weather")
    data = loaded.data
    prepare = import_module("phalanx.families.weather.data.prepare_fields").prepare_fields
    written: list[str] = []
    for number, source in enumerate(data.sources):
        folder = out if len(data.sources) == 1 else out / str(number)
        with show_preparation() as report:
            prepare(
                source,
                folder,
                variables=list(dict.fromkeys([*data.inputs, *data.target_variables])),
                statics=data.static,
                skip_gaps=data.gaps == "skip",
                time_tolerance_hours=data.time_tolerance_hours,
                check_units=data.check_units,
                cache_mb=data.cache_mb,
                progress=lambda done, total, what=source.path: report(f"writing {what}", done, total),
            )
        written.append(str(folder))
    if json_output:
        print_json({"sources": written})
    else:
        print_lines([f"data.sources: [{', '.join(written)}]"])


# --- samples -----------------------------------------------------------------------------------------------------------


@sample_app.command("weather", epilog=show_examples("phalanx data sample weather --out data/weather"))
def sample_weather(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    days: Annotated[int, typer.Option(min=1, help="Days to simulate, two frames each.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Another number makes other weather.")] = 0,
    json_output: Json = False,
) -> None:
    """Simulate a global atmosphere and write winds, temperatures and geopotential as netCDF.

    A quasi-geostrophic model of three levels on the 5.625 degree grid: 300 days are 13 MB and take half a minute. The same
    seed gives the same bytes on the same machine.
    """
    write = import_module("phalanx.families.weather.data.sample_weather").write_weather
    with show_preparation() as report:
        _print_sample(out, write(out, days=days, seed=seed, progress=report), json_output)


@sample_app.command("molecules", epilog=show_examples("phalanx data sample molecules --out data/molecules"))
def sample_molecules(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    trajectories: Annotated[
        int, typer.Option(min=4, help="Trajectories of clusters, ten structures each; half as many of crystals.")
    ] = 80,
    seed: Annotated[int, typer.Option(min=0, help="Another number makes other structures.")] = 0,
    json_output: Json = False,
) -> None:
    """Simulate metal clusters and alloy crystals and write energies, forces and stresses as two .npz files.

    Molecular dynamics with effective medium theory: 1,200 structures are 1 MB and take half a minute.
    """
    write = import_module("phalanx.families.materials.data.samples.molecules").write_molecules
    with show_preparation() as report:
        _print_sample(out, write(out, trajectories=trajectories, seed=seed, progress=report), json_output)


@sample_app.command("grains", epilog=show_examples("phalanx data sample grains --out data/grains"))
def sample_grains(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    polycrystals: Annotated[int, typer.Option(min=4, help="Polycrystals of 30 to 60 grains.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Another number makes other polycrystals.")] = 0,
    json_output: Json = False,
) -> None:
    """Make polycrystals that conduct heat and write them as graphs of grains and faces, one .npz file.

    Voronoi cells whose temperatures a finite-volume balance gives: 400 take half a minute.
    """
    write = import_module("phalanx.families.materials.data.samples.grains").write_grains
    with show_preparation() as report:
        _print_sample(out, write(out, polycrystals=polycrystals, seed=seed, progress=report), json_output)


@sample_app.command("plate", epilog=show_examples("phalanx data sample plate --out data/plate"))
def sample_plate(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    plates: Annotated[int, typer.Option(min=4, help="Plates, each with a hole and a load of its own.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Another number makes other plates.")] = 0,
    json_output: Json = False,
) -> None:
    """Make plates with a hole under load and write their meshes as graphs, one .npz file.

    Displacements and stresses by finite elements in plane stress: 400 take some seconds.
    """
    write = import_module("phalanx.families.materials.data.samples.plate").write_plates
    with show_preparation() as report:
        _print_sample(out, write(out, plates=plates, seed=seed, progress=report), json_output)


@sample_app.command("text", epilog=show_examples("phalanx data sample text --out data/text"))
def sample_text(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    json_output: Json = False,
) -> None:
    """Tokenize some packages of Python's standard library, 5 MB of source text, with a vocabulary of 2,048 tokens."""
    with show_preparation() as report:
        write_text(out, workers=workers, progress=report)
    record = file_record(out / MANIFEST)
    sample = SampleManifest(kind="text", seed=0, files=[record])
    _print_sample(out, sample, json_output)


@sample_app.command("icl", epilog=show_examples("phalanx data sample icl --out data/icl"))
def sample_icl(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    questions: Annotated[int, typer.Option(min=1, help="Most questions of a file.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Another number asks other questions.")] = 0,
    json_output: Json = False,
) -> None:
    """Write four files of in-context tasks: language modelling, multiple choice, schema, and generated answers.

    In the form of LLM Foundry's files, made of docstrings of Python's standard library that the sample text does not hold.
    """
    _print_sample(out, write_tasks(out, questions=questions, seed=seed), json_output)


def _print_sample(folder: Path, sample: SampleManifest, json_output: bool) -> None:
    """Print the files of a sample with their checksums."""
    if json_output:
        print_json({"folder": str(folder), **sample.model_dump(mode="json")})
        return
    print_lines([f"{folder / file.name}: {file.bytes / 1e6:.2f} MB, sha256 {file.sha256}" for file in sample.files])
