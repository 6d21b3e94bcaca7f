"""What sources of published runs count as a floating-point operation, each convention a function of the model.

All give operations per token of a training step. Model FLOPs leave recomputation out, hardware FLOPs have it in.
`convention_of` says which source counts how; the conventions were found by recomputing rows that state both a rate and a
time.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.config.model import LanguageModel
from phalanx.families.language.sizes import embedding_parameters, model_flops_per_token, parameter_count

Convention = Callable[[LanguageModel, int], float]
"""Operations per token, of a model and its sequence length."""


def every_parameter(model: LanguageModel, sequence_length: int) -> float:
    """Model FLOPs: 6 N + 12 L h s, N all parameters, the embedding's included, attention not halved.

    LLM Foundry, as 3 (2 N + 4 L h s): scripts/train/benchmarking/README.md. torchtitan up to spring 2024.
    """
    return 6.0 * parameter_count(model) + 12.0 * model.n_layers * model.d_model * sequence_length


def palm(model: LanguageModel, sequence_length: int) -> float:
    """Model FLOPs: 6 N + 12 L h s, N the matrices and one vocabulary's, attention not halved.

    PaLM (arXiv:2204.02311, appendix B); also NeMo up to 24.07, DGX Cloud's recipes and nanotron (get_flops).
    """
    return float(model_flops_per_token(model, sequence_length, "palm"))


def causal(model: LanguageModel, sequence_length: int) -> float:
    """Model FLOPs: 6 N + 6 L h s, causal attention halved. Megatron-Bridge 25.09 and later."""
    return float(model_flops_per_token(model, sequence_length, "causal"))


def without_embedding(model: LanguageModel, sequence_length: int) -> float:
    """Model FLOPs: 6 (N - embedding) + 12 L h s, N all parameters. torchtitan from summer 2024 on."""
    counted = parameter_count(model) - embedding_parameters(model)
    return 6.0 * counted + 12.0 * model.n_layers * model.d_model * sequence_length


def megatron_model(model: LanguageModel, sequence_length: int) -> float:
    """Model FLOPs of a GPT: 72 L h^2 (1 + s / 6h + V / 12 L h). Korthikanti et al., arXiv:2205.05198, appendix A."""
    layers, width, vocabulary = model.n_layers, model.d_model, model.vocab_size
    return 72.0 * layers * width**2 * (1 + sequence_length / (6 * width) + vocabulary / (12 * layers * width))


def megatron_hardware(model: LanguageModel, sequence_length: int) -> float:
    """Hardware FLOPs of a GPT that recomputes everything: 96 L h^2 (1 + s / 6h + V / 16 L h).

    Narayanan et al., arXiv:2104.04473, section 5.1. GPT-NeoX and Megatron-DeepSpeed log the same with recomputation on.
    """
    layers, width, vocabulary = model.n_layers, model.d_model, model.vocab_size
    return 96.0 * layers * width**2 * (1 + sequence_length / (6 * width) + vocabulary / (16 * layers * width))


def blocks_eight_times(model: LanguageModel, _sequence_length: int) -> float:
    """Hardware FLOPs: 8 for each of the 12 L h^2 parameters of the blocks, nothing for attention scores and vocabulary.

    BigScience before 21 February 2022; its chronicles say that those rates are about 3% low (3.7% by this formula).
    """
    return 96.0 * model.n_layers * model.d_model**2


_CONVENTIONS: tuple[tuple[str, str, Convention], ...] = (
    ("llm-foundry", "", every_parameter),
    ("mi250-mosaic", "", every_parameter),
    ("nemo", "", palm),
    ("dgxc", "", palm),
    ("nanotron", "", palm),
    ("megatron-bridge", "", causal),
    ("torchtitan", "Apr 2024", every_parameter),
    ("torchtitan", "", without_embedding),
    ("frontier-torchtitan", "", without_embedding),
    ("megatron-h100", "", megatron_model),
    ("megatron-2", "", megatron_hardware),
    ("megatron-jan2021", "", megatron_hardware),
    ("bigscience", "under-reported|low", blocks_eight_times),
    ("bigscience", "", megatron_hardware),
    ("vtrain", "", megatron_hardware),
    ("frontier-forge", "", megatron_hardware),
    ("frontier-dash", "", megatron_hardware),
    ("korthikanti", "", megatron_model),
)
"""By what a group's name begins with and what the words on the row hold; the first that fits."""


def convention_of(group: str, words: str) -> Convention | None:
    """How the source of a row counts, by its group and the words on it; None where not known (LUMI, AxoNN, MaxText)."""
    fitting = (c for start, pattern, c in _CONVENTIONS if group.startswith(start) and re.search(pattern, words))
    return next(fitting, None)
