"""The tokenizer that travels with a checkpoint: its files, and which tokens begin and end a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from phalanx.models.language.huggingface.folder import file_inside

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
_COMPANIONS = (SETTINGS, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning of their own."""

    begin: int | None = None
    """Stands before every document, where a model was trained so."""
    end: tuple[int, ...] = ()
    """Any of these ends a document."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """From `bos_token_id` and `eos_token_id` (one id or a list) of a Hugging Face configuration."""
        begin, end = config.get("bos_token_id"), config.get("eos_token_id")
        ends = end if isinstance(end, list) else [end]
        return cls(next(_ids([begin]), None), tuple(_ids(ends)))

    def as_config(self) -> dict[str, Any]:
        """The same two fields again."""
        end = list(self.end) if len(self.end) > 1 else (self.end[0] if self.end else None)
        return {"bos_token_id": self.begin, "eos_token_id": end}


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer by name, as bytes; empty where a checkpoint came without one."""

    files: dict[str, bytes] = field(default_factory=dict)
    special: SpecialTokens = SpecialTokens()

    @classmethod
    def read(cls, folder: Path, special: SpecialTokens) -> Self:
        """The tokenizer files among those in `folder`; none without a `tokenizer.json`."""
        names = (TOKENIZER, *_COMPANIONS) if (folder / TOKENIZER).exists() else ()
        return cls({n: file_inside(folder, n).read_bytes() for n in names if (folder / n).exists()}, special)

    def write(self, folder: Path, max_positions: int) -> None:
        """Put the files into `folder`, with a `tokenizer_config.json` made up where there is none."""
        files = dict(self.files)
        if TOKENIZER in files and SETTINGS not in files:
            files[SETTINGS] = self._settings(max_positions)
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def _settings(self, max_positions: int) -> bytes:
        texts = {token["id"]: token["content"] for token in json.loads(self.files[TOKENIZER]).get("added_tokens", [])}
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
        }
        if self.special.begin in texts:
            settings["bos_token"] = texts[self.special.begin]
        if self.special.end and self.special.end[0] in texts:
            settings["eos_token"] = texts[self.special.end[0]]
        return json.dumps(settings, indent=2).encode() + b"\n"


def _ids(values: list[Any]) -> Iterator[int]:
    return (value for value in values if isinstance(value, int) and not isinstance(value, bool))
