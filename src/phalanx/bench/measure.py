"""Some steps of a run, trained for real in processes of their own, and the figures that they give."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.load import dump_run
from phalanx.config.schema import Run
from phalanx.errors import PhalanxError
from phalanx.files import write_atomically
from phalanx.report.run_log import FloatArray, RunLog
from phalanx.study.trials.causes import failure, log_tail, rank_reports
from phalanx.study.trials.launchers import Launcher
from phalanx.study.trials.process import run_limited
from phalanx.study.trials.rank import RUN_FILE, TRAINED
from phalanx.study.trials.trial import FAILURES, Trial


@dataclass(frozen=True)
class Measured:
    """What steps of one layout took. Rates and times are medians of the steps that count; None where nothing tells."""

    device: str
    """Its name."""
    device_kind: str
    """What machine descriptions call it."""
    attention: str
    """The kernel."""
    unit: str
    """What is counted a second."""
    step_s: float
    step_s_range: tuple[float, float]
    """The quickest and the slowest of them."""
    all_step_s: tuple[float, ...]
    """Every step from the first, which compiles, on."""
    skipped: int
    """First steps that do not count."""
    per_s_per_device: float
    tflops_per_device: float
    """Model TFLOP/s, by the convention of `training.flops`."""
    mfu: float | None
    """Of the nominal peak."""
    mfu_measured: float | None
    """Of the rate of a large product, measured on this device at the start."""
    flops_convention: str
    data_wait_share: float
    """Of the steps' time."""
    memory_bytes: float | None
    """Most bytes of live tensors, and of buffers that peers read, on the rank that had most; None on a CPU."""
    memory_retries: int | None
    """Times that rank 0's allocator found its device full, and gave back what it kept, which takes long."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def measure(run: Run, launcher: Launcher, ranks: int, folder: Path, *, skip: int, limit_s: float) -> Measured:
    """Train `run`, which is short, on `ranks` ranks and read what it logged.

    folder: of its own, for the run and what its processes say. skip: first steps that do not count, fewer than there are.
    limit_s: seconds after which the processes are ended. Raises PhalanxError where the run fails, with the reason.
    """
    write_atomically(folder / RUN_FILE, dump_run(run))
    env = launcher.env(Trial(0, "", {}, "bench"))
    ended = run_limited(launcher.command(folder, limit_s), env, folder / "log", limit_s)
    reports = rank_reports(folder, ranks)
    if ended.timed_out or ended.code or None in reports:
        outcome = failure([found for found in reports if found], ended, log_tail(folder / "log"))
        raise PhalanxError(f"{FAILURES.get(outcome.cause, outcome.cause)}: {outcome.words}")
    peaks = [found["memory_bytes"] for found in reports if found and found["memory_bytes"] is not None]
    return _summary(RunLog.read(folder / TRAINED), ranks, skip, max(peaks, default=None))


def _summary(log: RunLog, ranks: int, skip: int, peak: float | None) -> Measured:
    def counted(name: str) -> FloatArray:
        return log.column(name)[skip:]

    def median(name: str) -> float | None:
        values = counted(name)[np.isfinite(counted(name))]
        return float(np.median(values)) if len(values) else None

    seconds, machine = counted("step_seconds"), log.machine or {}
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
        memory_bytes=peak,
        memory_retries=None if np.isnan(retries) else int(retries),
    )
