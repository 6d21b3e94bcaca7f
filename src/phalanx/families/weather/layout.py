"""The weather family under parallelism: forecasters split over `tp`, run on batches of fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.counter_random import DropoutContext
from phalanx.families.weather.config import ModelGrid, WeatherModel, WeatherRun
from phalanx.families.weather.data.field_samples import FieldBatch
from phalanx.families.weather.model.field_embedding import FieldEmbedding
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.families.weather.model.grid_features import fields_of
from phalanx.families.weather.model.member_noise import member_indices, member_noise, repeat_members
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice, choose_whole_attention
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import BuildContext, LayoutModel, Stage, TrainingPass
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.autograd_collectives import gather_parts
from phalanx.nn.positions import Positions
from phalanx.nn.splits import ModelChunk

_SINGLE_TARGET = 4
"""Dimensions of targets [B, V, H, W] of one time."""
_LOCATIONS = 1
"""Dimension of locations in [B, L, V, P]."""


@dataclass(frozen=True)
class RollOut:
    """Forecasts made of several steps, each of which starts from the one before."""

    hours: int
    """Lead time of one step."""
    most_steps: int
    """Steps of the longest lead time."""


class WeatherStage(Stage):
    """Fields in, hidden activations between stages, the summed loss of this rank's locations out."""

    loss_is_whole = False

    def __init__(
        self,
        part: Forecaster,
        index: int,
        share: SequenceShare,
        seed: int,
        rollout: RollOut | None = None,
        grid: ModelGrid | None = None,
    ) -> None:
        """rollout: None for single steps. grid: that of micro-batches which name none; None is the model's own."""
        super().__init__(part, index, share, seed, part.config.on_grid(grid).n_tokens)
        self.rollout = rollout
        self.grid = grid
        self.rows_per_sample = part.config.members

    def sample_length(self, inputs: dict[str, Any]) -> int:
        """See `Stage`: grids differ in their patches."""
        tokens: int = self.part.config.on_grid(inputs.get("grid", self.grid)).n_tokens
        return tokens

    def training_passes(
        self, x: Tensor, sample_indices_B: Tensor, training: TrainingPass, inputs: dict[str, Any]
    ) -> Sequence[Callable[[], Tensor]]:
        """See `Stage`. A roll-out that is trained through has a pass for each step, the last step's first.

        Its states are forecast beforehand, and of each step nothing else is kept; a pass computes its step anew, and hands
        the gradient of its inputs to the pass of the step before. So a roll-out needs the memory of one step, beside its
        fields. Dropout is drawn once for all steps.
        """
        targets: Tensor = inputs["targets_BVHW"]
        if targets.dim() == _SINGLE_TARGET:
            return super().training_passes(x, sample_indices_B, training, inputs)
        last = targets.shape[1] - 1
        forcings = self._member_forcings(inputs)
        # Steps are joined in the precision of their sums: gradients would lose it else.
        states = [x.to(torch.promote_types(self.part.dtype, torch.float32))]
        grid = inputs.get("grid", self.grid)

        @torch.no_grad()
        def forecast_states() -> None:
            for number in range(last):
                start = states[number]
                predicted = self(
                    start, sample_indices_B, training=training, grid=grid, number=number, fields_BVHW=start
                )
                states.append(self._follow(start, predicted, forcings, number))

        def learn_step(number: int) -> Tensor:
            given = {"targets_BVHW": targets[:, number]}
            if number == last:
                forecast_states()
            else:
                gradient = states.pop().grad
                assert gradient is not None
                given["gradient_BVHW"] = gradient
            # What the first step reads was measured, and has no step before it.
            start = states[number].requires_grad_(number > 0)
            losses: Tensor = self(
                start, sample_indices_B, training=training, grid=grid, number=number, fields_BVHW=start, **given
            )
            return losses

        return [partial(learn_step, number) for number in range(last, -1, -1)]

    def forward(
        self,
        x: Tensor,
        sample_indices_B: Tensor,
        *,
        training: TrainingPass | None = None,
        grid: ModelGrid | None = None,
        number: Any = 0,
        **inputs: Tensor,
    ) -> Tensor:
        """See `Stage`. x: fields [B, V, H, W] in the first stage. grid: that of the fields; None as of all others. number:
        of the step in a roll-out, from 0.

        inputs: lead_hours_B, fields_BVHW for the last stage, targets_BVHW, without which the last stage gives whole
        predicted fields [B, V, H, W] on every rank of `tp`, and forcings_BKTFHW where a roll-out has any. Without
        lead_hours_B it is one step of a roll-out, then with gradient_BVHW, the gradient of the steps behind it by their
        first inputs. Of an ensemble predicted fields have a row for each member, and so have gradient_BVHW, and behind the
        first step of a roll-out x and fields_BVHW.
        """
        grid = grid or self.grid
        positions = self.share.positions(self.part.config.on_grid(grid).n_tokens, x.device)
        if self.rollout is not None:
            if "lead_hours_B" in inputs:
                # Only the last step learns: earlier ones are forecasts, and keep nothing for a backward pass.
                number = self.rollout.most_steps - 1
                x = self._forecast_until_last_step(x, sample_indices_B, positions, self.rollout, inputs, grid)
                inputs = {**inputs, "fields_BVHW": x}
            hours_B = torch.full((len(x),), float(self.rollout.hours), device=x.device)
            inputs = {**inputs, "lead_hours_B": hours_B}
        dropout = None
        if self.part.config.random_drops and training is not None:
            width, rows = self.part.config.d_model, member_indices(sample_indices_B, self.rows_per_sample)
            dropout = DropoutContext.of_step(self.seed, training.step, rows, positions.rows_S, width)
        noise = self._noise(sample_indices_B, positions, number)
        hours_B = inputs["lead_hours_B"]
        hidden: Tensor = self.part.hidden(
            x, positions, lead_hours_B=hours_B, dropout=dropout, grid=grid, noise_RSC=noise
        )
        if not self.part.part.last:
            return hidden
        targets, fields = inputs.get("targets_BVHW"), inputs["fields_BVHW"]
        if targets is None:
            return self._predict_fields(hidden, positions, fields, grid)
        gradient = inputs.get("gradient_BVHW")
        loss: Tensor
        if gradient is None:
            loss = self.part.head(hidden, targets, positions.rows_S, fields_BVHW=fields, grid=grid)
            return loss
        patches = self.part.head(hidden, None, positions.rows_S, fields_BVHW=fields, grid=grid)
        loss = self.part.head.loss(patches, targets, positions.rows_S, grid)
        # Without the forcings of the step behind: what was not predicted leads back to no parameter.
        following = self._follow(fields, self._join_patches(patches, grid), None, number)
        return _add_gradient(loss, following, gradient)

    @torch.no_grad()
    def _forecast_until_last_step(
        self,
        x: Tensor,
        sample_indices_B: Tensor,
        positions: Positions,
        rollout: RollOut,
        inputs: dict[str, Tensor],
        grid: ModelGrid | None,
    ) -> Tensor:
        """Forecast from fields x [B, V, H, W], without dropout, the fields from which one step leads to the lead times.

        inputs: as of `forward`, with the forcings of the steps after the first, where the model reads any.
        """
        forcings = self._member_forcings(inputs)
        lead_hours_R = repeat_members(inputs["lead_hours_B"], len(x) * self.rows_per_sample)
        hours_R = torch.full_like(lead_hours_R, rollout.hours)
        # As many steps on every rank, whatever the lead times of its samples: a sharded model needs all ranks.
        for done in range(1, rollout.most_steps):
            noise = self._noise(sample_indices_B, positions, done - 1)
            hidden = self.part.hidden(x, positions, lead_hours_B=hours_R, grid=grid, noise_RSC=noise)
            following = self._follow(x, self._predict_fields(hidden, positions, x, grid), forcings, done - 1)
            continued_R = lead_hours_R > (done + 0.5) * rollout.hours
            x = torch.where(continued_R[:, None, None, None], following, repeat_members(x, len(following)))
        return x

    def _noise(self, sample_indices_B: Tensor, positions: Positions, number: int) -> Tensor | None:
        """Return the noise of all members at this rank's tokens in one step of a roll-out; None without."""
        config, rows_S = self.part.config, positions.rows_S
        return member_noise(config, self.seed, sample_indices_B, config.members, rows_S, step=number)

    def _member_forcings(self, inputs: dict[str, Tensor]) -> Tensor | None:
        """Return the forcings of a roll-out with a row for each member, where it has any: members go ways of their own."""
        forcings_BKTFHW = inputs.get("forcings_BKTFHW")
        if forcings_BKTFHW is None:
            return None
        return repeat_members(forcings_BKTFHW, len(forcings_BKTFHW) * self.rows_per_sample)

    def _predict_fields(
        self, hidden: Tensor, positions: Positions, fields_BVHW: Tensor, grid: ModelGrid | None
    ) -> Tensor:
        """Return whole predicted fields [B, V, H, W], on every rank of `tp`."""
        patches = self.part.head(hidden, None, positions.rows_S, fields_BVHW=fields_BVHW, grid=grid)
        return self._join_patches(patches, grid)

    def _join_patches(self, patches_BLVP: Tensor, grid: ModelGrid | None) -> Tensor:
        """Return whole fields [B, V, H, W] of the patches of all ranks of `tp`."""
        return fields_of(gather_parts(patches_BLVP, self.share.tp, _LOCATIONS), self.part.config.on_grid(grid))

    def _follow(self, x: Tensor, predicted_BVHW: Tensor, forcings_BKTFHW: Tensor | None, number: int) -> Tensor:
        """Return the inputs of the step behind step `number` (from 0) of a roll-out, whose inputs were x; a row a member."""
        following: Tensor = self.part.next_inputs(repeat_members(x, len(predicted_BVHW)), predicted_BVHW)
        if forcings_BKTFHW is None:
            return following
        forced: Tensor = self.part.with_forcings(following, forcings_BKTFHW[:, number])
        return forced


