"""One optimizer step: micro-batches forward and backward, gradient norm, update. Knows no files and prints nothing."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from phalanx.checkpoint import materialise_optimizer_state, placed_tensors
from phalanx.config.check import batch_sizes
from phalanx.config.schema import Optimizer
from phalanx.data.batch_stream import Batch
from phalanx.launch.heartbeat import SILENT, Heartbeat
from phalanx.layout.apply import ParallelModel
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.place import Place, place_of
from phalanx.layout.spec import ResolvedLayout
from phalanx.optimizers import OffloadedOptimizer, build_optimizer, choose_kind
from phalanx.torch_compat import common as compat
from phalanx.training.gradient_noise import GradientNoise
from phalanx.training.stopping import ran_out_of_memory
from phalanx.training.weight_average import AVERAGES, WeightAverage


@dataclass(frozen=True)
class StepLimits:
    """Figures of a step above which it leaves the parameters alone."""

    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = StepLimits()


@dataclass(frozen=True)
class StepResult:
    """Figures of one optimizer step, over the whole global batch."""

    loss: float
    """Mean loss per target, summed over tasks; of text in nats (z-loss included)."""
    grad_norm: float
    """2-norm of the gradient before clipping."""
    updated: bool
    """False where a loss or gradient that is not finite or above its limit made the step leave the parameters alone."""
    half_norm: float = math.nan
    """2-norm of the gradient of the first half of the batch; NaN in a step that is not measured (`gradient_noise`)."""
    expert_figures: Sequence[float] = ()
    """What mixtures of experts did, for `training.expert_use`; empty for a model without."""

    @classmethod
    def from_figures(cls, figures: Sequence[float], limits: StepLimits = NO_LIMITS) -> StepResult:
        """Return the result that the figures of `TrainStep.enqueue` stand for. limits: those it was launched with."""
        loss, norm, half_norm, *others = figures
        finite = math.isfinite(loss) and math.isfinite(norm)
        return cls(loss, norm, finite and loss <= limits.loss and norm <= limits.grad_norm, half_norm, others)


def build_step(model: LayoutModel, applied: ParallelModel, device: torch.device) -> TrainStep:
    """Return the training step that the run of `model` asks for, with a fresh optimizer.

    applied: the same model, laid out on this rank.
    """
    config = model.run.optimizer
    optimizer = build_optimizer_of(model, applied)
    scaler = GradScaler(device.type) if model.run.layout.scales_loss else None
    ema = model.run.training.ema
    average = None if ema is None else WeightAverage(applied.parameters, ema)
    every = model.run.training.noise_scale_every
    noise = None if every is None else GradientNoise(applied, every)
    step = TrainStep(applied, optimizer, config, device=device, scaler=scaler, average=average, noise=noise)
    for _, samples in batch_sizes(model.run).stages:
        step.add_batch_size(samples)
    return step


def build_optimizer_of(model: LayoutModel, applied: ParallelModel) -> torch.optim.Optimizer:
    """Return a fresh optimizer, as the run of `model` asks for it, over the parameters of the same model on this rank."""
    config = model.run.optimizer
    return build_optimizer(
        applied.parameters,
        config,
        model.parameter_kind,
        applied.hold_parameters(model),
        model.rate_ratio,
        choose_kind(config, offloaded=applied.layout.offload_optimizer),
    )


def build_full_step(model: LayoutModel, applied: ParallelModel, device: torch.device) -> TrainStep:
    """Return the same step with all the state that its optimizer will ever have, which most make in their first update."""
    step = build_step(model, applied, device)
    materialise_optimizer_state(step.optimizer)
    return step


class TrainStep:
    """Runs optimizer steps of one model on this rank's share of each global batch."""

    def __init__(
        self,
        applied: ParallelModel,
        optimizer: torch.optim.Optimizer,
        config: Optimizer,
        *,
        device: torch.device,
        scaler: GradScaler | None = None,
        average: WeightAverage | None = None,
        noise: GradientNoise | None = None,
    ) -> None:
        """Join a laid-out model and its optimizer, which is of the kind that `config` names.

        scaler: holds the loss scale, of a precision that needs one. average: of the weights, where the run keeps one.
        noise: measures the gradient noise scale, where the run asks for it.
        """
        self.applied = applied
        self.executor = Executor(applied)
        self.executors: dict[int, Executor] = {}
        """By samples of a rank: what runs the smaller batches of a warm-up."""
        self.optimizer = optimizer
        self.config = config
        self.kind = choose_kind(config, offloaded=applied.layout.offload_optimizer)
        self.device = device
        self.scaler = scaler
        self.average = average
        self.noise = noise
        self.heartbeat: Heartbeat = SILENT
        self.limits = NO_LIMITS
        """Of the next step's loss and gradient norm; the same on all ranks."""
        self.own_loss = torch.zeros((), device=device)
        """Of the last step: losses that this rank's forward passes came to, before they were summed over ranks."""
        self.save_memory: Callable[[ResolvedLayout], ResolvedLayout | None] = lambda layout: None
        """Asked when memory runs out in a pass: the same layout with smaller micro-batches, in which the step is done again,
        or None where that is not possible."""

    def add_batch_size(self, samples: int) -> None:
        """Take global batches of `samples` too, as steps of a warm-up have. All ranks call it together."""
        other = Executor(self.applied.with_global_batch(samples))
        self.executors[other.layout.samples_per_rank] = other

    def report_to(self, heartbeat: Heartbeat) -> None:
        """Tell `heartbeat` from now on what each step is doing."""
        self.heartbeat = heartbeat
        for executor in (self.executor, *self.executors.values()):
            executor.heartbeat = heartbeat

    def run(self, step: int, batch: Batch) -> StepResult:
        """Run optimizer step `step` (from 1) on this rank's samples of the global batch.

        The update is left out, on all ranks alike, when the loss or the gradient norm is not finite or above `limits`.
        """
        return StepResult.from_figures(self.enqueue(step, batch).tolist(), self.limits)

    def enqueue(self, step: int, batch: Batch) -> Tensor:
        """Launch the same step without waiting for the device; return its figures, float64, for `StepResult.from_figures`.

        These are those of `update_parameters` with the norm of half the batch behind the first two.
        """
        while (formed := self._try_gradients(step, batch)) is None:
            # Memory ran out; with smaller micro-batches the same samples give the same gradients.
            pass
        loss, half_norm = formed
        figures = self.update_parameters(loss)
        if self.average is not None:
            self.average.add_step(step, ~is_left_out(figures[0], figures[1], self.limits))
        return torch.cat((figures[:2], half_norm[None], figures[2:]))

    def _try_gradients(self, step: int, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return what `_form_gradients` does; None where memory ran out and micro-batches have become smaller."""
        try:
            return self._form_gradients(step, batch)
        except (RuntimeError, MemoryError) as error:
            smaller = self.save_memory(self.applied.layout) if ran_out_of_memory(error) else None
            if smaller is None:
                raise
        # Only here: until its handler has ended, the exception keeps alive what the failed pass has computed.
        self.take_layout(smaller)
        return None

    def take_layout(self, layout: ResolvedLayout) -> None:
        """Drop what was computed since the last step, and run with the micro-batches of `layout` from now on."""
        self.executor.discard_gradients()
        gc.collect()
        if self.device.type != "cpu":
            # Blocks of the old sizes fit no tensor of the new ones.
            torch.accelerator.empty_cache()
        sizes = [executor.layout.global_batch for executor in self.executors.values()]
        self.applied = replace(self.applied, layout=layout)
        self.executor, self.executors = Executor(self.applied), {}
        for samples in sizes:
            self.add_batch_size(samples)
        if self.noise is not None:
            self.noise.relay(self.applied)
        self.report_to(self.heartbeat)
        self.heartbeat.expect_compilation()

    def _form_gradients(self, step: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Form the gradients of a step; return the mean loss of the global batch and the norm of half of it (`enqueue`)."""
        executor = self.executors.get(len(batch.sample_indices), self.executor)
        batch = executor.cut(batch, executor.layout.accumulation).to(self.device)
        count = batch.target_counts()
        self.heartbeat.enter("collective")
        # Ranks that read the same samples count their targets once.
        targets = self._sum_over_ranks(count if self.applied.mesh.reads_first else torch.zeros_like(count)).clamp(min=1)
        # Losses are sums: divided by the targets of the whole batch, uneven micro-batches and ranks average right.
        scale = 1.0 / targets if self.scaler is None else self.scaler.scale(1.0 / targets)
        half_norm = torch.full((), torch.nan, dtype=torch.float64, device=self.device)
        if self.noise is not None and executor is self.executor and self.noise.is_due(step):
            loss, half_norm = self.noise.run_halves(step, batch, scale)
            if self.scaler is not None:
                half_norm = half_norm / self.scaler.scale(torch.ones_like(half_norm))
        else:
            loss = executor.forward_backward(step, batch, scale)
        # The sum over ranks below takes its place.
        self.own_loss = loss.clone()
        return (self._sum_over_ranks(loss) / targets).sum(), half_norm

    def saved_tensors(self) -> dict[str, Place]:
        """Return what a checkpoint holds: model, optimizer state and the average of the weights, each with its place."""
        if isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer.synchronise()
        applied = self.applied
        averages = {} if self.average is None else self.average.tensors
        placed = placed_tensors(applied.saved, applied.splits, self.optimizer)
        return placed | {f"{AVERAGES}{name}": place_of(x, applied.splits.get(name)) for name, x in averages.items()}

    def update_parameters(self, loss: Tensor) -> Tensor:
        """Update with the gradients that are there, then drop them.

        Returns mean loss, gradient norm, and behind them what mixtures of experts did, where there are any; float64 [n].
        """
        norm = self.applied.gradient_norm()
        scale = None if self.scaler is None else self.scaler.scale(torch.ones_like(norm))
        if scale is not None:
            norm = norm / scale
        divisor, skip = clip_or_skip(loss, norm, self.config.grad_clip, self.limits)
        # The update divides by the loss scale and by what clips at once: every precision reads gradients as often.
        self.kind.update(self.optimizer, divisor if scale is None else divisor * scale, skip)
        if self.scaler is not None:
            # The norm goes over all ranks: where one overflows, all skip the update and lower the scale alike.
            compat.update_loss_scale(self.scaler, ~torch.isfinite(norm))
        experts = self.applied.finish_step(skip)
        # None instead of zeros: gradients take no memory between steps, and the first micro-batch adds to nothing.
        self.optimizer.zero_grad(set_to_none=True)
        self.applied.refresh(self.kind.written_copies(self.optimizer))
        figures = torch.stack((loss.double(), norm.double()))
        return figures if experts is None else torch.cat((figures, experts.flatten()))

    def relaid(self, executor: Executor) -> TrainStep:
        """Return steps of the same optimizer on the same parameters, run by another executor."""
        step = TrainStep(
            executor.applied,
            self.optimizer,
            self.config,
            device=self.device,
            scaler=self.scaler,
            average=self.average,
        )
        step.executor = executor
        return step

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.applied.mesh.world is not None:
            dist.all_reduce(value, group=self.applied.mesh.world)
        return value


def clip_or_skip(
    loss: Tensor, norm: Tensor, limit: float | None, limits: StepLimits = NO_LIMITS
) -> tuple[Tensor, Tensor]:
    """Return what to divide gradients by, so that their norm is at most `limit`, and whether to skip the update (1 or 0).

    See `is_left_out`. loss, norm: 0-dim; the results are 0-dim float32 tensors.
    """
    # Computed on the device throughout: asking for a value here would make the host wait for the whole step.
    divisor = torch.ones_like(norm) if limit is None else (norm / limit).clamp(min=1.0)
    skip = is_left_out(loss, norm, limits)
    return torch.where(skip, 1.0, divisor).float(), skip.float()


def is_left_out(loss: Tensor, norm: Tensor, limits: StepLimits) -> Tensor:
    """Return whether a step leaves the parameters alone: its loss or norm is not finite, or above its limit; bool, 0-dim."""
    skip = ~torch.isfinite(norm.double() + loss)
    if limits != NO_LIMITS:
        # In float64, as the host compares: a limit rounded to the norm's format could fall on the other side of it.
        skip = skip | (norm.double() > limits.grad_norm) | (loss.double() > limits.loss)
    return skip
