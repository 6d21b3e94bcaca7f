"""What the weather family declares about itself, as data: how parameters begin, what kind each is, what may be split."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial

from phalanx.families.family import DeclaredModel
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.grid_features import grid_table, sine_table
from phalanx.families.weather.sizes import block_flops_per_sample, embedding_flops_per_sample, head_flops_per_sample
from phalanx.nn.parameters import InitRule, InitRules, MatrixRows, MatrixRules, ParameterKind
from phalanx.nn.splits import Split, SplitCount, Splits

_KINDS: tuple[tuple[str, ParameterKind], ...] = (
    ("*norm.weight", "norm"),
    ("*.bias", "bias"),
    ("embedding.variables", "embedding"),
    ("embedding.positions", "embedding"),
    ("embedding.*queries", "embedding"),
    ("*", "matrix"),
)


class DeclaredWeather(DeclaredModel):
    """What a forecaster's shape declares."""

    model: WeatherModel

    def parameter_kind(self, name: str) -> ParameterKind:
        """Return the kind of the forecaster's parameter `name`; the first matching row of the table decides."""
        return next(kind for pattern, kind in _KINDS if fnmatchcase(name, pattern))

    def initial_rules(self) -> InitRules:
        """Return initial values by parameter name, first match wins.

        As published: matrices normal with `init_std`, tables of variables and positions as waves, a single query zero.
        Several queries that are all zero would give equal tokens, so these start normal.
        """
        single = self.model.aggregation == "flat" and self.model.aggregation_queries == 1
        return [
            ("*norm.weight", InitRule.constant(1.0)),
            ("*.bias", InitRule.constant(0.0)),
            ("embedding.variables", InitRule.of_index(sine_table)),
            ("embedding.positions", InitRule.of_index(partial(grid_table, self.model.patch_columns))),
            ("embedding.*queries", InitRule.constant(0.0) if single else InitRule.normal(self.model.init_std)),
            ("*", InitRule.normal(self.model.init_std)),
        ]

    def matrices(self) -> MatrixRules:
        """Return the matrices of parameters: queries, keys and values of attention share one."""
        size = self.model.head_size
        qkv = MatrixRows(pattern=(size, size, size))
        return [("blocks.*.attention.qkv.weight", qkv), *super().matrices()]

    def split_features(self) -> list[SplitCount]:
        """Return the features of blocks that `tp` splits: those of heads, and hidden ones of the MLP."""
        return [SplitCount("model.d_model", self.model.d_model), SplitCount("model.ff_size", self.model.ff_size)]

    def splits(self) -> Splits:
        """Return how modules may be split over tensor-parallel ranks; see `nn.splits`.

        Hidden layers of the head are split in pairs, one by its outputs and the next by its inputs; an odd last one stays
        whole. Aggregation of variables is split by heads: every rank is given whole fields, of which it computes the scores
        and values of its heads, and the output's sums are scattered to locations. The rest of embedding and head is small
        and stays whole: each rank computes its own locations.
        """
        head: Splits = []
        # In pairs: a sum over ranks behind the second is the only exchange.
        for first in range(0, self.model.decoder_depth - 1, 2):
            head += [(f"head.layers.{first}", Split("column")), (f"head.layers.{first + 1}", Split("row"))]
        heads = "embedding.aggregation.groups" if self.model.aggregation == "hierarchical" else "embedding.aggregation"
        return [
            *((f"{heads}.{name}", Split("part", self.model.head_size)) for name in ("query", "key", "value")),
            (f"{heads}.output", Split("row", self.model.head_size)),
            ("blocks.*.attention", Split("attention")),
            ("blocks.*.attention.qkv", Split("column", 3 * self.model.head_size)),
            ("blocks.*.attention.output", Split("row", self.model.head_size)),
            ("blocks.*.mlp.up", Split("column")),
            ("blocks.*.mlp.down", Split("row")),
            *head,
        ]

    def split_counts(self) -> list[SplitCount]:
        """Return what a tensor-parallel degree must divide. Rows between blocks are sharded in whole locations."""
        grids = (
            SplitCount(f"the patches of model.grids, {grid.name}", self.model.on_grid(grid).n_locations)
            for grid in self.model.grids
        )
        return [
            SplitCount("model.n_heads", self.model.n_heads),
            SplitCount("model.d_ff", self.model.ff_size),
            SplitCount("the patches of model.n_lat x model.n_lon", self.model.n_locations),
            *grids,
        ]

    def block_costs(self) -> tuple[float, float]:
        """Return the floating-point operations of the embedding and of the head, in those of one block."""
        block = block_flops_per_sample(self.model)
        return embedding_flops_per_sample(self.model) / block, head_flops_per_sample(self.model) / block
