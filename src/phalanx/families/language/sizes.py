"""How large a decoder is and what a token costs, in closed form from its description alone.

Exact for `phalanx.families.language.decoder`; a test compares the two. Needs no torch, so the command line can print a
model's size at once, and the cost model has something independent to be checked against.
"""

from __future__ import annotations

from typing import Literal

from phalanx.config.layers import AttentionConfig, MixtureConfig
from phalanx.config.model import LanguageModel

FlopsConvention = Literal["causal", "palm"]


def parameter_count(model: LanguageModel) -> int:
    """Return all trainable parameters; a tied output head is the token table and counts once."""
    layers = sum(count * layer.parameter_count() for layer, count in model.layer_kinds().items())
    untied_head = 0 if model.tied_head else _head_parameters(model)
    return embedding_parameters(model) + layers + model.residual_norm.parameter_count() + untied_head


def active_parameter_count(model: LanguageModel) -> int:
    """Return the parameters that compute a token: all but those of the experts that it is not sent to."""
    unused = sum(
        count * (layer.mlp.parameter_count() - layer.mlp.matrix_parameters())
        for layer, count in model.layer_kinds().items()
        if isinstance(layer.mlp, MixtureConfig)
    )
    return parameter_count(model) - unused


def embedding_parameters(model: LanguageModel) -> int:
    """Return the parameters of the lookup tables: tokens, and positions where they are learned."""
    positions = model.max_positions if model.positions == "learned" else 0
    return (model.vocab_size + positions) * model.d_model


def matmul_parameters(model: LanguageModel) -> int:
    """Return the parameters that multiply a token: its weight matrices, and the output head whether tied or not."""
    layers = sum(count * layer.matrix_parameters() for layer, count in model.layer_kinds().items())
    return layers + _head_parameters(model)


def model_flops_per_token(model: LanguageModel, sequence_length: int, convention: FlopsConvention = "causal") -> int:
    """Return the floating-point operations of one token of a training step, forward and backward, without recomputation.

    Six per matmul parameter (a multiply and an add forward, twice that backward), and attention: scores and weighted
    values take 12 * n_layers * (n_heads * head_size) * sequence_length when every token attends to every position.
    `palm` counts that (PaLM, arXiv:2204.02311, appendix B), `causal` the half that a causal model needs, and of layers with
    a window what it lets in.
    """

    def products(attention: AttentionConfig) -> int:
        whole, causal = attention.products_per_token, attention.causal_products_per_token
        return whole(sequence_length) if convention == "palm" else causal(sequence_length)

    layers = sum(count * products(layer.attention) for layer, count in model.layer_kinds().items())
    return 6 * (matmul_parameters(model) + layers)


def block_flops_per_token(model: LanguageModel, sequence_length: int) -> int:
    """Return the share of one block in `model_flops_per_token`, causal convention; where blocks differ, of the last."""
    layer = model.layer(model.n_layers - 1)
    return 6 * (layer.matrix_parameters() + layer.attention.causal_products_per_token(sequence_length))


def head_flops_per_token(model: LanguageModel) -> int:
    """Return the share of the output head in `model_flops_per_token`."""
    return 6 * _head_parameters(model)


def in_words(model: LanguageModel) -> str:
    """Return the shape for a person."""
    heads = f"{model.n_heads} heads" + ("" if model.kv_heads == model.n_heads else f" ({model.kv_heads} kv)")
    shape = f"{model.n_layers} layers x {model.d_model}, {heads}, vocabulary {model.vocab_size:,}"
    if model.experts is None:
        return shape
    # Whoever prints a shape prints the count of all parameters beside it.
    active = f"{active_parameter_count(model):,} parameters active"
    return f"{shape}, {model.experts.active} of {model.experts.count} experts a token ({active})"


def _head_parameters(model: LanguageModel) -> int:
    return model.vocab_size * model.d_model
