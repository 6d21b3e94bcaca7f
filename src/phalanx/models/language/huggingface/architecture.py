"""What is known of one Hugging Face architecture: the fields of its `config.json` and where its tensors go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from phalanx.config.model import LanguageModel
from phalanx.models.language.huggingface.rules import Counterpart, TensorRule, tensor_rules

# The bound keeps a product of two sizes, in bytes, within 64 bits.
Size = Annotated[int, Field(ge=1, le=2**24)]
Positive = Annotated[float, Field(gt=0.0)]


class ConfigFields(BaseModel):
    """The fields of `config.json` that say what a model computes, with Hugging Face's defaults.

    A field that the decoder has no counterpart for is declared with the one value that means "not used"; any other value
    is then refused by name. Fields not declared (generation defaults, versions, dropout) do not change what is computed.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    def to_model(self) -> LanguageModel:
        """The decoder that computes the same."""
        raise NotImplementedError

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """The fields for a decoder that fits the architecture (`Architecture.misfits` is empty)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Architecture:
    """One entry of the table in `architectures`."""

    name: str
    """Class name, as `architectures` in `config.json` has it."""
    model_type: str
    """`model_type` in `config.json`."""
    prefix: str
    """First part of the names of all tensors but the head's; checkpoints of the bare model leave it out."""
    config: type[ConfigFields]
    """The fields of `config.json`."""
    counterparts: Mapping[str, Counterpart]
    """See `tensor_rules`."""
    ignored: re.Pattern[str]
    """Names of tensors that hold constants, which some versions wrote out."""
    needs: Callable[[LanguageModel], Mapping[str, object]]
    """The values that a decoder's fields must have to fit; a tuple holds alternatives."""

    def rules(self, model: LanguageModel) -> list[TensorRule]:
        """One rule for each parameter of the decoder."""
        return tensor_rules(model, self.counterparts)

    def misfits(self, model: LanguageModel) -> list[str]:
        """The fields of `model` that the architecture has no counterpart for: "model.norm=rmsnorm (it has layernorm)"."""
        found = resolved_fields(model)
        return [
            f"model.{field}={_show(found[field])} (it has {_show(needed)})"
            for field, needed in self.needs(model).items()
            if found[field] not in (needed if isinstance(needed, tuple) else (needed,))
        ]

    def config_json(self, model: LanguageModel) -> dict[str, Any]:
        """Content of `config.json` for a decoder that fits."""
        fields = self.config.from_model(model).model_dump(exclude_none=True)
        return {"architectures": [self.name], "model_type": self.model_type, **fields}


def resolved_fields(model: LanguageModel) -> dict[str, object]:
    """Every field of `model`, with the sizes that null stands for filled in."""
    return {**model.model_dump(), "n_kv_heads": model.kv_heads, "head_dim": model.head_size, "d_ff": model.ff_size}


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(_show, value))
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
