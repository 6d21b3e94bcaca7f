"""The weather family's answers to what layouts, training and verification ask (`families.family`)."""

from __future__ import annotations

from phalanx.config.families import WeatherRun
from phalanx.families.weather import declare, sizes
from phalanx.nn.initial import InitRules
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.splits import SplitCount


class WeatherFamily:
    """See `families.family.Family`."""

    axes = frozenset(("dp_replicate", "dp_shard", "tp", "pp"))
    """Not `cp`: every token attends to every other, and `tp` shares out both heads and tokens between the matrices."""
    cuts_structures = False
    vanishing: tuple[str, ...] = ()
    position_unit = "tok"

    def positions(self, run: WeatherRun) -> SplitCount:
        """Tokens: some of each location."""
        return SplitCount(
            "model.n_lat * model.n_lon / model.patch_size^2 * model.aggregation_queries", run.model.n_tokens
        )

    def initial_rules(self, run: WeatherRun) -> InitRules:
        """See `declare`."""
        return declare.initial_rules(run.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `declare`."""
        return declare.parameter_kind(name)

    def split_counts(self, run: WeatherRun) -> list[SplitCount]:
        """See `declare`."""
        return declare.tensor_split_counts(run.model)

    def split_rows(self, run: WeatherRun) -> None:
        """No table is shared out unevenly."""

    def context_heads(self, run: WeatherRun) -> SplitCount:
        """Attention heads."""
        return SplitCount("model.n_heads", run.model.n_heads)

    def needs_bias(self, run: WeatherRun) -> bool:
        """Attention has neither bias nor mask."""
        return False

    def block_costs(self, run: WeatherRun) -> tuple[float, float]:
        """See `declare`."""
        return declare.relative_block_costs(run.model)

    def tied(self, run: WeatherRun) -> dict[str, str]:
        """Nothing."""
        return {}

    def branches(self, run: WeatherRun) -> int:
        """One: all samples pass the same head."""
        return 1

    def branch_costs(self, run: WeatherRun) -> list[float]:
        """Of that one."""
        return [1.0]

    def parameter_count(self, run: WeatherRun) -> int:
        """See `sizes`."""
        return sizes.parameter_count(run.model)

    def flops_per_sample(self, run: WeatherRun) -> float:
        """Of the operations this code needs; attention sees all pairs, so `training.flops` makes no difference."""
        return float(sizes.model_flops_per_sample(run.model))


FAMILY = WeatherFamily()
