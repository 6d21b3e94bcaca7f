"""The table of architectures, and which of them a decoder or a `config.json` is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from phalanx.config.model import LanguageModel
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.language.huggingface.architecture import Architecture
from phalanx.families.language.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from phalanx.families.language.huggingface.gemma import GEMMA2, GEMMA3
from phalanx.families.language.huggingface.gpt2 import GPT2
from phalanx.families.language.huggingface.gpt_neox import GPT_NEOX
from phalanx.families.language.huggingface.llama import LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3
from phalanx.families.language.huggingface.mixtures import MIXTRAL, OLMOE, QWEN3_MOE
from phalanx.families.language.huggingface.mpt import MPT

ARCHITECTURES = (
    LLAMA,
    GPT2,
    MPT,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN3_MOE,
    OLMO2,
    OLMOE,
    PHI3,
    GPT_NEOX,
    GEMMA2,
    GEMMA3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)
"""Of several that a decoder fits, an export is written as the first."""
_UNKNOWN_KEY = "what it changes is not known; if it is nothing, take it out of config.json"


def architecture_for(model: LanguageModel, name: str | None = None) -> Architecture:
    """Return the architecture called `name`, or the first in the table, that computes what `model` describes.

    Raises ConfigError naming every field without a counterpart in it, or in the nearest one.
    """
    asked = [a for a in ARCHITECTURES if name is None or name in {a.name, *a.aliases}]
    if not asked:
        raise ConfigError(f"--architecture={name} must be {', '.join(a.name for a in ARCHITECTURES)}")
    misfits = {a.name: a.config.misfits(model) for a in asked}
    # What knows other positions, or no experts, is not near, however few its fields are.
    nearest = min(asked, key=lambda a: (a.config.needs["positions"] != model.positions, len(misfits[a.name])))
    if misfits[nearest.name]:
        called = "nearest to this model" if name is None else "asked for"
        raise ConfigError(
            f"{nearest.name}, the architecture of Hugging Face {called}, has no counterpart for "
            f"{'; '.join(misfits[nearest.name])}; such a model stays in Phalanx's own format"
        )
    return nearest


def read_config(values: Mapping[str, Any], where: str) -> tuple[Architecture, LanguageModel]:
    """Return the architecture and decoder that a parsed `config.json` describes; `where` names the file in messages.

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
        problems = []
        for detail in error.errors():
            unknown = detail["type"] == "extra_forbidden"
            reason = _UNKNOWN_KEY if unknown else detail["msg"].removeprefix("Value error, ")
            value: Any = values
            for part in detail["loc"]:
                value = value.get(part) if isinstance(value, dict) else None
            field = ".".join(map(str, detail["loc"]))
            if error.title == LanguageModel.__name__ and field:
                # A rule of the decoder, between fields that several keys fill.
                problems.append(f"model.{field}, which this asks for, cannot be: {reason}")
                continue
            problems.append(f"{field}={value!r} has no counterpart in the decoder: {reason}" if field else reason)
        raise CheckpointError("\n".join(f"{where}: {problem}" for problem in problems)) from None
