"""Everything a run reports while it trains: to the logs of its run directory, the terminal, and optional trackers."""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn

from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.family import BoundModel
from phalanx.files import write_atomically
from phalanx.printable import plain_console, wrap_line, write_stderr
from phalanx.training.inputs import Finding
from phalanx.training.metrics import StepMetrics
from phalanx.training.run_dir import RunDirectory

_LEAST_WIDTH_OF_BAR = 64
"""Columns of a terminal below which a run shows numbers alone."""
_GLUE = "\u00a0"
"""Blank at which no line is broken."""
TRACKERS = "trackers.json"
"""File of a run directory: the run's identity in each tracker it was logged to."""
MOST_WAITING = 10_000
"""Steps and scores that wait for a tracker's service before it is given up."""
MOST_LOAD_CURVES = 512
"""Experts of all layers whose loads TensorBoard shows as curves: each takes host time in every step."""


class Sink:
    """Something that takes the metrics of each step; by default nothing else."""

    def step(self, metrics: StepMetrics) -> None:
        """Take one step's metrics."""

    def scores(self, step: int, curves: Mapping[str, float]) -> None:
        """Take the scores of an evaluation after `step`, by name; by default not."""

    def note(self, text: str) -> None:
        """Take one line about something that is no step; by default not, since notes are for people at a terminal."""

    def close(self) -> None:
        """Finish, as the run ends."""


