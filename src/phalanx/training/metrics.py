"""Figures of a step, such as tokens a second and MFU, and the peaks that they refer to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from phalanx.config.check import batch_sizes
from phalanx.families.family import BoundModel
from phalanx.hardware.device import device_name, measure_matmul_tflops
from phalanx.hardware.device_facts import find_facts
from phalanx.hardware.energy import EnergyMeter
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.trace.trained_flops import trained_flops_per_sample
from phalanx.torch_compat import common as compat
from phalanx.training.expert_use import ExpertUse, measure_use
from phalanx.training.gradient_noise import GradientNoise, NoiseFigures
from phalanx.training.step import StepResult

GIB = 2**30


@dataclass(frozen=True)
class RankTimes:
    """Times of the ranks in one step, where their shares are uneven."""

    compute_seconds: float
    """Seconds of a rank's forward and backward passes, as measured, without waiting for others: mean over ranks."""
    rank_wait_seconds: float
    """Seconds that a rank waits for the slowest, as measured: mean over ranks."""
    imbalance: float
    """The slowest rank's time over the mean, as measured: 1 is perfect."""
    imbalance_expected: float
    """Cost of the heaviest rank over the mean, by the costs that the step was divided by."""


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. None where the device does not tell, or the table has no peak for it."""

    step: int
    loss: float
    """Mean training loss per target over the global batch, nats."""
    grad_norm: float
    """2-norm of the gradient before clipping."""
    lr: float
    tokens: int
    """Tokens (positions of the samples) trained on since the start of the run, this step included. Of materials:
    structures, by the mean size of a global batch where batches are cut at equal cost."""
    step_seconds: float
    """Wall time of the step with all its waiting: for data, and for the checkpoint taken since the step before."""
    tokens_per_second: float
    """Over all ranks."""
    model_tflops: float
    """Model TFLOP/s of one device, by the convention of `training.flops`."""
    mfu: float | None
    """model_tflops over the nominal peak."""
    mfu_measured: float | None
    """model_tflops over the matmul rate measured on this device at the start, or over the highest rate of a step so far
    where that is more; never above 1."""
    memory_now_gib: float | None
    memory_peak_gib: float | None
    data_wait_seconds: float
    """Part of step_seconds spent waiting for the batch."""
    checkpoint_stall_seconds: float
    """Part of step_seconds spent waiting for a checkpoint."""
    updated: bool
    """False when the step left the parameters alone because the gradient was not finite."""
    memory_retries: int | None = None
    """Times so far that the allocator of rank 0 found its device full and gave back what it kept, which takes long."""
    ranks: RankTimes | None = None
    """None where all ranks have equal shares."""
    step_joules: float | None = None
    """Energy of all devices in the step, as that of the first rank counts it (of CPUs, the first node's), for each alike."""
    joules_per_token: float | None = None
    """The same over what `tokens` counts."""
    noise: NoiseFigures | None = None
    """Noise of gradients, in the steps that `training.noise_scale_every` names."""
    experts: tuple[ExpertUse, ...] = ()
    """Use of the experts of each layer that has some."""
    node_compute_seconds: tuple[float, ...] | None = None
    """Seconds of a recent step that each rank of the first node computed, without waiting for others; None between looks."""
    node_wait_seconds: tuple[float, ...] | None = None
    """Seconds of it that each of them waited for the one that came last."""
    straggler: int | None = None
    """Rank of the first node that the others wait for step after step."""
    slow_link: tuple[int, ...] | None = None
    """Ranks whose exchanges take longer than those of others like them, though they compute as fast."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        values = asdict(self)
        experts = values.pop("experts")
        values |= values.pop("ranks") or {}
        values |= values.pop("noise") or {}
        if not experts:
            return values
        # Each expert of each layer in each step: digits that nobody reads would be most of the file.
        rounded = [use | {"load": [round(share, 5) for share in use["load"]]} for use in experts]
        return values | self._worst_use() | {"experts": rounded}

    def numbers(self) -> dict[str, float]:
        """Return every number but the step and the loads of single experts by name, for trackers that take numbers alone."""
        # Trackers draw a curve for each number: loads of single experts would be thousands.
        found = {
            f"experts/layer_{use.layer}/{name}": value
            for use in self.experts
            for name, value in asdict(use).items()
            if name not in ("layer", "load")
        }
        plain = {name: value for name, value in self.as_dict().items() if isinstance(value, int | float)}
        del plain["step"]
        return plain | found

    def _worst_use(self) -> dict[str, float]:
        """Return the use of experts in three numbers, of the layers where it is worst."""
        return {
            "expert_violation": max(use.violation for use in self.experts),
            "expert_entropy": min(use.entropy for use in self.experts),
            "expert_dropped": max(use.dropped for use in self.experts),
        }


@dataclass(frozen=True)
class Peaks:
    """Matmul peaks of one device at the run's precision, TFLOP/s."""

    nominal: float | None
    """Vendor's dense figure (or `cluster.peak_tflops`); None for a device the table does not know."""
    measured: float | None
    """A large square matmul on this device, now."""


def find_peaks(model: LayoutModel, device: torch.device) -> Peaks:
    """Return the nominal peak from the run file or the device table, and the measured one."""
    # A device that the table does not know has no nominal peak, and metrics then no MFU: better none than a wrong one.
    facts, precision = find_facts(device_name(device)), model.precision
    nominal = model.run.cluster.peak_tflops or (facts.peak_tflops.get(model.run.layout.peak_format) if facts else None)
    return Peaks(nominal, measure_matmul_tflops(device, precision.compute_dtype))


class StepMeter:
    """Turns the result of a step and its seconds into `StepMetrics`."""

    def __init__(
        self,
        model: BoundModel,
        layout: ResolvedLayout,
        device: torch.device,
        peaks: Peaks,
        note: Callable[[str], None] = lambda text: None,
        noise: GradientNoise | None = None,
        energy: EnergyMeter | None = None,
    ) -> None:
        """Measure steps of `model` in `layout`.

        note: told, once, that the peak measured at the start was too low. noise: of gradients, where it is measured. energy:
        counts that of some ranks; None where nothing does.
        """
        self.model = model
        self.sizes = batch_sizes(model.run)
        self.flops_per_sample = trained_flops_per_sample(model)
        self.world_size = layout.world_size
        mixture = model.experts()
        self.experts = 0 if mixture is None else mixture.count
        self.device = device
        self.peaks = peaks
        self.noise = noise
        self.energy = energy
        self._note = note
        self._told_of_peak = False

    def measure(
        self,
        *,
        step: int,
        result: StepResult,
        lr: float,
        seconds: float,
        data_wait: float,
        checkpoint_stall: float,
    ) -> StepMetrics:
        """Return the metrics of one step that took `seconds`, those spent waiting for data and checkpoint included."""
        # Waiting counts: a rate without it would hide slow data and slow checkpoints.
        seen = self.model.positions_through(step)
        rate = (seen - self.model.positions_through(step - 1)) / seconds
        flops = self.sizes.of_step(step) * self.flops_per_sample * self.model.relative_flops(step)
        tflops = flops / seconds / self.world_size / 1e12
        if self.peaks.measured is not None and tflops > self.peaks.measured:
            # A device that reaches this rate in a step can reach it: what was measured at the start was too low.
            if not self._told_of_peak:
                self._told_of_peak = True
                self._note(
                    f"the matmul rate measured at the start, {self.peaks.measured:.3g} TFLOP/s, was too low (was the "
                    f"machine busy?): a step reached {tflops:.3g}; MFU of measured now counts from the fastest step"
                )
            self.peaks = replace(self.peaks, measured=tflops)
        joules = None
        if self.energy is not None:
            joules = self.energy.step_joules(seconds) * self.world_size / self.energy.ranks
        # This rank's own; the first rank logs its own, since asking the others each step would cost an exchange.
        memory = compat.memory_statistics(self.device)
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=seen,
            step_seconds=seconds,
            tokens_per_second=rate,
            model_tflops=tflops,
            mfu=tflops / self.peaks.nominal if self.peaks.nominal else None,
            mfu_measured=tflops / self.peaks.measured if self.peaks.measured else None,
            memory_now_gib=memory["now"] / GIB if memory else None,
            memory_peak_gib=memory["peak"] / GIB if memory else None,
            data_wait_seconds=data_wait,
            checkpoint_stall_seconds=checkpoint_stall,
            updated=result.updated,
            memory_retries=memory["retries"] if memory else None,
            step_joules=joules,
            joules_per_token=None if joules is None else joules / (rate * seconds),
            noise=self._measure_noise(result),
            experts=measure_use(result.expert_figures, self.experts) if self.experts else (),
        )

    def _measure_noise(self, result: StepResult) -> NoiseFigures | None:
        # What left the parameters alone, as a spike does, says nothing of gradients as they are.
        if self.noise is None or not result.updated or not math.isfinite(result.half_norm):
            return None
        return self.noise.add(result.half_norm, result.grad_norm)
