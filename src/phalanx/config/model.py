"""The `model` section of a run file: what all families share, and the shape of one decoder for the language family.

Pure description: it holds what defines the function the model computes and nothing about devices or layouts.
Cross-field rules that belong to the shape alone (heads that divide the width) are checked here.

`LanguageModel.layer` says what one layer is, in a typed configuration for each module of `nn` that it is built of. Modules,
splits and sizes are made from these, so layers may differ, and an option of attention or MLP is one field here and one
place in `nn`.
"""

from __future__ import annotations

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
    dense_layers: Annotated[int, Field(ge=0)] = 0
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


@dataclass(frozen=True)
class NormConfig:
    """A normalisation over the last dim."""

    width: int
    kind: Literal["layernorm", "rmsnorm"]
    eps: float
    bias: bool
    """Whether a LayerNorm has a bias; RMSNorm never has one."""

    def parameter_count(self) -> int:
        """Return all parameters."""
        return self.width * (2 if self.bias and self.kind == "layernorm" else 1)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions."""

    size: int
    """Features of a head that are rotated."""
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
    """Whether the projections have biases."""
    head_norm: NormConfig | None
    """Normalisation of each query and key head before the product; None leaves them."""
    clip: float | None
    """Clamp on the projected queries, keys and values; None leaves them."""
    rope: RopeConfig | None
    alibi: AlibiConfig | None

    @property
    def group(self) -> int:
        """Query heads that share a key and a value head."""
        return self.heads // self.kv_heads

    def matrix_parameters(self) -> int:
        """Return the parameters of the projections."""
        return 2 * self.width * (self.heads + self.kv_heads) * self.head_size

    def parameter_count(self) -> int:
        """Return all parameters."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_size + self.width if self.bias else 0
        norms = 0 if self.head_norm is None else 2 * self.head_norm.parameter_count()
        return self.matrix_parameters() + biases + norms

    def products_per_token(self, positions: int) -> int:
        """Return the multiplications of scores and weighted values for one query that attends to all `positions`."""
        return 2 * self.heads * self.head_size * positions


@dataclass(frozen=True)
class MLPConfig:
    """MLP of one layer."""

    width: int
    """Features of the residual stream."""
    hidden: int
    """Hidden features."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"]
    bias: bool

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies the hidden features, which takes a third matrix."""
        return self.activation == "swiglu"

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

    def _count_parameters(self, experts: int) -> int:
        shared = 0 if self.shared is None else self.shared.parameter_count() + self.settings.shared_gate * self.width
        return self.width * (self.settings.count + 3 * experts * self.hidden) + shared


@dataclass(frozen=True)
class LayerConfig:
    """One layer of a decoder: x + attention(norm(x)), then x + mlp(norm(x))."""

    norm: NormConfig
    """Both norms."""
    attention: AttentionConfig
    mlp: MLPConfig | MixtureConfig
    dropout: float
    """Chance that an element of a residual branch is dropped."""

    def matrix_parameters(self) -> int:
        """Return the parameters that multiply a token."""
        return self.attention.matrix_parameters() + self.mlp.matrix_parameters()

    def parameter_count(self) -> int:
        """Return all parameters."""
        return self.attention.parameter_count() + self.mlp.parameter_count() + 2 * self.norm.parameter_count()


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
    experts: Experts | None = None
    """Mixture of experts in place of MLPs; null has none."""
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
        rope = RopeConfig(self.head_size, self.rope_theta, self.rope_scaling)
        alibi = AlibiConfig(self.n_heads, self.alibi_bias_max)
        return LayerConfig(
            norm=self.residual_norm,
            attention=AttentionConfig(
                width=self.d_model,
                heads=self.n_heads,
                kv_heads=self.kv_heads,
                head_size=self.head_size,
                bias=self.bias,
                head_norm=NormConfig(self.head_size, self.norm, self.norm_eps, bias=False) if self.qk_norm else None,
                clip=self.clip_qkv,
                rope=rope if self.positions == "rope" else None,
                alibi=alibi if self.positions == "alibi" else None,
            ),
            mlp=self._mlp(number),
            dropout=self.dropout,
        )

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
    def residual_norm(self) -> NormConfig:
        """Normalisation of the residual stream: in every layer and before the head."""
        return NormConfig(self.d_model, self.norm, self.norm_eps, self.bias)

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
