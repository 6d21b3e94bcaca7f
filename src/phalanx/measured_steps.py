"""Some steps of a run, trained for real on the devices that are here, and what the planner expects of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.errors import PhalanxError
from phalanx.files import write_atomically
from phalanx.hardware.machine import Machine
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.plan.plan_summary import time_interval
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.time.profile import NamedProfile
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.report.run_log import FloatArray, RunLog
from phalanx.study.processes.process import run_limited
from phalanx.study.processes.slots import Launcher
from phalanx.study.processes.trial_files import RUN_FILE, TRAINED, explain_failure, read_log_tail, read_rank_reports
from phalanx.study.trial import FAILURES


@dataclass(frozen=True)
class Measured:
    """Measured steps of one layout: medians of the steps that count; None where the device does not tell."""

    device: str
    """Name of the device, as its driver reports it."""
    device_kind: str
    """Name in machine descriptions."""
    attention: str
    """Attention kernel."""
    unit: str
    """Unit of `per_s_per_device`, such as tok."""
    step_s: float
    step_s_range: tuple[float, float]
    """Quickest and slowest step that counts."""
    all_step_s: tuple[float, ...]
    """Every step, the first ones, which compile, included."""
    skipped: int
    """First steps that do not count: they compile and warm up."""
    per_s_per_device: float
    tflops_per_device: float
    """Model TFLOP/s, by the convention of `training.flops`."""
    mfu: float | None
    """Model FLOPs utilisation, of the nominal peak."""
    mfu_measured: float | None
    """Model FLOPs utilisation, of the rate of a large product measured on this device at the start."""
    flops_convention: str
    data_wait_share: float
    """Share of the steps' time spent waiting for data."""
    memory_bytes: float | None
    """Most bytes of live tensors, and of buffers that peers read, on the rank that had most; None on a CPU."""
    step_joules: float | None
    """Energy of all devices in a step, median; None where nothing counts it."""
    joules_per_unit: float | None
    """Energy a token, or of what else `unit` counts."""
    memory_retries: int | None
    """Times that rank 0's allocator found its device full, and gave back what it kept, which takes long."""


def measure_steps(run: Run, launcher: Launcher, ranks: int, folder: Path, *, skip: int, limit_s: float) -> Measured:
    """Train `run`, which is short, on `ranks` ranks and read what it logged.

    folder: an empty one, for the run and the output of its processes. skip: first steps that do not count, fewer than there
    are. limit_s: seconds after which the processes are ended. Raises PhalanxError where the run fails, with the reason.
    """
    # In processes of their own, as a real run: this one has imported, allocated and perhaps measured other things.
    write_atomically(folder / RUN_FILE, dump_run(run))
    env = launcher.env(0)
    ended = run_limited(launcher.command(folder, limit_s), env, folder / "log", limit_s)
    reports = read_rank_reports(folder, ranks)
    if ended.timed_out or ended.code or None in reports:
        outcome = explain_failure([found for found in reports if found], ended, read_log_tail(folder))
        raise PhalanxError(f"{FAILURES.get(outcome.cause, outcome.cause)}: {outcome.words}")
    # Ranks of a pipeline hold unlike amounts; the fullest one decides whether the layout fits.
    peaks = [found["memory_bytes"] for found in reports if found and found["memory_bytes"] is not None]
    log = RunLog.read(folder / TRAINED)

    def counted(name: str) -> FloatArray:
        return log.column(name)[skip:]

    def median(name: str) -> float | None:
        # Figures that a device does not tell are NaN in the log.
        values = counted(name)[np.isfinite(counted(name))]
        return float(np.median(values)) if len(values) else None

    seconds, machine = counted("step_seconds"), log.machine or {}
    # Short runs never resume: there is one start.
    begun = log.of_kind("start")[0]
    retries = log.column("memory_retries")[-1]
    return Measured(
        device=str(machine.get("device", "")),
        device_kind=str(machine.get("device_kind", "")),
        attention=str(begun.fields.get("attention", "")),
        unit=log.unit,
        step_s=float(np.median(seconds)),
        step_s_range=(float(seconds.min()), float(seconds.max())),
        all_step_s=tuple(log.column("step_seconds").tolist()),
        skipped=skip,
        per_s_per_device=(median("tokens_per_second") or 0.0) / ranks,
        tflops_per_device=median("model_tflops") or 0.0,
        mfu=median("mfu"),
        mfu_measured=median("mfu_measured"),
        flops_convention=str(machine.get("flops_convention", "")),
        data_wait_share=float(counted("data_wait_seconds").sum() / seconds.sum()),
        memory_bytes=max(peaks, default=None),
        step_joules=median("step_joules"),
        joules_per_unit=median("joules_per_token"),
        memory_retries=None if np.isnan(retries) else int(retries),
    )


@dataclass(frozen=True)
class Expected:
    """Step time and memory that the planner expects of one layout on one machine."""

    cluster: str
    device: str
    """Kind of the cluster's devices."""
    profile: str
    """Name and source of the constants."""
    step_s: float
    step_s_interval: tuple[float, float]
    """Interval that holds the step time with a probability of 90%."""
    time_by_cause_s: dict[str, float]
    memory_bytes: float
    """Bytes on the worst rank, as a run logs them."""


def expect_step(model: TracedModel, layout: ResolvedLayout, machine: Machine, profile: NamedProfile) -> Expected:
    """Return what the planner expects of `model` in `layout` on `machine`, its pipeline simulated.

    Raises ConfigError where a plan would.
    """
    models = CostModels(machine, profile)
    candidate = layout.table
    times, memory = models.times(model, candidate), models.memory(model, candidate)
    seconds = float(times.total[0])
    causes = {name: float(values[0]) for name, values in times.causes.items() if values[0] > 0}
    return Expected(
        cluster=machine.name,
        device=machine.node.device,
        profile=models.profile_words,
        step_s=seconds,
        step_s_interval=time_interval(seconds, float(times.spread[0])),
        time_by_cause_s=dict(sorted(causes.items(), key=lambda item: -item[1])),
        memory_bytes=float(memory.peak[0]),
    )
