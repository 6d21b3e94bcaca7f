"""The weather family bound to a run: the class that answers every room (see `families.family`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.weather import sizes
from phalanx.families.weather.config import ModelGrid, WeatherRun
from phalanx.families.weather.cost import WeatherTracing
from phalanx.families.weather.data.grid_turns import GridTurns
from phalanx.families.weather.declare import DeclaredWeather
from phalanx.families.weather.inputs import WeatherInputs
from phalanx.families.weather.layout import WeatherLayout
from phalanx.families.weather.verification import WeatherVerification
from phalanx.nn.splits import SplitCount


class BoundWeather(DeclaredWeather, WeatherLayout, WeatherTracing, WeatherInputs, WeatherVerification, EnsembleModel):
    """A forecaster bound to its run; the rooms' questions are answered by the modules beside this one."""

    run: WeatherRun

    axes = frozenset(("dp_replicate", "dp_shard", "tp", "pp"))
    """Degrees that may be more than 1. Not `cp`: every token attends to every other, and `tp` shards heads as well as the
    tokens between matrices."""
    position_unit = "tok"
    streams_weights = True

    forecasts = True

    def positions(self) -> SplitCount:
        """Return the tokens of a sample: `aggregation_queries` a location, on the largest of the grids in use."""
        grid = self.run.largest_grid
        named = "model.n_lat x model.n_lon" if grid is None else f"model.grids, {grid.name}"
        return SplitCount(f"the patches of {named}, times model.aggregation_queries", self.run.largest_model.n_tokens)

    def positions_through(self, step: int) -> int:
        """See `BoundModel`: each step has samples of one grid."""
        turns = GridTurns.of_run(self.run)
        samples = zip(turns.grids, turns.samples_through(step), strict=True)
        return sum(count * self.run.model.on_grid(grid).n_tokens for grid, count in samples)

    def context_heads(self) -> SplitCount:
        """Return the attention heads."""
        return SplitCount("model.n_heads", self.run.model.n_heads)

    def flops_per_sample(self) -> float:
        """Return the operations this code needs, the mean over grids, and over the run where roll-outs are trained through;
        attention sees all pairs, so `training.flops` makes no difference."""
        through = self.run.data.rollout_steps
        passes = 1.0 if through is None else through.mean(self.run.training.steps or 1)
        return passes * self._mean_flops()

    def relative_flops(self, step: int) -> float:
        """See `BoundModel`."""
        return self._flops_on(GridTurns.of_run(self.run).grid_of(step)) / self._mean_flops()

    def _mean_flops(self) -> float:
        """Return the operations of a sample in a single step, the mean over grids."""
        weights = self.run.grid_weights
        return sum(weight * self._flops_on(grid) for grid, weight in weights.items()) / sum(weights.values())

    def _flops_on(self, grid: ModelGrid | None) -> int:
        return sizes.model_flops_per_sample(self.run.model.on_grid(grid))

    def build_ensemble(
        self,
        members: Sequence[Member],
        options: EnsembleOptions,
        device: torch.device,
        share: Share,
        progress: Progress,
    ) -> Ensemble:
        """Join the members' forecasts, stretched to the spread that the validation split asks for."""
        from phalanx.families.weather.ensemble import build_forecasts  # noqa: PLC0415  (needs the extra [weather])

        return build_forecasts(
            members, device, hours=options.hours, starts=options.samples, share=share, progress=progress
        )