class _AddGradient(torch.autograd.Function):
    """Hands on losses, and in the backward pass a given gradient to a tensor."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, tensor: Tensor, gradient: Tensor) -> Tensor:
        """Return the losses."""
        ctx.save_for_backward(gradient)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of losses and tensor."""
        (gradient,) = ctx.saved_tensors
        return grads[0], gradient, None


def _add_gradient(losses: Tensor, tensor: Tensor, gradient: Tensor) -> Tensor:
    """Return losses whose backward pass also forms what `gradient` by `tensor` means for what `tensor` was made of."""
    result = _AddGradient.apply(losses, tensor, gradient)
    assert isinstance(result, Tensor)
    return result


class SplitFieldEmbedding(FieldEmbedding):
    """Each rank aggregates all locations under its heads; the sums over heads are scattered to this rank's rows."""

    def needed_rows(self, positions: Positions, on_grid: WeatherModel) -> Tensor:
        """Return all rows."""
        return torch.arange(on_grid.n_tokens, device=positions.rows_S.device)


def share_embedding(part: Forecaster, tp: Axis) -> None:
    """Let the embedding, if `part` has it, aggregate all locations under the heads of this rank's weights."""
    if part.part.first and tp.size > 1:
        # The class, not a method of one instance: equal modules stay equal to the compiler.
        part.embedding.__class__ = SplitFieldEmbedding


