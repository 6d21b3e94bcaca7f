"""How large a decoder is and what a token costs, in closed form from its description alone.

Exact for `phalanx.families.language.model.decoder`; a test compares the two. Needs no torch, so the command line can print a
model's size at once, and the cost model has something independent to be checked against.
"""

from __future__ import annotations

from typing import Literal

from phalanx.config.model import LanguageModel

FlopsConvention = Literal["causal", "palm"]


def parameter_count(model: LanguageModel) -> int:
    """All trainable parameters; a tied output head is the token table and counts once."""
    block = (
        _block_matrix_parameters(model)
        + _block_bias_parameters(model)
        + _qk_norm_parameters(model)
        + 2 * _norm_parameters(model)
    )
    untied_head = 0 if model.tied_head else _head_parameters(model)
    return embedding_parameters(model) + model.n_layers * block + _norm_parameters(model) + untied_head


def embedding_parameters(model: LanguageModel) -> int:
    """Parameters of the lookup tables: tokens, and positions where they are learned."""
    positions = model.max_positions if model.positions == "learned" else 0
    return (model.vocab_size + positions) * model.d_model


def matmul_parameters(model: LanguageModel) -> int:
    """Parameters that multiply every token: all weight matrices, and the output head whether tied or not."""
    return model.n_layers * _block_matrix_parameters(model) + _head_parameters(model)


def model_flops_per_token(model: LanguageModel, sequence_length: int, convention: FlopsConvention = "causal") -> int:
    """Floating-point operations one token of a training step needs, forward and backward, without recomputation.

    Six per matmul parameter (a multiply and an add forward, twice that backward), and attention: scores and weighted
    values take 12 * n_layers * (n_heads * head_size) * sequence_length when every token attends to every position.
    `palm` counts that (PaLM, arXiv:2204.02311, appendix B), `causal` the half that a causal model needs.
    """
    attention_width = model.n_heads * model.head_size
    per_position = {"causal": 6, "palm": 12}[convention]
    return 6 * matmul_parameters(model) + per_position * model.n_layers * attention_width * sequence_length


def block_flops_per_token(model: LanguageModel, sequence_length: int) -> int:
    """Share of one block in `model_flops_per_token`, causal convention."""
    return 6 * _block_matrix_parameters(model) + 6 * model.n_heads * model.head_size * sequence_length


def head_flops_per_token(model: LanguageModel) -> int:
    """Share of the output head in `model_flops_per_token`."""
    return 6 * _head_parameters(model)


def in_words(model: LanguageModel) -> str:
    """The shape for a person."""
    heads = f"{model.n_heads} heads" + ("" if model.kv_heads == model.n_heads else f" ({model.kv_heads} kv)")
    return f"{model.n_layers} layers x {model.d_model}, {heads}, vocabulary {model.vocab_size:,}"


def _head_parameters(model: LanguageModel) -> int:
    return model.vocab_size * model.d_model


def _block_matrix_parameters(model: LanguageModel) -> int:
    query_and_output = 2 * model.d_model * model.n_heads * model.head_size
    key_and_value = 2 * model.d_model * model.kv_heads * model.head_size
    mlp_matrices = 3 if model.mlp == "swiglu" else 2
    return query_and_output + key_and_value + mlp_matrices * model.d_model * model.ff_size


def _block_bias_parameters(model: LanguageModel) -> int:
    if not model.bias:
        return 0
    attention = (model.n_heads + 2 * model.kv_heads) * model.head_size + model.d_model
    mlp_up = (2 if model.mlp == "swiglu" else 1) * model.ff_size
    return attention + mlp_up + model.d_model


def _qk_norm_parameters(model: LanguageModel) -> int:
    return 2 * model.head_size if model.qk_norm else 0


def _norm_parameters(model: LanguageModel) -> int:
    has_bias = model.bias and model.norm == "layernorm"
    return model.d_model * (2 if has_bias else 1)
