"""The architectures that are read and written, and which of them a `config.json` or a decoder belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from phalanx.config.model import LanguageModel
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.language.huggingface.architecture import Architecture
from phalanx.families.language.huggingface.gpt2 import GPT2
from phalanx.families.language.huggingface.llama import LLAMA
from phalanx.families.language.huggingface.mpt import MPT

ARCHITECTURES = (LLAMA, GPT2, MPT)

_UNKNOWN_KEY = "what it changes is not known; if it is nothing, take it out of config.json"
_BY_POSITIONS = {"rope": LLAMA, "learned": GPT2, "alibi": MPT}


def architecture_for(model: LanguageModel) -> Architecture:
    """The architecture that computes what `model` describes.

    Raises ConfigError naming every field without a counterpart. Each architecture has one kind of positions, so these
    decide which one is meant.
    """
    architecture = _BY_POSITIONS[model.positions]
    misfits = architecture.misfits(model)
    if misfits:
        raise ConfigError(
            f"model.positions={model.positions} makes this a {architecture.name} in Hugging Face's terms, "
            f"which has no counterpart for {'; '.join(misfits)}; such a model stays in Phalanx's own format"
        )
    return architecture


def read_config(values: Mapping[str, Any], where: str) -> tuple[Architecture, LanguageModel]:
    """The architecture and decoder that a parsed `config.json` describes; `where` names the file in messages.

    Raises CheckpointError for another architecture and for every setting the decoder has no counterpart for.
    """
    names, model_type = values.get("architectures") or [], values.get("model_type")
    found = next((a for a in ARCHITECTURES if {a.name, *a.aliases} & set(names)), None)
    if not names:
        found = next((a for a in ARCHITECTURES if a.model_type == model_type), None)
    if found is None:
        raise CheckpointError(
            f"{where}: architectures={names} model_type={model_type} is not read; "
            f"those that are: {', '.join(a.name for a in ARCHITECTURES)}"
        )
    if model_type not in (None, found.model_type):
        raise CheckpointError(
            f"{where}: architectures={names} is a model of type {found.model_type}, but model_type={model_type}, by which "
            f"transformers chooses what it computes; correct the one that is wrong"
        )
    if values.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where}: quantization_config is set; only unquantised weights are read, use the original"
        )
    try:
        return found, found.config.model_validate(dict(values)).to_model()
    except ValidationError as error:
        problems = (
            _problem(values, detail["loc"], _UNKNOWN_KEY if detail["type"] == "extra_forbidden" else detail["msg"])
            for detail in error.errors()
        )
        raise CheckpointError("\n".join(f"{where}: {problem}" for problem in problems)) from None


def _problem(values: Mapping[str, Any], path: tuple[int | str, ...], message: str) -> str:
    reason = message.removeprefix("Value error, ")
    if not path:
        return reason
    value: Any = values
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return f"{'.'.join(map(str, path))}={value!r} has no counterpart in the decoder: {reason}"
