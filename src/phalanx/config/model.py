"""The `model` section of a run file: what all families share, and the shape of one decoder for the language family.

Pure description: it holds what defines the function the model computes and nothing about devices or layouts.
Cross-field rules that belong to the shape alone (heads that divide the width) are checked here.

`LanguageModel.layer` says what one layer is (`config.layers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from phalanx.config.layers import (
    AlibiConfig,
    AttentionConfig,
    Experts,
    LatentSizes,
    LayerConfig,
    MixtureConfig,
    MLPConfig,
    NormConfig,
    NormPosition,
    RopeConfig,
    RopeScaling,
)
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

    @property
    def leading_layers(self) -> int:
        """Leading blocks, which differ from those that follow."""
        return 0

    @property
    def rows_per_sample(self) -> int:
        """Rows of a micro-batch that the blocks compute for each sample."""
        return 1


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
    local_rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    """Base of the rotary frequencies of layers with a window, which rope_scaling then leaves (Gemma 3); null: as the
    others."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies; null leaves them."""
    rotary_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of a head's features that is rotated, the first ones (GPT-NeoX)."""
    alibi_bias_max: Annotated[float, Field(gt=0.0)] = 8.0
    """ALiBi slopes run from 2^-(max/n_heads) to 2^-max."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalisation of attention, MLP and head."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    """Term under the square root of the normalisation."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight, which then begins at 0 (Gemma)."""
    norm_position: NormPosition = "pre"
    """Whether attention and MLP are normalised before (pre), behind (post, OLMo 2), or both (sandwich, Gemma 2)."""
    parallel_residual: bool = False
    """Whether the MLP reads the residual stream before attention is added (GPT-NeoX)."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "swiglu"
    """MLP: GELU (exact or tanh form) with two matrices; SwiGLU, or GeGLU with a tanh-form gate (Gemma), with three."""
    experts: Experts | None = None
    """Mixture of experts in place of MLPs; null has none."""
    bias: bool = False
    """Whether linear layers and LayerNorms have biases."""
    qkv_bias: bool | None = None
    """Whether the projections of queries, keys and values have biases (Qwen2); null: as bias."""
    tied_head: bool = False
    """Whether the output head is the embedding table."""
    embedding_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of the rows of the embedding table (Gemma: the root of d_model); null leaves them."""
    qk_norm: bool | Literal["head", "whole"] = False
    """Whether queries and keys are normalised before the product: per head (true or head), or over all heads together
    (whole, OLMo 2)."""
    attention_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of the products of queries and keys; null is 1 / sqrt(width of a head)."""
    logit_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Bound of the logits: c tanh(logits / c) (Gemma 2); null leaves them."""
    attention_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Bound of the scaled products of queries and keys: c tanh(products / c) (Gemma 2); null leaves them."""
    latent: LatentSizes | None = None
    """Multi-head latent attention in place of grouped heads (DeepSeek-V2); null has none."""
    attention_sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax without a value (gpt-oss)."""
    sliding_window: Positions | None = None
    """Tokens that a query attends to, itself and those right before it (Mistral); null: all before it."""
    global_every: Annotated[int, Field(ge=0, le=10_000)] = 0
    """With a window: every so many-th layer attends to all tokens, 2 or more (Gemma 3: 6); 0: none does."""
    clip_qkv: Annotated[float, Field(gt=0.0)] | None = None
    """Clamp on the projected queries, keys and values; null leaves them."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the embedding and on both residual branches."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of initial weights; matrices that write to the residual stream get it / sqrt(2 n_layers)."""
    mup_base_width: Width | None = None
    """Width at which muP (arXiv:2203.03466) leaves initial values and learning rates as they are: at others they scale, so
    that the best rate stays the same. null: the usual parametrisation. For models of equal head size without a tied head."""

    @model_validator(mode="after")
    def _width_scales(self) -> LanguageModel:
        # A table that is both input and output cannot follow two rules; ranks and experts have fan-ins of their own.
        others = {
            "tied_head=true": self.tied_head,
            "experts": self.experts is not None,
            "latent": self.latent is not None,
        }
        for stated, present in others.items():
            if self.mup_base_width is not None and present:
                raise ValueError(f"mup_base_width={self.mup_base_width} has no rule for {stated}; set it to null")
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> LanguageModel:
        if self.latent is None and self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads={self.n_heads} does not divide d_model={self.d_model}; give head_dim or change one"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_kv_heads={self.kv_heads} does not divide n_heads={self.n_heads}")
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> LanguageModel:
        if self.positions != "rope":
            for name in ("rope_scaling", "rotary_fraction", "local_rope_theta"):
                default = type(self).model_fields[name].default
                if getattr(self, name) != default:
                    stated = "null" if default is None else default
                    raise ValueError(f"{name} has no effect with positions={self.positions}; set it to {stated}")
            return self
        if self.rotated_size < 2 or self.rotated_size % 2:
            share = "" if self.rotary_fraction == 1.0 else f" (rotary_fraction={self.rotary_fraction} of it)"
            raise ValueError(f"rotary positions need an even head size, not {self.rotated_size}{share}")
        if self.rope_scaling is not None and self.rope_scaling.kind == "ntk" and self.rotated_size < 4:
            raise ValueError(f"rope_scaling.kind=ntk needs 4 rotated features of a head, not {self.rotated_size}")
        return self

    @model_validator(mode="after")
    def _latent_fits(self) -> LanguageModel:
        if self.latent is None:
            return self
        if self.positions != "rope":
            raise ValueError(f"latent attention rotates a part of each head; set positions=rope, not {self.positions}")
        sizes = {"n_kv_heads": self.n_heads, "head_dim": self.latent.nope_size + self.latent.rope_size}
        for name, size in sizes.items():
            if getattr(self, name) not in (None, size):
                raise ValueError(f"{name}={getattr(self, name)} does not fit latent attention; set it to null")
        unset = {"rotary_fraction": 1.0, "qk_norm": False, "clip_qkv": None, "bias": False}
        for name, value in unset.items():
            if getattr(self, name) != value:
                stated = "null" if value is None else str(value).lower()
                raise ValueError(f"{name}={getattr(self, name)} has no place in latent attention; set it to {stated}")
        if self.qkv_bias:
            raise ValueError("qkv_bias=true has no place in latent attention; set it to null")
        return self

    @model_validator(mode="after")
    def _window_fits(self) -> LanguageModel:
        if self.sliding_window is None:
            for name, unset in (("global_every", "0"), ("local_rope_theta", "null")):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect without sliding_window; set it to {unset}"
                    )
        if self.global_every == 1:
            raise ValueError("global_every=1 leaves no layer with a window; set sliding_window to null, or 2 or more")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> LanguageModel:
        if self.experts is None:
            return self
        if self.mlp != "swiglu" or self.bias:
            raise ValueError("experts are SwiGLU networks without biases; set mlp=swiglu and bias=false")
        if self.experts.dense_layers >= self.n_layers:
            raise ValueError(
                f"experts.dense_layers={self.experts.dense_layers} leaves no block with experts of n_layers={self.n_layers}"
            )
        return self

    def layer(self, number: int) -> LayerConfig:
        """Return the configuration of layer `number` (from 0)."""
        return LayerConfig(
            norm=self.residual_norm,
            norm_position=self.norm_position,
            parallel=self.parallel_residual,
            attention=self._attention(number),
            mlp=self._mlp(number),
            dropout=self.dropout,
        )

    def _attention(self, number: int) -> AttentionConfig:
        """Return the attention of layer `number`."""
        window = None if self._is_global(number) else self.sliding_window
        rope = RopeConfig(self.rotated_size, self.rope_theta, self.rope_scaling)
        if window is not None and self.local_rope_theta is not None:
            rope = RopeConfig(self.rotated_size, self.local_rope_theta, None)
        alibi = AlibiConfig(self.n_heads, self.alibi_bias_max)
        query_norm, key_norm = self._head_norm(self.n_heads), self._head_norm(self.kv_heads)
        # Latent attention norms what queries, and keys and values, are compressed to, and no heads.
        if self.latent is not None:
            rank = self.latent.query_rank
            query_norm = None if rank is None else NormConfig(rank, self.norm, self.norm_eps, bias=False)
            key_norm = NormConfig(self.latent.key_value_rank, self.norm, self.norm_eps, bias=False)
        scale = self.attention_scale
        if self.rope_scaling is not None and (stretched := self.rope_scaling.attention_scale()) != 1.0:
            scale = stretched * (scale or self.head_size**-0.5)
        return AttentionConfig(
            width=self.d_model,
            heads=self.n_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            bias=self.bias,
            qkv_bias=self.bias if self.qkv_bias is None else self.qkv_bias,
            query_norm=query_norm,
            key_norm=key_norm,
            joint_norm=self.qk_norm == "whole",
            clip=self.clip_qkv,
            scale=scale,
            softcap=self.attention_softcap,
            window=window,
            sinks=self.attention_sinks,
            rope=rope if self.positions == "rope" else None,
            alibi=alibi if self.positions == "alibi" else None,
            latent=self.latent,
        )

    def _is_global(self, number: int) -> bool:
        return self.global_every > 0 and (number + 1) % self.global_every == 0

    def _head_norm(self, heads: int) -> NormConfig | None:
        """Return the norm of queries or keys of so many heads; None has none."""
        if not self.qk_norm:
            return None
        width = self.head_size * (heads if self.qk_norm == "whole" else 1)
        return NormConfig(width, self.norm, self.norm_eps, bias=False, offset=self.norm_offset)

    def _mlp(self, number: int) -> MLPConfig | MixtureConfig:
        """Return the MLP of layer `number`, or the mixture of experts in its place."""
        experts = self.experts
        if experts is None or number < experts.dense_layers:
            return MLPConfig(width=self.d_model, hidden=self.ff_size, activation=self.mlp, bias=self.bias)
        hidden = experts.d_ff or self.ff_size
        shared = experts.shared_d_ff or experts.shared * hidden
        return MixtureConfig(
            width=self.d_model,
            hidden=hidden,
            settings=experts,
            shared=MLPConfig(width=self.d_model, hidden=shared, activation="swiglu", bias=False) if shared else None,
        )

    def layer_kinds(self) -> Mapping[LayerConfig, int]:
        """Return the layers that differ, each with how many there are of it, in their order in the model."""
        # Layers with the same window and the same kind of MLP are alike: building each anew would take most of a count.
        kinds = [(self._is_global(number), number < self.leading_layers) for number in range(self.n_layers)]
        return {self.layer(kinds.index(kind)): count for kind, count in Counter(kinds).items()}

    def attended_share(self, length: int, block: int) -> float:
        """Return the share of a causal mask's scores that layers compute, the mean over all of them.

        length: positions of a sample. block: keys that a kernel computes together, so that windows reach so much further.
        """
        shares = 0.0
        for layer, count in self.layer_kinds().items():
            window = layer.attention.window_within(length)
            seen = length if window is None else min(length, window + block)
            # The first queries attend to less than a window: a triangle of it is missing.
            shares += count * seen * (2 * length - seen) / length**2
        return shares / self.n_layers

    @property
    def leading_layers(self) -> int:
        """First blocks that have an MLP where those that follow have experts."""
        return 0 if self.experts is None else self.experts.dense_layers

    @property
    def residual_norm(self) -> NormConfig:
        """Normalisation of the residual stream: in every layer and before the head."""
        return NormConfig(self.d_model, self.norm, self.norm_eps, self.bias, self.norm_offset)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default resolved."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        """Width of one head, the default resolved."""
        if self.latent is not None:
            return self.latent.nope_size + self.latent.rope_size
        return self.head_dim or self.d_model // self.n_heads

    def biases_attention(self, length: int) -> bool:
        """Return whether attention over `length` positions needs more than a causal mask."""
        kinds = [layer.attention for layer in self.layer_kinds()]
        windowed = any(attention.window_within(length) for attention in kinds)
        return self.positions == "alibi" or windowed or self.changes_softmax

    @property
    def changes_softmax(self) -> bool:
        """Whether scores are capped or sinks take part: what SDPA's kernels do not compute."""
        return self.attention_softcap is not None or self.attention_sinks

    @property
    def rotated_size(self) -> int:
        """Features of a head that rotary positions rotate."""
        return int(self.head_size * self.rotary_fraction) if self.latent is None else self.latent.rope_size

    @property
    def ff_size(self) -> int:
        """Hidden width of the MLP, the default resolved."""
        return self.d_ff or 4 * self.d_model
