"""The weather family bound to a run: the class that answers every room (see `families.family`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions, Progress
from phalanx.ensemble.members import Member, Share
from phalanx.families.weather import sizes
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.cost import WeatherTracing
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
        """Return the tokens of a sample: `aggregation_queries` a location."""
        return SplitCount(
            "the patches of model.n_lat x model.n_lon, times model.aggregation_queries", self.run.model.n_tokens
        )

    def context_heads(self) -> SplitCount:
        """Return the attention heads."""
        return SplitCount("model.n_heads", self.run.model.n_heads)

    def flops_per_sample(self) -> float:
        """Return the operations this code needs, of roll-outs that are trained through the mean over the run; attention sees
        all pairs, so `training.flops` makes no difference."""
        through = self.run.data.rollout_steps
        passes = 1.0 if through is None else through.mean(self.run.training.steps or 1)
        return passes * sizes.model_flops_per_sample(self.run.model)

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
