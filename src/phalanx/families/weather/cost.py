"""The weather family for the planner: its parts on meta, and what a run computes with (see `planner.trace.traced_model`)."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.families.weather.config import ModelGrid, WeatherModel, WeatherRun
from phalanx.families.weather.declare import DeclaredWeather
from phalanx.families.weather.layout import WeatherStage, share_embedding
from phalanx.families.weather.model.forecaster import AttentionCore, Forecaster
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import Stage
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.stream_pairs import Stream, stream_matrices
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.traced_model import (
    MODEL_PARTS,
    Kernel,
    PartName,
    PartTracer,
    Setting,
    TracedModel,
    sdpa_choice,
)

_META_ATTENTION: dict[Kernel, AttentionCore] = {
    "flash": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0],
    "cudnn": lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
    "efficient": lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0],
    "math": F.scaled_dot_product_attention,
    "cpu": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
}
"""Attention of all tokens to all, by kernel. The kernels are named, since SDPA on meta would take the one of the math
backend, which keeps whole matrices of scores."""


class WeatherParts(DeclaredWeather, PartTracer):
    """Traces the parts of forecasters."""

    model: WeatherModel

    def build_stage(self, name: PartName, share: SequenceShare, stream: Stream | None) -> Stage:
        """See `PartTracer`."""
        model, dtype = self.model, PRECISIONS[self.setting.precision].compute_dtype
        with torch.device("meta"):
            part = Forecaster(model, dtype=dtype, part=MODEL_PARTS[name])
        stream_matrices(part, self.splits(), share.tp, stream)
        share_embedding(part, share.tp)
        for block in part.blocks:
            block.attention.attend = _META_ATTENTION[self.setting.attention]
        return WeatherStage(part.to(dtype), 0, share, seed=0, grid=self._grid)

    def whole_part(self, part: ModelChunk) -> nn.Module:
        """See `PartTracer`."""
        with torch.device("meta"):
            return Forecaster(self.model, part=part)

    def example_batch(self, name: PartName, stage: Stage, samples: int) -> dict[str, Tensor]:
        """See `PartTracer`."""
        model = self.model.on_grid(self._grid)
        fields, targets = (
            torch.empty((samples, count, model.n_lat, model.n_lon), device="meta")
            for count in (model.history * len(model.input_names), len(model.output_names))
        )
        x = fields
        # Activations that require a gradient: a stage in the middle of a pipeline hands one back.
        if name != "embedding":
            x = torch.empty(stage.hidden_shape(samples), dtype=stage.part.dtype, device="meta", requires_grad=True)
        return {
            "x": x,
            "sample_indices_B": torch.empty(samples, dtype=torch.int64, device="meta"),
            "lead_hours_B": torch.empty(samples, device="meta"),
            "fields_BVHW": fields,
            "targets_BVHW": targets,
        }

    @property
    def _grid(self) -> ModelGrid | None:
        """Return the first grid of the model whose samples have as many tokens as the setting says."""
        grids = (None, *self.model.grids)
        return next(grid for grid in grids if self.model.on_grid(grid).n_tokens == self.setting.length)

    def random_drops(self) -> bool:
        """See `PartTracer`."""
        return self.model.random_drops


class WeatherTracing(TracedModel):
    """See `planner.trace.traced_model.TracedModel`."""

    run: WeatherRun
    tracer = WeatherParts
    planned_grid: ModelGrid | Literal["largest"] | None = "largest"
    """Grid of the samples that costs are those of; None is the model's own."""

    def sample_shapes(self) -> list[tuple[Self, float]]:
        """See `TracedModel`: grids take turns."""
        weights, found = self.run.grid_weights, []
        for grid, weight in weights.items():
            one = self.rebind(self.run)
            one.planned_grid = grid
            found.append((one, weight / sum(weights.values())))
        return found

    def gathered_setting(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """See `TracedModel`. Raises ConfigError for roll-outs, whose earlier steps are in the costs of no part."""
        if self.run.data.rollout_hours is not None:
            raise ConfigError(
                f"data.rollout_hours={self.run.data.rollout_hours}: plans know single steps alone; plan with "
                f"data.rollout_hours=null data.rollout_steps=null and take {self._rollout_cost():.3g} times the compute "
                "time, in the same memory beside the fields of a roll-out (phalanx dryrun counts it as it is)"
            )
        return Setting(
            model=self.run.model,
            length=self._planned_model.n_tokens,
            tp=layout.tp,
            recompute=layout.recompute,
            precision=self.run.layout.precision,
            attention=attention,
            compile=compiled,
        )

    @property
    def _planned_model(self) -> WeatherModel:
        grid = self.planned_grid
        return self.run.largest_model if grid == "largest" else self.run.model.on_grid(grid)

    def _rollout_cost(self) -> float:
        """Return the passes of the longest roll-out over those of a single step, in time; a backward pass is two forward."""
        data = self.run.data
        single = 4 if self.run.layout.recompute == "full" else 3
        if data.rollout_steps is None:
            return (single + data.steps_to_leads - 1) / single
        # Every step learns, and all but the last are forecast once before.
        return data.rollout_steps.last + (data.rollout_steps.last - 1) / single

    def likely_kernel(self, *, rocm: bool) -> Kernel:
        """See `TracedModel`; there is neither bias nor mask."""
        return sdpa_choice(self.run.training.attention, self.run.layout.precision, biased=False, rocm=rocm)

    def sample_bytes(self) -> int:
        """Return the bytes of whole fields and targets, float32, which every rank reads."""
        model = self._planned_model
        fields = model.history * len(model.input_names) + len(model.output_names)
        return 4 * model.n_lat * model.n_lon * fields