class WeatherLayout(LayoutModel):
    """See `layout.layout_model.LayoutModel`."""

    run: WeatherRun

    compiles_blocks = True

    def build(self, building: BuildContext, part: ModelChunk) -> tuple[Forecaster, TensorSplits]:
        """See `LayoutModel`."""
        run = self.run
        with torch.device("meta"):
            model = Forecaster(run.model, dtype=self.precision.compute_dtype, part=part)
        splits = building.split_parameters(model, self.splits())
        share_embedding(model, building.share.tp)
        return model, splits

    def build_stage(self, building: BuildContext, part: ModelChunk, index: int) -> tuple[Stage, TensorSplits]:
        """Return what runs a part of the forecaster, rolled out as the data ask for."""
        forecaster, splits = self.build(building, part)
        run = self.run
        step = run.data.rollout_hours
        rollout = None if step is None else RollOut(step, run.data.steps_to_leads)
        stage = WeatherStage(forecaster, index, building.share, run.training.seed, rollout)
        stage.sample_shapes = len(run.grid_weights)
        return stage, splits

    def example_batch(self, samples: int, device: torch.device) -> FieldBatch:
        """Return fields, targets and lead times without content, on the largest of the grids in use."""
        data, model = self.run.data, self.run.largest_model
        # The longest roll-outs, where these grow.
        steps = () if data.rollout_steps is None else (data.rollout_steps.last,)
        inputs, forcings, outputs = (
            torch.zeros((samples, *shape, model.n_lat, model.n_lon), device=device)
            for shape in (
                (model.history * len(model.input_names),),
                ((*steps, data.steps_to_leads)[0] - 1, model.history, len(data.forcings)),
                (*steps, len(model.output_names)),
            )
        )
        hours, year, day = torch.zeros((3, samples), device=device).unbind()
        grid = self.run.largest_grid
        return FieldBatch(inputs, forcings, outputs, hours, year, day, torch.arange(samples, device=device), grid)

    def choose_attention(self, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
        """Return the kernel that the run file names, or the fastest of those that PyTorch brings."""
        run = self.run
        if run.training.attention != "auto":
            return AttentionChoice(run.training.attention)
        model = run.largest_model
        shape = (layout.microbatch, model.n_tokens, model.n_heads // layout.tp, model.head_size)
        return choose_whole_attention(shape, self.precision.compute_dtype, device)
