"""The model of a published run: what its source leaves out, and which kinds of model no plan of ours is of."""

from __future__ import annotations

import re
from typing import Any

from phalanx.config.model import LanguageModel
from phalanx.config.presets import find_preset
from phalanx.planner.measured.cells import Row, Unusable
from phalanx.planner.measured.runs import model_of, preset_sizes

_OTHER_KINDS = re.compile(r"\bvit\b|gnn|climax|orbit|weather|mlip", re.IGNORECASE)
_MIXTURES = re.compile(r"moe|mixtral|\d+x\d+b|deepseek|kimi|gpt.?oss|_a\d+b|nemotron_3|qwen3_(30|235)", re.IGNORECASE)
_LLAMA_2 = {
    "7b": {"n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "d_ff": 11008, "vocab_size": 32000},
    "13b": {"n_layers": 40, "d_model": 5120, "n_heads": 40, "n_kv_heads": 40, "d_ff": 13824, "vocab_size": 32000},
    "70b": {"n_layers": 80, "d_model": 8192, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28672, "vocab_size": 32000},
}
"""Llama 2 (Touvron et al., arXiv:2307.09288; config.json of meta-llama)."""
_MIXTURES_BY_NAME: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": {
        "n_layers": 36,
        "d_model": 2880,
        "n_heads": 64,
        "n_kv_heads": 8,
        "head_dim": 64,
        "d_ff": 2880,
        "vocab_size": 201088,
        "max_positions": 131072,
        "sliding_window": 128,
        "global_every": 2,
        "attention_sinks": True,
        "experts": {"count": 128, "active": 4, "balance": "none"},
    },
    "kimi-k2": {
        "n_layers": 61,
        "d_model": 7168,
        "n_heads": 64,
        "d_ff": 18432,
        "vocab_size": 163840,
        "max_positions": 131072,
        "latent": {"query_rank": 1536, "key_value_rank": 512, "rope_size": 64, "nope_size": 128, "value_size": 128},
        "experts": {
            "count": 384,
            "active": 8,
            "d_ff": 2048,
            "shared": 1,
            "dense_layers": 1,
            "scoring": "sigmoid",
            "scale": 2.827,
            "bias_rate": 0.001,
            "balance": "none",
        },
    },
    "mixtral-8x22b": {
        "n_layers": 56,
        "d_model": 6144,
        "n_heads": 48,
        "n_kv_heads": 8,
        "d_ff": 16384,
        "vocab_size": 32768,
        "max_positions": 65536,
        "experts": {"count": 8, "active": 2, "balance": "none"},
    },
}
"""Mixtures that are no presets: config.json of openai/gpt-oss-120b, whose experts' biases `recipes.py` plans, of
moonshotai/Kimi-K2-Instruct, and of mistralai/Mixtral-8x22B-v0.1."""
_OTHER_LAYERS = {
    "nemotron-3": "it has state-space layers (Mamba), as no plan of ours",
    "deepseekv4": "its attention reads compressed and chosen keys, as no plan of ours",
}
"""Mixtures with layers that we do not have, by how their names begin. NVIDIA-NeMo/Megatron-Bridge,
src/megatron/bridge/models: `hybrid_override_pattern` in nemotronh/nemotron_h_bridge.py (v0.5.0), compressor and indexer in
deepseek/deepseek_v4_bridge.py (v0.6.0)."""
_SWIGLU = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied_head": False, "bias": False}
_PRESETS = {"deepseekv3": "deepseek-v3"}
"""Presets by what tables call their models otherwise."""
_BIGSCIENCE_VOCABULARY = "250880"
"""What its chronicles call "250k": padded to a multiple of 128 x 4 tensor-parallel ranks."""


def published_model(row: Row) -> LanguageModel:
    """Return the row's model.

    Raises Unusable for other kinds of model, mixtures of experts that are not known, fine-tuning and unstated sizes.
    """
    name, family = row.text("model"), row.text("family")
    if _OTHER_KINDS.search(f"{name} {family}"):
        raise Unusable("it is not a language model")
    if _MIXTURES.search(name) or (row.whole("ep") or 1) > 1:
        return _mixture(name)
    if "lora" in name.lower():
        raise Unusable("it trains adapters alone")
    if "sft" in name.lower():
        # NeMo's rates of these rows agree with its times when attention is left out.
        raise Unusable("it fine-tunes on short samples packed together, which attend to less than the sequence length")
    if row.text("vocab") == "250k" and row.text("group").startswith("bigscience"):
        row.cells = {**row.cells, "vocab": _BIGSCIENCE_VOCABULARY}
    return model_of(row, _known_sizes(row.text("group"), name))


def _mixture(name: str) -> LanguageModel:
    """Return the mixture of experts of this name: tables state nothing of experts."""
    words = re.sub(r"[ _]", "-", re.split(r" ?[\[(]", name.lower())[0])
    if words in _MIXTURES_BY_NAME:
        return LanguageModel.model_validate(_SWIGLU | _MIXTURES_BY_NAME[words])
    for start, reason in _OTHER_LAYERS.items():
        if words.startswith(start):
            raise Unusable(reason)
    preset = find_preset(_PRESETS.get(words, words))
    model = None if preset is None else preset.model()
    if not isinstance(model, LanguageModel) or model.experts is None:
        raise Unusable("it is a mixture of experts whose sizes are not known")
    return model


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
    return preset_sizes(words) or preset_sizes(words.replace("3.1", "3"))
