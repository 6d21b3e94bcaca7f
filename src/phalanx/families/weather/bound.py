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

    def __init__(self, run: WeatherRun) -> None:
        super().__init__(run)
        if run.data.rollout_hours is not None:
            # Steps start from forecasts, which a pipeline has on another rank.
            self.axes = self.axes - {"pp"}

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
        return sum(share * self._flops_of(grid, steps) for grid, steps, share in self.shapes_in_turn())

    def relative_flops(self, step: int) -> float:
        """See `BoundModel`."""
        grid, through = GridTurns.of_run(self.run).grid_of(step), self.run.data.rollout_steps
        steps = None if through is None else through.of_step(step)
        return self._flops_of(grid, steps) / self.flops_per_sample()

    def _flops_of(self, grid: ModelGrid | None, steps: int | None) -> float:
        """Return the operations of a sample on a grid. steps: of roll-outs that are trained through, None without any."""
        model, data = self.run.model.on_grid(grid), self.run.data
        if steps is not None:
            return sizes.roll_out_flops_per_sample(model, steps, trained=True)
        # Each of the lead times equally often; a sample of a shorter one is forecast further in vain.
        counts = [1 if data.rollout_hours is None else lead // data.rollout_hours for lead in data.leads]
        return sum(sizes.roll_out_flops_per_sample(model, count, trained=False) for count in counts) / len(counts)

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
