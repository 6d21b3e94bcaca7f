"""What the language family declares about decoders, as data: how parameters begin, what kind each is, what may be split."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from phalanx.config.layers import MLPConfig
from phalanx.config.model import LanguageModel
from phalanx.families.family import DeclaredModel
from phalanx.families.language.sizes import block_flops_per_token, head_flops_per_token
from phalanx.nn.declared_layers import (
    attention_matrices,
    attention_splits,
    latent_attention_matrices,
    latent_attention_splits,
    mixture_matrices,
    mlp_matrices,
    mlp_splits,
    mlp_unit,
)
from phalanx.nn.parameters import InitRule, InitRules, MatrixRules, ParameterKind, name_matrices
from phalanx.nn.splits import Split, SplitCount, Splits, name_splits

_KINDS: tuple[tuple[str, ParameterKind], ...] = (
    ("*norm.weight", "norm"),
    ("*.bias", "bias"),
    ("*.sinks.weight", "bias"),
    ("embedding.*", "embedding"),
    ("*", "matrix"),
)


class DeclaredLanguage(DeclaredModel):
    """What a decoder's shape declares."""

    model: LanguageModel

    def initial_rules(self) -> InitRules:
        """Return initial values by parameter name; the first pattern that matches counts.

        Matrices start normal with `init_std`; the two that write to the residual stream with 1/sqrt(2 n_layers) of it, so
        that the stream's variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3). Under muP, variances
        of matrices fall with the width, and that of the head with its square (arXiv:2203.03466, table 3).
        """
        hidden = self.model.init_std * math.sqrt(self._width_ratio)
        residual = hidden / math.sqrt(2 * self.model.n_layers)
        experts = self.model.experts
        return [
            ("*norm.weight", InitRule.constant(0.0 if self.model.norm_offset else 1.0)),
            ("*.bias", InitRule.constant(0.0)),
            ("*.sinks.weight", InitRule.constant(0.0)),
            ("*.attention.output.weight", InitRule.normal(residual)),
            ("*.mlp.down.weight", InitRule.normal(residual)),
            ("*.mlp.experts.down", InitRule.normal(residual)),
            ("*.mlp.shared.down.weight", InitRule.normal(residual)),
            # State of routers: each expert's share of the choices, until the first step has counted.
            ("*.mlp.router.load", InitRule.constant(1.0 if experts is None else 1.0 / experts.count)),
            ("embedding.*", InitRule.normal(self.model.init_std)),
            ("head.weight", InitRule.normal(self.model.init_std * self._width_ratio)),
            ("*", InitRule.normal(hidden)),
        ]

    def rate_ratio(self, name: str) -> float:
        """Return the factor of the learning rate of the parameter `name`: under muP, matrices' falls with the width."""
        return self._width_ratio if self.parameter_kind(name) == "matrix" else 1.0

    @property
    def _width_ratio(self) -> float:
        """Width of the base over that of the model; 1 without muP."""
        base = self.model.mup_base_width
        return 1.0 if base is None else base / self.model.d_model

    def parameter_kind(self, name: str) -> ParameterKind:
        """Return the kind of the parameter `name`; the first matching row of the table decides."""
        return next(kind for pattern, kind in _KINDS if fnmatchcase(name, pattern))

    def matrices(self) -> MatrixRules:
        """Return the matrices of parameters, by names that dense layers and mixtures do not have in common."""
        found: MatrixRules = []
        for layer in self.model.layer_kinds():
            mlp = mlp_matrices(layer.mlp) if isinstance(layer.mlp, MLPConfig) else mixture_matrices(layer.mlp)
            attention_of = attention_matrices if layer.attention.latent is None else latent_attention_matrices
            found += name_matrices("blocks.*.attention", attention_of(layer.attention))
            found += name_matrices("blocks.*.mlp", mlp)
        return [*found, *super().matrices()]

    def splits(self) -> Splits:
        """Return how modules may be split over tensor-parallel ranks; see `nn.splits`."""
        attention: Splits = []
        mlp: Splits = []
        for layer in self.model.layer_kinds():
            splits_of = attention_splits if layer.attention.latent is None else latent_attention_splits
            attention += name_splits("blocks.*.attention", splits_of(layer.attention))
            if isinstance(layer.mlp, MLPConfig):
                mlp += name_splits("blocks.*.mlp", mlp_splits(layer.mlp))
            elif layer.mlp.shared is not None:
                # Routed experts are whole on every tensor-parallel rank, which sends them the positions that it holds.
                mlp += name_splits("blocks.*.mlp.shared", mlp_splits(layer.mlp.shared))
        # Kinds of layers mostly have their modules in common.
        return [("embedding", Split("lookup")), *dict.fromkeys([*attention, *mlp]), ("head", Split("logits"))]

    def split_counts(self) -> list[SplitCount]:
        """Return what a tensor-parallel degree must divide. Parts of the vocabulary may be uneven, so it is not among
        them."""
        counts = [SplitCount("model.n_heads", self.model.n_heads), SplitCount("model.n_kv_heads", self.model.kv_heads)]
        for layer in self.model.layer_kinds():
            dense = isinstance(layer.mlp, MLPConfig)
            split = layer.mlp if isinstance(layer.mlp, MLPConfig) else layer.mlp.shared
            if split is not None:
                field = "model.d_ff" if dense else "model.experts.shared_d_ff"
                counts.append(SplitCount(field, split.hidden // mlp_unit(split), mlp_unit(split)))
        return list(dict.fromkeys(counts))

    def split_features(self) -> list[SplitCount]:
        """Return the features that `tp` splits: those of heads, and hidden ones of MLPs, gate and up each."""
        counts = []
        for layer in self.model.layer_kinds():
            attention = layer.attention
            if attention.latent is None:
                size, joint = attention.head_size, attention.heads + 2 * attention.kv_heads
                counts += [SplitCount("model.n_heads", n * size) for n in (attention.heads, joint)]
            else:
                latent = attention.latent
                sizes = (attention.head_size, latent.nope_size + latent.value_size, latent.value_size)
                counts += [SplitCount("model.latent", attention.heads * size) for size in sizes]
            dense = isinstance(layer.mlp, MLPConfig)
            split = layer.mlp if isinstance(layer.mlp, MLPConfig) else layer.mlp.shared
            if split is not None:
                counts.append(SplitCount("model.d_ff" if dense else "model.experts.shared_d_ff", split.hidden))
        return list(dict.fromkeys(counts))

    def block_costs(self) -> tuple[float, float]:
        """Return the floating-point operations of the embedding and of the head, in those of one block.

        The embedding is a lookup: memory traffic of a few rows a token, next to nothing beside a block's matmuls.
        """
        return 0.0, head_flops_per_token(self.model) / block_flops_per_token(self.model, self.length)

    def tied(self) -> dict[str, str]:
        """Return the output head's copy of the token table, which it keeps where the table is in another model chunk."""
        return {"head.weight": "embedding.weight"} if self.model.tied_head else {}
