"""`phalanx data`: prepare text, structures and fields; look at them, verify them; make small data to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.arguments import Json, examples
from phalanx.cli.console import output, print_error, print_json, print_pairs, short_count
from phalanx.cli.data_sample import sample_app
from phalanx.cli.data_science import prepare_fields_of, prepare_graphs_of
from phalanx.cli.progress import progress
from phalanx.data.prepared_folder import MANIFEST
from phalanx.families.language.data.documents import MAX_DOCUMENT_BYTES
from phalanx.families.language.data.open_tokens import open_source
from phalanx.families.language.data.prepare_text import Options, prepare_text
from phalanx.families.language.data.token_shards import PassedOver, read_token_manifest
from phalanx.families.language.data.token_source import TokenSource

data_app = typer.Typer(
    help="Prepare text, structures and fields; look at them, verify them; make small data to begin with.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DEFAULTS = Options()


@data_app.command("prepare", epilog=examples("phalanx data prepare texts/ more.jsonl.gz --out data/texts"))
def prepare_data(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files (.txt .jsonl .parquet .py, also .gz .zst), folders, python-stdlib."
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
        with progress() as report:
            prepare_text(inputs, out, options, workers=workers, max_document_bytes=max_document_bytes, progress=report)
    except KeyboardInterrupt:
        print_error("stopped; what is done is kept: the same command goes on from there")
        raise
    _show(out, json_output)


@data_app.command("show", epilog=examples("phalanx data show data/texts"))
def show(
    path: Annotated[Path, typer.Argument(help="Prepared folder, Megatron prefix, or folder of MDS shards.")],
    json_output: Json = False,
) -> None:
    """Say what prepared data holds."""
    _show(path, json_output)


@data_app.command("verify", epilog=examples("phalanx data verify data/texts"))
def verify(
    path: Annotated[Path, typer.Argument(help="Prepared folder, Megatron prefix, or folder of MDS shards.")],
    json_output: Json = False,
) -> None:
    """Read everything and compare checksums; names the first file that was altered.

    Says so where the format has no checksums to compare.
    """
    splits = _splits(path)
    for source in splits.values():
        source.verify()
    tokens = sum(source.tokens for source in splits.values())
    unchecked = [source.unchecked for source in splits.values() if source.unchecked is not None]
    if json_output:
        print_json({"path": str(path), "verified": not unchecked, "tokens": tokens, "unchecked": unchecked})
        return
    doubts = "; ".join(dict.fromkeys(unchecked))
    found = f"lengths and structure are sound, but {doubts}" if unchecked else "nothing altered"
    output().print(f"{path}: {tokens:,} tokens, {found}", soft_wrap=True, highlight=False)


data_app.command("prepare-graphs", epilog=examples("phalanx data prepare-graphs examples/materials-xtb.yaml"))(
    prepare_graphs_of
)
data_app.command(
    "prepare-fields", epilog=examples("phalanx data prepare-fields examples/climax-small.yaml --out data/fields")
)(prepare_fields_of)
data_app.add_typer(sample_app, name="sample")


def _splits(path: Path) -> dict[str, TokenSource]:
    validation = open_source(path, "validation")
    held_out = {} if validation is None else {"validation": validation}
    return {"train": open_source(path, "train"), **held_out}


def _show(path: Path, json_output: bool) -> None:
    splits = _splits(path)
    facts: dict[str, Any] = {
        name: {"tokens": source.tokens, "documents": source.documents, "text_bytes": source.text_bytes}
        for name, source in splits.items()
    }
    train = splits["train"]
    facts["vocab_size"] = train.vocab_size
    facts["tokenizer"] = None if train.tokenizer is None else str(train.tokenizer)
    passed_over = read_token_manifest(path).passed_over if (path / MANIFEST).exists() else None
    if passed_over is not None:
        facts["passed_over"] = passed_over.model_dump()
    if json_output:
        print_json({"path": str(path), **facts})
        return
    output().print(str(path), soft_wrap=True, highlight=False)
    vocabulary = "not stated by the format" if train.vocab_size is None else f"{train.vocab_size:,}"
    print_pairs(
        [
            *((name, _describe(source)) for name, source in splits.items()),
            ("vocabulary", vocabulary),
            ("tokenizer", facts["tokenizer"] or "none beside the data"),
            *([] if passed_over is None else [("left out", _passed_over_in_words(passed_over))]),
        ]
    )


def _passed_over_in_words(passed_over: PassedOver) -> str:
    documents, files = passed_over.documents, passed_over.files
    return (
        f"{documents:,} document{'' if documents == 1 else 's'} without text, "
        f"{files:,} file{'' if files == 1 else 's'} with other endings"
    )


def _describe(source: TokenSource) -> str:
    text = f"{short_count(source.tokens)} tokens"
    if source.documents is not None:
        text += f" in {source.documents:,} document{'' if source.documents == 1 else 's'}"
    if source.text_bytes and source.tokens:
        text += f", {short_count(source.text_bytes)} bytes of text ({source.text_bytes / source.tokens:.2f} a token)"
    return text
