"""Single files of a checkpoint folder that may come from a stranger: JSON, and the tokenizer that travels with weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Self

from phalanx.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest weight file that is written."""
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Folder of a run directory that holds the run's tokenizer."""
_COMPANIONS = (SETTINGS, "special_tokens_map.json", "chat_template.jinja")


def is_huggingface_folder(path: Path) -> bool:
    """Return whether `path` looks like a Hugging Face checkpoint."""
    return (path / "config.json").is_file()


def file_inside(path: Path, name: str) -> Path:
    """Return the path of the file `name` of a checkpoint folder. Raises CheckpointError if it is missing or lies outside.

    A link is followed within the folder and, for a snapshot of Hugging Face's download cache, into the `blobs` folder
    where that cache keeps its files.
    """
    pure = PurePath(name)
    if pure.is_absolute() or ".." in pure.parts or "\0" in name or not pure.parts:
        raise CheckpointError(f"{path}: the file name {name!r} leads out of the folder; refused")
    file = path / pure
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    # Compared after links are resolved: a link may point anywhere.
    root = path.resolve()
    target = file.resolve()
    cache = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if root not in target.parents and target.parent != cache:
        raise CheckpointError(f"{file} is a link that leads out of the folder, to {target}; refused")
    return file


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in `file`. Raises CheckpointError for anything else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return values


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning of their own."""

    begin: int | None = None
    """Stands before every document, where a model was trained so."""
    end: tuple[int, ...] = ()
    """Any of these ends a document."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read `bos_token_id` and `eos_token_id` (one id or a list) of a Hugging Face configuration."""
        begin, end = config.get("bos_token_id"), config.get("eos_token_id")
        ends = end if isinstance(end, list) else [end]
        return cls(next(_whole_ids([begin]), None), tuple(_whole_ids(ends)))

    def as_config(self) -> dict[str, Any]:
        """Return the same two fields of a Hugging Face configuration."""
        end = list(self.end) if len(self.end) > 1 else (self.end[0] if self.end else None)
        return {"bos_token_id": self.begin, "eos_token_id": end}


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer by name, as bytes; empty where a checkpoint came without one."""

    files: dict[str, bytes] = field(default_factory=dict)
    special: SpecialTokens = SpecialTokens()

    @classmethod
    def read(cls, folder: Path, special: SpecialTokens) -> Self:
        """Read the tokenizer files among those in `folder`; none without a `tokenizer.json`.

        special: the special tokens, if known; those that are not come from `tokenizer_config.json`.
        """
        names = (TOKENIZER, *_COMPANIONS) if (folder / TOKENIZER).exists() else ()
        files = {name: file_inside(folder, name).read_bytes() for name in names if (folder / name).exists()}
        if SETTINGS in files:
            settings, numbers = read_json(folder / SETTINGS), _added_tokens(read_json(folder / TOKENIZER))
            tokens: dict[str, Any] = {}
            for token in ("bos_token", "eos_token"):
                # A token is written as its text, or as an object with that and how it is split off.
                value = settings.get(token)
                text = value.get("content") if isinstance(value, dict) else value
                tokens[f"{token}_id"] = numbers.get(text) if isinstance(text, str) else None
            named = SpecialTokens.from_config(tokens)
            special = SpecialTokens(named.begin if special.begin is None else special.begin, special.end or named.end)
        return cls(files, special)

    def write(self, folder: Path, max_positions: int) -> None:
        """Put the files into `folder`, with a `tokenizer_config.json` made up where there is none."""
        files = dict(self.files)
        # Without it transformers would not know which tokens begin and end a document.
        if TOKENIZER in files and SETTINGS not in files:
            texts = {number: text for text, number in _added_tokens(json.loads(self.files[TOKENIZER])).items()}
            settings: dict[str, Any] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_positions,
                "clean_up_tokenization_spaces": False,
            }
            if self.special.begin in texts:
                settings["bos_token"] = texts[self.special.begin]
            if self.special.end and self.special.end[0] in texts:
                settings["eos_token"] = texts[self.special.end[0]]
            files[SETTINGS] = json.dumps(settings, indent=2).encode() + b"\n"
        for name, content in files.items():
            (folder / name).write_bytes(content)


def _added_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    entries = tokenizer.get("added_tokens")
    tokens = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return {str(token.get("content")): number for token in tokens for number in _whole_ids([token.get("id")])}


def _whole_ids(values: list[Any]) -> Iterator[int]:
    return (value for value in values if isinstance(value, int) and not isinstance(value, bool))
