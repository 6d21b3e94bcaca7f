"""The model of a measured run: the sizes that its row states, and what the name of the model or of its family adds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset, preset_names
from phalanx.planner.measured.cells import Row, Unusable

_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mpt", {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": True}),
    ("nemotron", {"positions": "rope", "norm": "layernorm", "mlp": "gelu", "bias": False, "tied_head": False}),
    ("llama|qwen|mistral|swiglu", {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied_head": False}),
    ("bloom|poro", {"positions": "alibi", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True}),
    ("neox|forge", {"positions": "rope", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": False}),
    ("", {"positions": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True}),
)
"""Fields that a family's name implies; the last row is GPT as Megatron-LM has it. MPT: as in LLM Foundry's benchmark."""

SIZES = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads", "kv_heads": "n_kv_heads", "ffn": "d_ff"}
"""Fields of a language model by the columns that state them."""
_USUAL_VOCABULARY = 51_200
"""GPT-2's 50,257 tokens padded as Megatron-LM pads them for up to 8 tensor-parallel ranks."""


def model_of(row: Row, known: Mapping[str, Any] | None = None) -> LanguageModel:
    """Return the row's model.

    known: sizes that the name of the model implies, by field; those of the preset of this name where None. Raises Unusable
    for unstated sizes, and for sizes that make no model.
    """
    name = row.text("model")
    known = preset_sizes(name.lower()) if known is None else known
    (length,) = row.wholes("seq")
    named = f"{name} {row.text('family')}".lower()
    of_family = next(fields for pattern, fields in _FAMILIES if re.search(pattern, named))
    fields: dict[str, Any] = {"max_positions": length} | of_family
    stated = {ours: size for theirs, ours in SIZES.items() if (size := row.whole(theirs)) is not None}
    fields |= dict(known) | stated
    missing = [theirs for theirs, ours in SIZES.items() if ours not in fields and theirs not in ("kv_heads", "ffn")]
    if missing:
        raise Unusable(f"the source does not state {', '.join(missing)}")
    row.assumed += [f"{ours}={known[ours]}" for ours in SIZES.values() if ours in known and ours not in stated]
    if "d_ff" not in fields:
        # An MLP is usually four times as wide as the model; with three matrices, two thirds of that in steps of 256.
        four: int = 4 * fields["d_model"]
        fields["d_ff"] = -(-four * 2 // 3 // 256) * 256 if fields["mlp"] == "swiglu" else four
        row.assumed.append(f"d_ff={fields['d_ff']}")
    if "n_kv_heads" not in fields:
        row.assumed.append(f"n_kv_heads={fields['n_heads']}")
    vocabulary = row.whole("vocab")
    fields["vocab_size"] = vocabulary or known.get("vocab_size") or _USUAL_VOCABULARY
    if vocabulary is None:
        row.assumed.append(f"vocab_size={fields['vocab_size']}")
    try:
        return LanguageModel.model_validate(fields)
    except ValidationError as error:
        raise Unusable(f"no model of ours has its shape: {error.errors()[0]['msg']}") from error


def preset_sizes(name: str) -> dict[str, Any]:
    """Return the sizes of the language model that is a preset of this name, by field; empty where there is none."""
    if name not in preset_names():
        return {}
    preset = load_preset(name)
    if preset.family != "language":
        return {}
    sizes = preset.fields
    return {ours: sizes[ours] for ours in (*SIZES.values(), "vocab_size") if sizes.get(ours) is not None}
