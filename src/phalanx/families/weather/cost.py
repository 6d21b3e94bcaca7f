"""The weather family for the planner: its parts on meta, and what a run computes with (see `planner.trace.traced_model`)."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    MicrobatchPasses,
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
        model, passes = self.model.on_grid(self._grid), self.setting.passes
        read = model.history * len(model.input_names)
        # A forecast that a pass starts from has a row for each member, and may be asked for its gradient.
        rows = samples * (model.members if passes.continued else 1)
        fields = torch.empty((rows, read, model.n_lat, model.n_lon), device="meta", requires_grad=passes.linked)
        targets = torch.empty((samples, len(model.output_names), model.n_lat, model.n_lon), device="meta")
        handed_back = {"gradient_BVHW": torch.empty_like(fields)} if name == "head" and passes.linked else {}
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
            **handed_back,
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
    planned_steps: int | None = None
    """Steps of the roll-outs that are trained through, where any are; None is the most."""

    def sample_shapes(self) -> list[tuple[Self, float]]:
        """See `TracedModel`: grids take turns, and roll-outs that are trained through grow."""
        found = []
        for grid, steps, share in self.shapes_in_turn():
            one = self.rebind(self.run)
            one.planned_grid, one.planned_steps = grid, steps
            found.append((one, share))
        return found

    def shapes_in_turn(self) -> list[tuple[ModelGrid | None, int | None, float]]:
        """Return the grids of samples and the steps of roll-outs that are trained through, with the share of optimizer steps
        that have both; None is the model's own grid, and no such roll-out."""
        weights, through = self.run.grid_weights, self.run.data.rollout_steps
        lengths: list[tuple[int | None, float]] = [(None, 1.0)]
        if through is not None:
            lengths = [*through.shares(self.run.training.steps or 1).items()]
        whole = sum(weights.values())
        return [(grid, steps, share * weight / whole) for grid, weight in weights.items() for steps, share in lengths]

    @property
    def passes(self) -> MicrobatchPasses:
        """See `TracedModel`: the steps of a roll-out, of which all learn or the last one does."""
        data = self.run.data
        if data.rollout_steps is None:
            return MicrobatchPasses(forecasts=data.steps_to_leads - 1)
        steps = self.planned_steps or data.rollout_steps.last
        # All states but the last are forecast once before their steps learn.
        return MicrobatchPasses(steps, steps - 1)

    def gathered_setting(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """See `TracedModel`."""
        return Setting(
            model=self.run.model,
            length=self._planned_model.n_tokens,
            tp=layout.tp,
            recompute=layout.recompute,
            precision=self.run.layout.precision,
            attention=attention,
            compile=compiled,
            passes=self.passes,
        )

    @property
    def _planned_model(self) -> WeatherModel:
        grid = self.planned_grid
        return self.run.largest_model if grid == "largest" else self.run.model.on_grid(grid)

    def likely_kernel(self, *, rocm: bool) -> Kernel:
        """See `TracedModel`; there is neither bias nor mask."""
        return sdpa_choice(self.run.training.attention, self.run.layout.precision, biased=False, rocm=rocm)

    def sample_bytes(self) -> int:
        """Return the bytes of whole fields, targets and forcings of later steps, float32, which every rank reads."""
        model, passes = self._planned_model, self.passes
        later = passes.forecasts * model.history * len(self.run.data.forcings)
        return self._bytes_of(model.history * len(model.input_names) + passes.trained * len(model.output_names) + later)

    def bytes_between_passes(self) -> int:
        """Return the bytes of the states between the steps of a roll-out, and of the gradient that goes back to one."""
        model, passes = self._planned_model, self.passes
        if not passes.continued:
            return 0
        # A roll-out whose last step alone learns keeps what that step starts from. Samples are the first state.
        return model.members * passes.trained * self._bytes_of(model.history * len(model.input_names))

    def _bytes_of(self, fields: int) -> int:
        model = self._planned_model
        return 4 * model.n_lat * model.n_lon * fields
