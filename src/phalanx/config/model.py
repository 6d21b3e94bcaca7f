"""The `model` section of a run file: what all families share, and the shape of one decoder for the language family.

Pure description: it holds what defines the function the model computes and nothing about devices or layouts.
Cross-field rules that belong to the shape alone (heads that divide the width) are checked here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from phalanx.config.section import HiddenWidth, Layers, Positions, Section, Vocabulary, Width


class Model(Section):
    """A model of any family. Presets (`model.preset`) fill every field; single fields may then be changed."""

    family: str
    """Model family."""
    preset: str | None = None
    """Named shape that fills the fields not given; `phalanx config list` shows them."""
    n_layers: Layers
    """Blocks."""


class BlockModel(Model):
    """A model of equal blocks, whose residual stream has one width. Presets (`model.preset`) fill every field."""

    d_model: Width
    """Width of the residual stream."""


class RopeScaling(Section):
    """Llama 3.1's stretching of low rotary frequencies for contexts longer than those seen in pre-training."""

    factor: Annotated[float, Field(gt=0.0)] = 8.0
    """How much longer the context becomes."""
    low_freq_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """Wavelengths above original_positions / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """Wavelengths below original_positions / high_freq_factor are left alone."""
    original_positions: Positions = 8192
    """Context length of pre-training."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be less than high_freq_factor={self.high_freq_factor}"
            )
        return self


class LanguageModel(BlockModel):
    """One decoder-only transformer. Presets (`model.preset`) fill every field; single fields may then be changed."""

    family: Literal["language"] = "language"
    """Model family."""
    n_layers: Layers
    """Decoder blocks."""
    d_model: Width
    """Width of the residual stream."""
    n_heads: Width
    """Attention (query) heads."""
    n_kv_heads: Width | None = None
    """Key and value heads; fewer than n_heads is grouped-query attention; null means n_heads."""
    head_dim: Width | None = None
    """Width of a head; null means d_model / n_heads."""
    d_ff: HiddenWidth | None = None
    """Hidden width of the MLP; null means 4 * d_model."""
    vocab_size: Vocabulary
    """Rows of the embedding and of the output head."""
    max_positions: Positions
    """Longest sequence; with learned positions, the rows of that table."""
    positions: Literal["learned", "alibi", "rope"] = "rope"
    """How the model knows where a token stands."""
    rope_theta: Annotated[float, Field(gt=0.0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies; null leaves them."""
    alibi_bias_max: Annotated[float, Field(gt=0.0)] = 8.0
    """ALiBi slopes run from 2^-(max/n_heads) to 2^-max."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalisation before attention, MLP and head."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    """Term under the square root of the normalisation."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"
    """MLP: GELU (exact or tanh form) with two matrices, or SwiGLU with three."""
    bias: bool = False
    """Whether linear layers and LayerNorms have biases."""
    tied_head: bool = False
    """Whether the output head is the embedding table."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before the product."""
    clip_qkv: Annotated[float, Field(gt=0.0)] | None = None
    """Clamp on the projected queries, keys and values; null leaves them."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the embedding and on both residual branches."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of initial weights; matrices that write to the residual stream get it / sqrt(2 n_layers)."""

    @model_validator(mode="after")
    def _heads_fit(self) -> LanguageModel:
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads={self.n_heads} does not divide d_model={self.d_model}; give head_dim or change one"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_kv_heads={self.kv_heads} does not divide n_heads={self.n_heads}")
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.head_size}")
        if self.positions != "rope" and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling has no effect with positions={self.positions}; set it to null")
        return self

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default resolved."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        """Width of one head, the default resolved."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def ff_size(self) -> int:
        """Hidden width of the MLP, the default resolved."""
        return self.d_ff or 4 * self.d_model
