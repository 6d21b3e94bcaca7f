"""What one layer of a decoder is: a typed configuration for each module of `nn` that it is built of.

`RopeScaling`, `Experts` and `LatentSizes` are sections of a run file; the others are derived from the `model` section by
`LanguageModel.layer`. Modules, splits and sizes are made from these, so layers may differ, and an option of attention or
MLP is one field here and one place in `nn`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from phalanx.config.section import HiddenWidth, Positions, Section, Width


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
            # Queries are expanded from a latent of their own where there is one, else from the stream itself.
            x, expanded = self.latent, self.heads * self.head_size
            queries = self.width * expanded
            if x.query_rank is not None:
                queries = x.query_rank * (self.width + expanded)
            # The rotated key is not expanded: all heads share it.
            down = self.width * (x.key_value_rank + x.rope_size)
            up = x.key_value_rank * self.heads * (x.nope_size + x.value_size)
            return queries + down + up + self.heads * x.value_size * self.width
        # Queries and the output have a matrix of all heads each; keys and values have one of `kv_heads` each.
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
        # One for each hidden feature of gate and up, and one for each output.
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
        """Return the parameters of all routed experts, which may be sharded over ranks."""
        return 3 * self.settings.count * self.width * self.hidden

    def _count_parameters(self, experts: int) -> int:
        shared = 0 if self.shared is None else self.shared.parameter_count() + self.settings.shared_gate * self.width
        # The router has a row for every expert, used or not; an expert has gate, up and down.
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
        # Attention and MLP each have one norm, or one on either side.
        norms = 4 if self.norm_position == "sandwich" else 2
        return self.attention.parameter_count() + self.mlp.parameter_count() + norms * self.norm.parameter_count()