class RunLog:
    """Everything that a run says while it trains; only the first rank's says anything."""

    def __init__(self, directory: RunDirectory, sinks: Sequence[Sink]) -> None:
        """Log to `directory` and to `sinks`: at least the terminal on the first rank, none elsewhere."""
        self._directory = directory
        self._sinks = sinks

    def log_step(self, metrics: StepMetrics) -> None:
        """Write one step's line to metrics.jsonl, and hand it to the terminal and the trackers."""
        if not self._sinks:
            return
        log = self._directory.metrics
        # Said once, when lines begin to wait: a full disk would otherwise print a line a step.
        before = log.failure
        log.append(metrics.as_dict())
        if log.failure is not None and before is None:
            reason = log.failure.strerror
            self.note(f"warning: {log.path} cannot be written ({reason}); its lines wait in memory, training goes on")
        for sink in self._sinks:
            sink.step(metrics)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Write one line to events.jsonl."""
        if self._sinks:
            self._directory.event(kind, step, **fields)

    def log_finding(self, step: int, finding: Finding) -> None:
        """Log what an evaluation after `step` found, and hand its scores to the trackers."""
        self.event(finding.kind, step, **finding.fields)
        self.note(finding.words if finding.kind == "sample" else f"step {step}  {finding.words}")
        for sink in self._sinks:
            sink.scores(step, finding.curves)

    def note(self, text: str) -> None:
        """Print one line."""
        for sink in self._sinks:
            sink.note(text)

    def close(self) -> None:
        """Finish on the terminal and in the trackers."""
        for sink in self._sinks:
            sink.close()


class ConsoleSink(Sink):
    """A progress bar on a terminal, plain lines elsewhere; everything on stderr."""

    def __init__(self, *, total_steps: int, first_step: int, every: int, unit: str = "tok") -> None:
        """Show a run of `total_steps` that continues after `first_step`. unit: of what `StepMetrics.tokens` counts."""
        self.unit = unit
        self.console = plain_console(stderr=True)
        self.total_steps = total_steps
        self.every = every
        self.first_step = first_step
        self._seconds: float | None = None
        self._widest = 0
        self._progress: Progress | None = None
        if self.console.is_terminal:
            # Where there is no room for both, numbers say more than a bar.
            bar = [BarColumn(bar_width=20)] if self.console.width >= _LEAST_WIDTH_OF_BAR else []
            self._progress = Progress(TextColumn("{task.fields[line]}"), *bar, console=self.console)
            done = self._fit_line([])
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, line=done)
            self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        # An average that forgets: the first step (compilation, warm-up) must not spoil the ETA for long.
        last = metrics.step_seconds
        self._seconds = last if self._seconds is None else 0.8 * self._seconds + 0.2 * last
        eta = format_clock(self._seconds * (self.total_steps - metrics.step))
        if self._progress is not None:
            rate = f"{metrics.tokens_per_second:,.0f} {self.unit}/s"
            line = self._fit_line([f"loss {metrics.loss:.3f}", f"ETA {eta}", rate], metrics.step)
            self._progress.update(self._task, completed=metrics.step, line=line)
        # The first step's line says within a moment that the run goes well, however rare the others are.
        if metrics.step % self.every == 0 or metrics.step in (self.first_step + 1, self.total_steps):
            line = f"step {metrics.step}/{self.total_steps}  {_describe_step(metrics, self.unit)}  ETA {eta}"
            # On a terminal the bar shows each step already: lines are for those who asked for rarer ones.
            if self._progress is None or self.every > 1:
                self.note(line)

    def _fit_line(self, parts: Sequence[str], step: int | None = None) -> str:
        """Return the step and those of `parts`, the most important first, that the terminal has room for."""
        count = f"{self.first_step if step is None else step}/{self.total_steps}"
        line = f"step {count:>{2 * len(str(self.total_steps)) + 1}}"
        for part in parts:
            if len(line) + 2 + len(part) < self.console.width:
                line += f"  {part}"
        # A line that grew shorter would make the bar behind it jump.
        self._widest = min(max(self._widest, len(line)), self.console.width - 1)
        return line.ljust(self._widest)

    def note(self, text: str) -> None:
        """Print a line above the progress bar; on a terminal broken where it reads well."""
        # In a file lines stay whole, for grep; text with line ends, as of a sample, has a form of its own.
        if self.console.is_terminal and "\n" not in text:
            text = "\n".join(break_note(text, self.console.width))
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()


def break_note(text: str, width: int) -> list[str]:
    """Return a line as lines of `width` columns: below its label where it has one, figures with their names and units."""
    label = re.match(r"\S+ {2,}", text)
    if label is not None:
        return wrap_line(text, width, hanging=" " * len(label[0]))
    # Figures stand two blanks apart; what has a single blank inside belongs together.
    parts = text.split("  ")
    if len(parts) > 2:
        text = "  ".join(part.replace(" ", _GLUE) if len(part) <= width - 2 else part for part in parts)
    return [line.replace(_GLUE, " ") for line in wrap_line(text, width)]


def _describe_step(m: StepMetrics, unit: str) -> str:
    parts = [f"loss {m.loss:.4f}", f"grad {m.grad_norm:.3g}", f"lr {m.lr:.2e}", f"{m.tokens_per_second:,.0f} {unit}/s"]
    parts.append(f"{m.model_tflops:.3g} TFLOP/s")
    shares = [
        f"{m.mfu:.1%} of nominal" if m.mfu is not None else "",
        f"{m.mfu_measured:.1%} of measured" if m.mfu_measured else "",
    ]
    if any(shares):
        parts.append("MFU " + ", ".join(s for s in shares if s))
    if m.memory_peak_gib is not None:
        parts.append(f"mem {m.memory_now_gib:.1f} peak {m.memory_peak_gib:.1f} GiB")
    if m.memory_retries:
        parts.append(f"full {m.memory_retries} times")
    parts.append(f"data wait {m.data_wait_seconds / m.step_seconds:.1%}")
    if m.ranks is not None:
        parts.append(f"ranks wait {m.ranks.rank_wait_seconds / m.step_seconds:.1%}")
    if m.noise is not None and m.noise.critical_batch is not None:
        parts.append(f"critical batch {m.noise.critical_batch:,.4g}")
    if m.experts:
        parts.append(f"fullest expert {1.0 + max(use.violation for use in m.experts):.2f} x mean")
    if not m.updated:
        parts.append("NOT UPDATED: gradient not finite")
    return "  ".join(parts)


def format_clock(seconds: float) -> str:
    """Return seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class TensorBoardSink(Sink):
    """TensorBoard event files in the run directory."""

    def __init__(self, folder: Path, first_step: int) -> None:
        # Imported on use: it takes seconds that a run without TensorBoard need not spend.
        writer_class = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        # A resumed run goes on from its checkpoint: later points of the earlier attempt are hidden.
        self._writer = writer_class(str(folder), purge_step=first_step + 1)
        self._failed = False

    def step(self, metrics: StepMetrics) -> None:
        """Write every number of the step."""
        self._write(metrics.step, {f"train/{name}": value for name, value in metrics.numbers().items()}, metrics)

    def scores(self, step: int, curves: Mapping[str, float]) -> None:
        """Write the scores of an evaluation."""
        self._write(step, curves)

    def _write(self, step: int, values: Mapping[str, float], metrics: StepMetrics | None = None) -> None:
        """Write numbers by name, and the loads of experts in `metrics`, until the disk is full."""
        if self._failed:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            if metrics is not None:
                self._write_loads(metrics)
        except OSError as error:
            # A full disk ends TensorBoard's writer for good; metrics.jsonl has all of it, and training is worth more.
            self._failed = True
            write_stderr(f"warning: TensorBoard files end at step {step}: {error.strerror}")

    def _write_loads(self, metrics: StepMetrics) -> None:
        """Write the load of each expert, as a curve each where there are few enough, else as a histogram a layer."""
        curves = sum(len(use.load) for use in metrics.experts) <= MOST_LOAD_CURVES
        for use in metrics.experts:
            name = f"train/experts/layer_{use.layer}/load"
            if not curves:
                self._writer.add_histogram(name, np.asarray(use.load), metrics.step)
                continue
            for expert, share in enumerate(use.load):
                self._writer.add_scalar(f"{name}/{expert}", share, metrics.step)

    def close(self) -> None:
        """Flush to disk."""
        if not self._failed:
            with contextlib.suppress(OSError):
                self._writer.close()


