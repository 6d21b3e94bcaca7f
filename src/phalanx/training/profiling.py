"""Looking inside a run: a profiler trace and an allocator history of a range of steps, as callbacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from phalanx.config.schema import StepWindow
from phalanx.torch_compat import common as compat
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics


class WindowRecorder(Callback):
    """Records a window of steps on every rank, and writes the record to the run directory."""

    kind: str
    """Folder of the run directory that the record goes to."""
    suffix: str

    def __init__(self, window: StepWindow, note: Callable[[str], None]) -> None:
        self.window = window
        self.note = note
        """Prints a line, on the first rank."""

    def start_recording(self) -> None:
        """Begin to record."""
        raise NotImplementedError

    def write_record(self, path: Path) -> None:
        """Stop recording and write what was recorded."""
        raise NotImplementedError

    def on_start(self, context: TrainingContext) -> None:
        """Note where the record goes."""
        self.device = context.device
        self.path = (
            context.run_dir
            / self.kind
            / f"steps-{self.window.first}-{self.window.last}-rank-{context.rank}.{self.suffix}"
        )
        self.recording = False

    def needs_finished(self, step: int) -> bool:
        """Return whether `step` borders on the window or lies in it, so that the record is of these steps alone."""
        return self.window.first - 1 <= step <= self.window.last

    def on_step_begin(self, step: int) -> None:
        """Begin to record at the window's first step."""
        if step == self.window.first:
            self.start_recording()
            self.recording = True

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Write the record after the window's last step."""
        # A run that resumes inside the window has nothing to write.
        if self.recording and metrics.step == self.window.last:
            self.recording = False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write_record(self.path)
            self.note(f"wrote {self.path}")


class ProfilerTrace(WindowRecorder):
    """Writes a Chrome trace of the profiler (`training.profile`)."""

    kind, suffix = "profile", "json"

    def start_recording(self) -> None:
        """Start the profiler, for the host and for this rank's device."""
        activities = [ProfilerActivity.CPU]
        if self.device.type != "cpu":
            # ROCm's activity goes by the name of CUDA too.
            activities.append(ProfilerActivity.XPU if self.device.type == "xpu" else ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def write_record(self, path: Path) -> None:
        """Stop the profiler and write its trace."""
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))


class MemoryHistory(WindowRecorder):
    """Writes the allocator's history, in the format of PyTorch's memory viewer (`training.memory_snapshot`)."""

    kind, suffix = "memory", "pickle"

    def start_recording(self) -> None:
        """Have the allocator record every allocation."""
        compat.record_memory_history(self.device)

    def write_record(self, path: Path) -> None:
        """Write what the allocator recorded."""
        compat.dump_memory_history(self.device, path)
