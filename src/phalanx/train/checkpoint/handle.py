"""What `CheckpointStore.save` returns: a save that is running or has ended."""

from __future__ import annotations

import threading
from pathlib import Path

from phalanx.errors import CheckpointError


class SaveHandle:
    """One save. Its figures are final once `done` is true; `stall_seconds` is as soon as `save` has returned."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        """Where the checkpoint is once it is published."""
        self.stall_seconds = 0.0
        """Time the caller of `save` was kept, waiting for an earlier save included."""
        self.write_seconds = 0.0
        """Time from the start of the writing until the checkpoint was published."""
        self.bytes_written = 0
        """Tensor bytes that this rank wrote."""
        self.error: CheckpointError | None = None
        """Why the save failed; None while it runs and when it succeeded."""
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def finish(self, error: CheckpointError | None) -> None:
        """Called once by whoever carries the save out."""
        self.error = error
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is published. Raises its CheckpointError, and TimeoutError after `timeout_s`."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"checkpoint of step {self.step} is still being written after {timeout_s} s")
        if self.error is not None:
            raise CheckpointError(str(self.error)) from self.error

    def join(self) -> None:
        """Return when the save has ended, well or not."""
        self._ended.wait()
