"""The `model` section of a run file: what all families share, and the shape of one decoder for the language family.

Pure description: it holds what defines the function the model computes and nothing about devices or layouts.
Cross-field rules that belong to the shape alone (heads that divide the width) are checked here.

`LanguageModel.layer` says what one layer is, in a typed configuration for each module of `nn` that it is built of. Modules,
splits and sizes are made from these, so layers may differ, and an option of attention or MLP is one field here and one
place in `nn`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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

    @property
    def leading_layers(self) -> int:
        """First blocks that are of another kind than those that follow."""
        return 0


class RopeScaling(Section):
    """Change of the rotary frequencies for contexts longer than those of pre-training; `kind` says which fields count."""

    kind: Literal["llama3", "linear", "ntk", "yarn"] = "llama3"
    """llama3 stretches low frequencies; linear stretches all; ntk raises the base; yarn stretches those that turn seldom."""
    factor: Annotated[float, Field(gt=0.0)] = 8.0
    """How much longer the context becomes."""
    low_freq_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """llama3: wavelengths above original_positions / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """llama3: wavelengths below original_positions / high_freq_factor are left alone."""
    original_positions: Positions = 8192
    """llama3, yarn: context length of pre-training."""
    beta_fast: Annotated[float, Field(gt=0.0)] = 32.0
    """yarn: frequencies with at least so many turns in the original context are left alone (arXiv:2309.00071)."""
    beta_slow: Annotated[float, Field(gt=0.0)] = 1.0
    """yarn: frequencies with at most so many turns in the original context are stretched by the whole factor."""
    truncate: bool = True
    """yarn: whether both ends of the blend are whole pairs of features."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """yarn: factor of rotated queries and keys; null: 0.1 ln(factor) + 1, or what mscale and mscale_all_dim make of it."""
    mscale: Annotated[float, Field(ge=0.0)] | None = None
    """yarn: with mscale_all_dim, queries and keys are scaled by their ratio, each 0.1 m ln(factor) + 1 (DeepSeek-V2)."""
    mscale_all_dim: Annotated[float, Field(ge=0.0)] | None = None
    """yarn: the scale of attention is multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2 (DeepSeek-V2); null or 0 keeps
    it."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} must be less than {high}={getattr(self, high)}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim count together: give both or neither")
        return self

    @model_validator(mode="after")
    def _fields_count(self) -> RopeScaling:
        for name, kinds in _SCALING_FIELDS.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.kind not in kinds and value != default:
                raise ValueError(f"{name}={value} has no effect with kind={self.kind}; leave it out")
        return self

    def attention_scale(self) -> float:
        """Return the factor of attention's scale (DeepSeek-V2): that of the logarithm of the stretch, squared."""
        return self._log_scale(self.mscale_all_dim or 0.0) ** 2

    def rotated_scale(self) -> float:
        """Return the factor of rotated queries and keys: YaRN's attention factor (arXiv:2309.00071, section 3.4)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._log_scale(self.mscale) / self._log_scale(self.mscale_all_dim)
        return self._log_scale(1.0)

    def _log_scale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * weight * math.log(self.factor) + 1.0


_SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "original_positions": ("llama3", "yarn"),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"), ("yarn",)),
}
"""Fields of `RopeScaling` that not every kind reads, each with the kinds that do."""


class Experts(Section):
    """A mixture of experts in place of the MLP of most blocks: each token is computed by a few of many SwiGLU networks."""

    count: Annotated[int, Field(ge=2, le=4096)]
    """Routed experts of a block."""
    active: Annotated[int, Field(ge=1, le=256)]
    """Routed experts that compute a token."""
    d_ff: HiddenWidth | None = None
    """Hidden width of an expert; null means the model's d_ff."""
    shared: Annotated[int, Field(ge=0, le=256)] = 0
    """Experts that compute every token besides, as one network of `shared` times the width of an expert."""
    shared_d_ff: HiddenWidth | None = None
    """Hidden width of the shared network; null means shared times d_ff."""
    shared_gate: bool = False
    """Whether a sigmoid of the token weighs the shared network (Qwen2-MoE)."""
    dense_layers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """First blocks that keep an MLP of the model's d_ff (DeepSeek)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores, in float32."""
    normalize: bool = True
    """Whether the weights of a token's experts are divided by their sum (Mixtral, Qwen3, DeepSeek-V3; not OLMoE)."""
    scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of the weights (DeepSeek's routed_scaling_factor)."""
    groups: Annotated[int, Field(ge=1, le=1024)] = 1
    """Groups of experts of which a token may use a few (DeepSeek's n_group)."""
    active_groups: Annotated[int, Field(ge=1, le=1024)] = 1
    """Groups that a token may use; the best by their group_score."""
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    """What a group counts by: the sum of its two best scores (DeepSeek-V3), or its best (DeepSeek-V2)."""
    bias_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Step by which an expert's selection bias rises each optimizer step while it gets less than its share, and falls while
    it gets more (Wang et al. 2024, arXiv:2408.15664); 0 keeps it."""
    selection_bias: bool = False
    """Whether selection adds a bias for each expert; follows from bias_rate above 0."""
    balance: Literal["none", "sequence", "global_batch"] = "sequence"
    """Over what the balance loss wants experts to be used alike: each sequence, or the global batch of the step before."""
    balance_weight: Annotated[float, Field(ge=0.0)] = 0.01
    """Factor of the balance loss (Switch Transformer, arXiv:2101.03961, equation 4)."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Factor of the squared log-sum of the router's exponentials (ST-MoE, arXiv:2202.08906, equation 5)."""
    capacity_factor: Annotated[float, Field(gt=0.0)] | None = None
    """Tokens of a sequence that an expert takes, over its even share, first come first served; null drops none."""

    @model_validator(mode="after")
    def _choices_exist(self) -> Experts:
        if self.count % self.groups:
            raise ValueError(f"groups={self.groups} does not divide count={self.count}")
        if self.active_groups > self.groups:
            raise ValueError(f"active_groups={self.active_groups} is more than groups={self.groups}")
        if self.active > self.count // self.groups * self.active_groups:
            raise ValueError(
                f"active={self.active} is more than the {self.count // self.groups * self.active_groups} experts that "
                f"active_groups={self.active_groups} of groups={self.groups} hold"
            )
        if self.groups > 1 and self.group_score == "top2_sum" and self.count // self.groups < 2:
            raise ValueError(f"group_score=top2_sum needs two experts a group: groups={self.groups} leaves one")
        return self

    @property
    def biased(self) -> bool:
        """Whether selection adds a bias for each expert."""
        return self.selection_bias or self.bias_rate > 0.0


class LatentSizes(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values come from one latent."""

    query_rank: Width | None = None
    """Features that queries are compressed to; null: they are not."""
    key_value_rank: Width
    """Features of the latent that keys and values of all heads are expanded from."""
    rope_size: Width
    """Rotated features of a head, whose key all heads share."""
    nope_size: Width
    """Features of a head's queries and keys that are not rotated."""
    value_size: Width
    """Features of a head's values; at most nope_size + rope_size."""

    @model_validator(mode="after")
    def _values_fit(self) -> LatentSizes:
        if self.value_size > self.nope_size + self.rope_size:
            raise ValueError(
                f"value_size={self.value_size} is more than nope_size + rope_size = {self.nope_size + self.rope_size}"
            )
        return self


NormPosition = Literal["pre", "post", "sandwich"]
"""pre: x + f(norm(x)). post: x + norm(f(x)) (OLMo 2). sandwich: x + norm(f(norm(x))) (Gemma 2)."""


@dataclass(frozen=True)
class NormConfig:
    """A normalisation over the last dim."""

    width: int
    kind: Literal["layernorm", "rmsnorm"]
    eps: float
    bias: bool
    """Whether a LayerNorm has a bias; RMSNorm never has one."""
    offset: bool = False
    """Whether the factor of normalised features is 1 + weight."""

    def parameter_count(self) -> int:
        """Return all parameters."""
        return self.width * (2 if self.bias and self.kind == "layernorm" else 1)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions."""

    size: int
    """First features of a head, which are rotated; an even number."""
    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | None


@dataclass(frozen=True)
class AlibiConfig:
    """Linear biases of attention."""

    heads: int
    bias_max: float
    """Slopes run from 2^-(bias_max/heads) to 2^-bias_max."""


@dataclass(frozen=True)
class AttentionConfig:
    """Self-attention of one layer. Layers with equal attention share masks and rotary tables."""

    width: int
    """Features of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    head_size: int
    bias: bool
    """Whether the output projection has a bias."""
    qkv_bias: bool
    """Whether the projections of queries, keys and values have biases."""
    query_norm: NormConfig | None
    """Normalisation of queries before the product, as wide as a head or as all of them together; None leaves them."""
    key_norm: NormConfig | None
    """Normalisation of keys, as that of queries."""
    joint_norm: bool
    """Whether these norms are over all heads together, and not over each."""
    clip: float | None
    """Clamp on the projected queries, keys and values; None leaves them."""
    scale: float | None
    """Factor of the products of queries and keys; None is 1 / sqrt(head_size)."""
    softcap: float | None
    """Bound of these products, by a tanh; None leaves them."""
    window: int | None
    """Positions that a query attends to, its own and those right before it; None: all up to its own."""
    sinks: bool
    """Whether each head has a learned logit that takes part in the softmax and has no value."""
    rope: RopeConfig | None
    alibi: AlibiConfig | None
    latent: LatentSizes | None
    """Sizes of latent attention, whose norms are those of compressed queries and of latents; None where there is none."""

    @property
    def value_size(self) -> int:
        """Features of a head's values."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def group(self) -> int:
        """Query heads that share a key and a value head."""
        return self.heads // self.kv_heads

    def matrix_parameters(self) -> int:
        """Return the parameters of the projections."""
        if self.latent is not None:
            x, expanded = self.latent, self.heads * self.head_size
            queries = self.width * expanded
            if x.query_rank is not None:
                queries = x.query_rank * (self.width + expanded)
            down = self.width * (x.key_value_rank + x.rope_size)
            up = x.key_value_rank * self.heads * (x.nope_size + x.value_size)
            return queries + down + up + self.heads * x.value_size * self.width
        return 2 * self.width * (self.heads + self.kv_heads) * self.head_size

    def parameter_count(self) -> int:
        """Return all parameters."""
        biases = self.width if self.bias else 0
        biases += (self.heads + 2 * self.kv_heads) * self.head_size if self.qkv_bias else 0
        norms = sum(norm.parameter_count() for norm in (self.query_norm, self.key_norm) if norm is not None)
        return self.matrix_parameters() + biases + norms + self.sinks * self.heads

    @property
    def changes_softmax(self) -> bool:
        """Whether scores are capped or sinks take part: what SDPA's kernels do not compute."""
        return self.softcap is not None or self.sinks

    def window_within(self, positions: int) -> int | None:
        """Return the window where it leaves out any of so many positions; None where it does not."""
        return self.window if self.window is not None and self.window < positions else None

    def products_per_token(self, positions: int) -> int:
        """Return the multiplications of scores and weighted values for one query that attends to all `positions`."""
        return self.heads * (self.head_size + self.value_size) * positions

    def causal_products_per_token(self, positions: int) -> int:
        """Return as `products_per_token` for a mean query of so many positions: half of them, or what the window leaves."""
        window = self.window_within(positions) or positions
        # The first queries attend to less than a window: a triangle of it is missing.
        return self.products_per_token(1) * window * (2 * positions - window) // (2 * positions)


@dataclass(frozen=True)
class MLPConfig:
    """MLP of one layer."""

    width: int
    """Features of the residual stream."""
    hidden: int
    """Hidden features."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu"]
    bias: bool

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies the hidden features, which takes a third matrix."""
        return self.activation in ("swiglu", "geglu")

    def matrix_parameters(self) -> int:
        """Return the parameters of the matrices."""
        return (3 if self.gated else 2) * self.width * self.hidden

    def parameter_count(self) -> int:
        """Return all parameters."""
        biases = (2 if self.gated else 1) * self.hidden + self.width if self.bias else 0
        return self.matrix_parameters() + biases


@dataclass(frozen=True)
class MixtureConfig:
    """Mixture of experts in place of the MLP of one layer. Experts are SwiGLU networks without biases."""

    width: int
    """Features of the residual stream."""
    hidden: int
    """Hidden features of an expert."""
    settings: Experts
    shared: MLPConfig | None
    """The network that every token goes through besides; None where there is none."""

    def matrix_parameters(self) -> int:
        """Return the parameters that multiply a token: the router's, and those of the experts that it is sent to."""
        return self._count_parameters(self.settings.active)

    def parameter_count(self) -> int:
        """Return all parameters."""
        return self._count_parameters(self.settings.count)

    def expert_parameters(self) -> int:
        """Return the parameters of all routed experts, which ranks may share out."""
        return 3 * self.settings.count * self.width * self.hidden

    def _count_parameters(self, experts: int) -> int:
        shared = 0 if self.shared is None else self.shared.parameter_count() + self.settings.shared_gate * self.width
        return self.width * (self.settings.count + 3 * experts * self.hidden) + shared


@dataclass(frozen=True)
class LayerConfig:
    """One layer of a decoder: attention and MLP, each added to the residual stream."""

    norm: NormConfig
    """All norms of the residual stream."""
    norm_position: NormPosition
    parallel: bool
    """Whether the MLP reads the stream that attention reads, and not the one that it wrote to."""
    attention: AttentionConfig
    mlp: MLPConfig | MixtureConfig
    dropout: float
    """Chance that an element of a residual branch is dropped."""

    def matrix_parameters(self) -> int:
        """Return the parameters that multiply a token."""
        return self.attention.matrix_parameters() + self.mlp.matrix_parameters()

    def parameter_count(self) -> int:
        """Return all parameters."""
        norms = 4 if self.norm_position == "sandwich" else 2
        return self.attention.parameter_count() + self.mlp.parameter_count() + norms * self.norm.parameter_count()


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
        """Return what layer `number` (from 0) is."""
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
        return AttentionConfig(
            width=self.d_model,
            heads=self.n_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            bias=self.bias,
            qkv_bias=self.bias if self.qkv_bias is None else self.qkv_bias,
            query_norm=self._query_norm(),
            key_norm=self._key_norm(),
            joint_norm=self.qk_norm == "whole",
            clip=self.clip_qkv,
            scale=self._scale(),
            softcap=self.attention_softcap,
            window=window,
            sinks=self.attention_sinks,
            rope=rope if self.positions == "rope" else None,
            alibi=alibi if self.positions == "alibi" else None,
            latent=self.latent,
        )

    def _query_norm(self) -> NormConfig | None:
        if self.latent is None:
            return self._head_norm(self.n_heads)
        rank = self.latent.query_rank
        return None if rank is None else NormConfig(rank, self.norm, self.norm_eps, bias=False)

    def _key_norm(self) -> NormConfig | None:
        if self.latent is None:
            return self._head_norm(self.kv_heads)
        return NormConfig(self.latent.key_value_rank, self.norm, self.norm_eps, bias=False)

    def _is_global(self, number: int) -> bool:
        return self.global_every > 0 and (number + 1) % self.global_every == 0

    def _head_norm(self, heads: int) -> NormConfig | None:
        """Return the norm of queries or keys of so many heads; None has none."""
        if not self.qk_norm:
            return None
        width = self.head_size * (heads if self.qk_norm == "whole" else 1)
        return NormConfig(width, self.norm, self.norm_eps, bias=False, offset=self.norm_offset)

    def _scale(self) -> float | None:
        """Return the factor of products of queries and keys, or None for that of the head's width alone."""
        stretched = 1.0 if self.rope_scaling is None else self.rope_scaling.attention_scale()
        if stretched == 1.0:
            return self.attention_scale
        return stretched * (self.attention_scale or self.head_size**-0.5)

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
        return Counter(self.layer(number) for number in range(self.n_layers))

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
