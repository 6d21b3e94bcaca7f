"""What the language family declares about decoders, as data: how parameters begin, what kind each is, what may be split."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from phalanx.config.model import LanguageModel
from phalanx.families.family import DeclaredModel
from phalanx.families.language.sizes import block_flops_per_token, head_flops_per_token
from phalanx.nn.attention import attention_splits
from phalanx.nn.layers import mlp_splits, mlp_unit
from phalanx.nn.parameters import InitRule, InitRules, ParameterKind
from phalanx.nn.splits import Split, SplitCount, Splits, name_splits

_KINDS: tuple[tuple[str, ParameterKind], ...] = (
    ("*norm.weight", "norm"),
    ("*.bias", "bias"),
    ("embedding.*", "embedding"),
    ("*", "matrix"),
)


class DeclaredLanguage(DeclaredModel):
    """What a decoder's shape declares."""

    model: LanguageModel

    def initial_rules(self) -> InitRules:
        """Return initial values by parameter name; the first pattern that matches counts.

        Matrices start normal with `init_std`; the two that write to the residual stream with 1/sqrt(2 n_layers) of it, so
        that the stream's variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
        """
        residual = self.model.init_std / math.sqrt(2 * self.model.n_layers)
        return [
            ("*norm.weight", InitRule.constant(1.0)),
            ("*.bias", InitRule.constant(0.0)),
            ("*.attention.output.weight", InitRule.normal(residual)),
            ("*.mlp.down.weight", InitRule.normal(residual)),
            ("*", InitRule.normal(self.model.init_std)),
        ]

    def parameter_kind(self, name: str) -> ParameterKind:
        """Return the kind of the parameter `name`; the first matching row of the table decides."""
        return next(kind for pattern, kind in _KINDS if fnmatchcase(name, pattern))

    def splits(self) -> Splits:
        """Return how modules may be split over tensor-parallel ranks; see `nn.splits`."""
        layer = self.model.layer(0)
        return [
            ("embedding", Split("lookup")),
            *name_splits("blocks.*.attention", attention_splits(layer.attention)),
            *name_splits("blocks.*.mlp", mlp_splits(layer.mlp)),
            ("head", Split("logits")),
        ]

    def split_counts(self) -> list[SplitCount]:
        """Return what a tensor-parallel degree must divide. Parts of the vocabulary may be uneven, so it is not among
        them."""
        model = self.model
        unit = mlp_unit(model.layer(0).mlp)
        return [
            SplitCount("model.n_heads", model.n_heads),
            SplitCount("model.n_kv_heads", model.kv_heads),
            SplitCount("model.d_ff", model.ff_size // unit, unit),
        ]

    def block_costs(self) -> tuple[float, float]:
        """Return the floating-point operations of the embedding and of the head, in those of one block.

        The embedding is a lookup: memory traffic of a few rows a token, next to nothing beside a block's matmuls.
        """
        return 0.0, head_flops_per_token(self.model) / block_flops_per_token(self.model, self.length)

    def tied(self) -> dict[str, str]:
        """Return the output head's copy of the token table, which it keeps where the table is in another model chunk."""
        return {"head.weight": "embedding.weight"} if self.model.tied_head else {}