class BackgroundSink(Sink):
    """Hands everything to a tracker on a thread of its own: a service that fails or hangs costs the record there alone.

    The tracker is made, used and closed on that thread, since some keep what is under way a thread.
    """

    def __init__(self, name: str, make: Callable[[], Sink], *, patience_s: float = 60.0) -> None:
        """Open the tracker `name`. patience_s: seconds to wait for its service, here and at the end.

        Raises ConfigError where `make` does. Whatever else goes wrong, here or later, is one warning.
        """
        self._name = name
        self._patience_s = patience_s
        self._waiting: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(MOST_WAITING)
        self._opened = threading.Event()
        self._refused: ConfigError | None = None
        self._failed = False
        # Not waited for at the end of the process: its service may never answer.
        self._thread = threading.Thread(target=self._work, args=(make,), name=name, daemon=True)
        self._thread.start()
        if not self._opened.wait(patience_s):
            self._give_up(f"does not answer for {patience_s:g} s")
        if self._refused is not None:
            raise self._refused

    def step(self, metrics: StepMetrics) -> None:
        """Have the step logged."""
        self._put(lambda sink: sink.step(metrics))

    def scores(self, step: int, curves: Mapping[str, float]) -> None:
        """Have the scores of an evaluation logged."""
        self._put(lambda sink: sink.scores(step, curves))

    def close(self) -> None:
        """Wait until all is logged, but no longer than the tracker may take."""
        self._put(None)
        if not self._failed:
            self._thread.join(self._patience_s)
            if self._thread.is_alive():
                self._give_up(f"has not taken all of the record {self._patience_s:g} s after the end")

    def _work(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            self._opened.set()
            while not self._failed and (call := self._waiting.get()) is not None:
                call(sink)
            sink.close()
        except ConfigError as error:
            self._refused = error
        # Of libraries and services nobody knows what they raise; training is worth more than their record.
        except Exception as error:
            self._give_up(f"failed ({type(error).__name__}: {error})")
        finally:
            self._opened.set()

    def _put(self, call: Callable[[Sink], None] | None) -> None:
        if self._failed:
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self._give_up(f"is {MOST_WAITING:,} steps behind")

    def _give_up(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            write_stderr(f"warning: {self._name} {why}; nothing more is logged there, and training goes on")


class WandbSink(Sink):
    """Weights & Biases; WANDB_MODE=offline works without a network."""

    def __init__(self, run: Run, folder: Path) -> None:
        wandb = _import_tracker("wandb", run)
        self._run = wandb.init(
            project=run.training.wandb,
            dir=str(folder),
            name=folder.name,
            id=_tracker_identity(folder, "wandb", lambda: uuid.uuid4().hex[:16]),
            # The identity is of this run directory: W&B continues the record if it has it, and begins it otherwise.
            resume="allow",
            config=run.model_dump(mode="json"),
        )

    def step(self, metrics: StepMetrics) -> None:
        """Log the step."""
        self._run.log(metrics.numbers(), step=metrics.step)

    def scores(self, step: int, curves: Mapping[str, float]) -> None:
        """Log the scores of an evaluation, beside the figures of the step before it."""
        if curves:
            self._run.log(dict(curves), step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class MlflowSink(Sink):
    """MLflow; the tracking place is MLflow's own setting."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._mlflow = _import_tracker("mlflow", run)
        experiment = self._mlflow.set_experiment(run.training.mlflow)
        client = self._mlflow.MlflowClient()
        known = _tracker_identity(
            folder, "mlflow", lambda: client.create_run(experiment.experiment_id, run_name=folder.name).info.run_id
        )
        self._mlflow.start_run(run_id=known)

    def step(self, metrics: StepMetrics) -> None:
        """Log the step's numbers."""
        self._mlflow.log_metrics({k: float(v) for k, v in metrics.numbers().items()}, step=metrics.step)

    def scores(self, step: int, curves: Mapping[str, float]) -> None:
        """Log the scores of an evaluation."""
        # MLflow refuses other characters, which the name of a task may have.
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in curves.items()}
        if named:
            self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        """Finish the MLflow run."""
        self._mlflow.end_run()


def _tracker_identity(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return a tracker's name of this run directory; made once, so that a resumed run continues the same record."""
    # In the run directory, not in the tracker's own cache: the run may go on from another host.
    path = folder / TRACKERS
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if tracker not in known:
        known[tracker] = make()
        write_atomically(path, json.dumps(known) + "\n")
    return known[tracker]


def check_trackers(run: Run) -> None:
    """Raise ConfigError where the run file asks for a tracker whose package is not installed. Imports nothing."""
    # Found, not imported: an import takes seconds, and the check stands before anything is allocated.
    for name in ("wandb", "mlflow"):
        if getattr(run.training, name) is not None and name not in sys.modules and find_spec(name) is None:
            raise _missing_tracker(name, run)


def _import_tracker(tracker: str, run: Run) -> Any:
    try:
        return importlib.import_module(tracker)
    except ImportError as error:
        raise _missing_tracker(tracker, run) from error


def _missing_tracker(tracker: str, run: Run) -> ConfigError:
    return ConfigError(
        f"training.{tracker}={getattr(run.training, tracker)} needs the package {tracker}; install the extra: "
        f"pip install 'phalanx-train[{tracker}]'"
    )


def open_sinks(model: BoundModel, folder: Path, first_step: int) -> list[Sink]:
    """Return the sinks that the run file asks for, for a run that continues after `first_step`."""
    run, training = model.run, model.run.training
    sinks: list[Sink] = []
    if training.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", first_step))
    if training.wandb is not None:
        sinks.append(BackgroundSink("W&B", partial(WandbSink, run, folder)))
    if training.mlflow is not None:
        sinks.append(BackgroundSink("MLflow", partial(MlflowSink, run, folder)))
    # The terminal last: its progress bar starts only when nothing can fail any more.
    sinks.append(
        ConsoleSink(
            total_steps=training.steps, first_step=first_step, every=training.log_every, unit=model.position_unit
        )
    )
    return sinks
