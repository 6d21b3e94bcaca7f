"""Looking inside a run: a profiler trace and an allocator history of a range of steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.config.schema import StepWindow, Training
from phalanx.torch_compat import common as compat


class Probes:
    """Starts and stops what `training.profile` and `training.memory_snapshot` ask for, on this rank."""

    def __init__(self, training: Training, folder: Path, device: torch.device, rank: int) -> None:
        self.profile_window = training.profile
        self.memory_window = training.memory_snapshot if device.type != "cpu" else None
        self.folder = folder
        self.device = device
        self.rank = rank
        self._profiler: profile | None = None

    def look_at(self, step: int) -> bool:
        """Whether the device must be through with `step` before the next one begins: for what is recorded from or up to
        there, to be of these steps alone."""
        windows = (self.profile_window, self.memory_window)
        return any(window.first - 1 <= step <= window.last for window in windows if window is not None)

    def before(self, step: int) -> None:
        """Call before each step."""
        if _first(self.profile_window, step):
            activities = [ProfilerActivity.CPU]
            if self.device.type != "cpu":
                # ROCm's activity goes by the name of CUDA too.
                activities.append(ProfilerActivity.XPU if self.device.type == "xpu" else ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()
        if _first(self.memory_window, step):
            compat.record_memory_history(self.device)

    def after(self, step: int) -> list[Path]:
        """Call after each step; returns the files just written."""
        written = []
        if self._profiler is not None and self.profile_window is not None and step == self.profile_window.last:
            self._profiler.stop()
            path = self._path("profile", self.profile_window, "json")
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            written.append(path)
        if self.memory_window is not None and step == self.memory_window.last:
            path = self._path("memory", self.memory_window, "pickle")
            compat.dump_memory_history(self.device, path)
            written.append(path)
        return written

    def _path(self, kind: str, window: StepWindow, suffix: str) -> Path:
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"steps-{window.first}-{window.last}-rank-{self.rank}.{suffix}"


def _first(window: StepWindow | None, step: int) -> bool:
    return window is not None and step == window.first
