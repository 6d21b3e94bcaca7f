"""The model of a published run as a `LanguageModel`: its stated sizes, and what its family and name add to them."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset, preset_names
from phalanx.planner.published.cells import BIGSCIENCE_VOCABULARY, Row, Unusable

_OTHER_KINDS = re.compile(r"\bvit\b|gnn|climax|orbit|weather|mlip", re.IGNORECASE)
_MIXTURES = re.compile(r"moe|mixtral|\d+x\d+b|deepseek|kimi|gpt.?oss|_a\d+b|nemotron_3|qwen3_(30|235)", re.IGNORECASE)

_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mpt", {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": True}),
    ("nemotron", {"positions": "rope", "norm": "layernorm", "mlp": "gelu", "bias": False, "tied_head": False}),
    ("llama|qwen|mistral|swiglu", {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied_head": False}),
    ("bloom|poro", {"positions": "alibi", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True}),
    ("neox|forge", {"positions": "rope", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied_head": False}),
    ("", {"positions": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True}),
)
"""Fields that a family's name implies; the last row is GPT as Megatron-LM has it. MPT: as in LLM Foundry's benchmark."""

_SIZES = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads", "kv_heads": "n_kv_heads", "ffn": "d_ff"}
_LLAMA_2 = {
    "7b": {"n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "d_ff": 11008, "vocab_size": 32000},
    "13b": {"n_layers": 40, "d_model": 5120, "n_heads": 40, "n_kv_heads": 40, "d_ff": 13824, "vocab_size": 32000},
    "70b": {"n_layers": 80, "d_model": 8192, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28672, "vocab_size": 32000},
}
"""Llama 2 (Touvron et al., arXiv:2307.09288; config.json of meta-llama)."""
_USUAL_VOCABULARY = 51_200
"""GPT-2's 50,257 tokens padded as Megatron-LM pads them for up to 8 tensor-parallel ranks."""


def model_of(row: Row) -> LanguageModel:
    """The row's model. Raises Unusable for other kinds of model, mixtures of experts, fine-tuning and unstated sizes."""
    name, family = row.text("model"), row.text("family")
    if _OTHER_KINDS.search(f"{name} {family}"):
        raise Unusable("it is not a language model")
    if _MIXTURES.search(name) or (row.whole("ep") or 1) > 1:
        raise Unusable("it is a mixture of experts")
    if "lora" in name.lower():
        raise Unusable("it trains adapters alone")
    if "sft" in name.lower():
        # NeMo's rates of these rows agree with its times when attention is left out.
        raise Unusable("it fine-tunes on short samples packed together, which attend to less than the sequence length")
    (length,) = row.wholes("seq")
    fields: dict[str, Any] = {"max_positions": length} | _family(name, family)
    known = _known_sizes(row.text("group"), name)
    stated = {ours: size for theirs, ours in _SIZES.items() if (size := row.whole(theirs)) is not None}
    fields |= known | stated
    missing = [theirs for theirs, ours in _SIZES.items() if ours not in fields and theirs not in ("kv_heads", "ffn")]
    if missing:
        raise Unusable(f"the source does not state {', '.join(missing)}")
    row.assumed += [f"{ours}={known[ours]}" for ours in _SIZES.values() if ours in known and ours not in stated]
    if "d_ff" not in fields:
        fields["d_ff"] = _usual_width(fields)
        row.assumed.append(f"d_ff={fields['d_ff']}")
    if "n_kv_heads" not in fields:
        row.assumed.append(f"n_kv_heads={fields['n_heads']}")
    fields["vocab_size"] = _vocabulary(row, known.get("vocab_size"))
    try:
        return LanguageModel.model_validate(fields)
    except ValidationError as error:
        raise Unusable(f"no model of ours has its shape: {error.errors()[0]['msg']}") from error


def _family(name: str, family: str) -> dict[str, Any]:
    words = f"{name} {family}".lower()
    return next(fields for pattern, fields in _FAMILIES if re.search(pattern, words))


def _known_sizes(group: str, name: str) -> dict[str, Any]:
    """Sizes of a model by its name alone; empty for one that is not known."""
    words = re.split(r"[ \[(]", name.lower())[0].replace("_", "-")
    llama = re.fullmatch(r"llama-?(\d(?:\.\d)?)-(\d+b)", words)
    if llama:
        words = f"llama{llama[1]}-{llama[2]}"
        if llama[1] == "2":
            return dict(_LLAMA_2.get(llama[2], {}))
    if group == "frontier-dash":
        words = f"gpt-{words}"
    for preset in {words, words.replace("3.1", "3")}.intersection(preset_names()):
        sizes = load_preset(preset).fields
        return {ours: sizes[ours] for ours in (*_SIZES.values(), "vocab_size") if sizes.get(ours) is not None}
    return {}


def _usual_width(fields: dict[str, Any]) -> int:
    """Four times the width, or for three matrices two thirds of that, up to the next multiple of 256."""
    four: int = 4 * fields["d_model"]
    return -(-four * 2 // 3 // 256) * 256 if fields["mlp"] == "swiglu" else four


def _vocabulary(row: Row, known: int | None) -> int:
    if row.text("vocab") == "250k" and row.text("group").startswith("bigscience"):
        return BIGSCIENCE_VOCABULARY
    stated = row.whole("vocab")
    if stated is None:
        row.assumed.append(f"vocab_size={known or _USUAL_VOCABULARY}")
    return stated or known or _USUAL_VOCABULARY
