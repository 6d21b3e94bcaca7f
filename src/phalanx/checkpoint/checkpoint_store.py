"""The checkpoints of one run: saving new ones, in the background if asked, and keeping the right ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from phalanx.checkpoint import folders
from phalanx.checkpoint.folders import NONFINITE, Checkpoint
from phalanx.checkpoint.rank_group import RankGroup
from phalanx.checkpoint.reader import CheckpointReader
from phalanx.checkpoint.saver import NO_MEMORY, Save, SaveHandle, Saver
from phalanx.checkpoint.shard_plan import Piece, SavedTensors
from phalanx.checkpoint.upload import UploadAddress, Uploader
from phalanx.errors import CheckpointDamaged, CheckpointError, DataError, Interrupted
from phalanx.locks import FolderLock

LOCK_NAME = "run.lock"

logger = logging.getLogger(__name__)


class RunLock(FolderLock):
    """Holds a run directory for one trainer while the `with` block runs, on rank 0 for all ranks.

    run.lock in it says which process on which host has it (see phalanx.locks). heartbeat_s: seconds between signs of life,
    and between a newcomer's looks at a lock from another host.

    Entering raises CheckpointError on all ranks when another process has the directory, naming its host and pid. A lock
    whose owner is dead is taken over.
    """

    def __init__(self, run_dir: Path, *, heartbeat_s: float = 10.0) -> None:
        super().__init__(run_dir / LOCK_NAME, CheckpointError, "--run-dir", heartbeat_s=heartbeat_s)

    def __enter__(self) -> Self:
        RankGroup.default().on_first(self.acquire)
        return self

    @staticmethod
    def held(run_dir: Path) -> bool:
        """Return whether this process holds the lock of `run_dir`."""
        return FolderLock.is_held(run_dir / LOCK_NAME)


class CheckpointStore(CheckpointReader):
    """The checkpoints under `root`, which is `<run directory>/checkpoints`.

    keep_last: newest checkpoints to keep, at least 1. keep_every: also keep for good each one whose step is a multiple
    of this. on_failure: what a failed background save does beside the warning: "raise" at the next `save`, `wait` or
    `close`, or "warn" and nothing more. warn: called with one line of text, on rank 0 (where host memory is short, on
    the rank concerned), and from the writing thread where a background save has failed. timeout_s: seconds one rank
    waits for another within a save or load. upload: where checkpoints are copied to in the background; `on_upload` is called
    with step and seconds of each one that is whole there, on rank 0.

    A checkpoint is deleted only once the one just saved was read back from storage and found as it was written, and one that
    is damaged does not count among those to keep: the newest that is known to be whole is never deleted.

    With several ranks every method is called by all ranks, in the same order. A store holds the run directory's RunLock:
    the caller's if this process has it, else its own until `close`. Whatever a dead process left half done is cleared up
    when the store is made.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        keep_every: int | None = None,
        on_failure: Literal["raise", "warn"] = "raise",
        warn: Callable[[str], None] = logger.warning,
        timeout_s: float = 1800.0,
        upload: UploadAddress | None = None,
        on_upload: Callable[[int, float], None] = lambda step, seconds: None,
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise CheckpointError(
                f"keep_last={keep_last}, keep_every={keep_every}: each is at least 1; the newest is kept"
            )
        super().__init__(root, RankGroup.own(timeout_s), warn)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._on_failure = on_failure
        self._whole: dict[int, bool] = {}
        """Steps saved by this store, and whether what was written is as far as known whole."""
        self._saver = Saver(root, self._ranks)
        # One thread: saves end in the order they began in, and one set of staging memory is enough.
        self._thread = ThreadPoolExecutor(1, "checkpoint-save")
        self._running: SaveHandle | None = None
        self._reserved: Future[None] = Future()
        self._reserved.set_result(None)
        self._lock: RunLock | None = None
        self._closed = False
        self._ranks.on_first(self._take_over_directory)
        self._upload = upload
        self._uploader: Uploader | None = None
        if upload is not None:
            self._uploader = Uploader(
                upload, root, self._ranks, keep_last=keep_last, keep_every=keep_every, warn=warn, tell=on_upload
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure other ranks may never upload their part: whoever begins the run again must not wait for it.
        if self._uploader is not None and kind is not None:
            if issubclass(kind, Interrupted):
                self._uploader.hurry()
            else:
                self._uploader.stop()
        self.close()

    def save(self, step: int, tensors: SavedTensors, state: dict[str, Any], asynchronous: bool = False) -> SaveHandle:
        """Write the checkpoint of `step`; it becomes the newest, and those of later steps are set aside.

        tensors: by a name of its own each, plain (then alike on all ranks that have it) or DTensor. state: JSON values;
        rank 0's is written. asynchronous: return as soon as everything is copied to host memory, and write in the
        background; one such save runs at a time, the next one waits for it.

        Raises CheckpointError, on all ranks, when something cannot be saved or, unless asynchronous, when the save
        failed; older checkpoints are then as before.
        """
        start = time.perf_counter()
        if self._closed:
            raise CheckpointError(f"{self.root}: the store is closed; nothing can be saved to it")
        self.wait()
        save = self._saver.prepare(step, tensors, state)
        # Memory being reserved is about to be used: both at once would allocate it twice.
        self._reserved.result()
        # Once staged, the tensors belong to training again: the rest reads host memory alone.
        if asynchronous:
            self._saver.stage(save)
            self._running = save.handle
            self._thread.submit(self._complete_in_background, save)
        else:
            self._complete(save)
        save.handle.stall_seconds = time.perf_counter() - start
        if not asynchronous:
            save.handle.wait()
        return save.handle

    def reserve(self, tensors: SavedTensors) -> None:
        """Have host memory ready, allocated in the background, for background saves of such tensors. Optional.

        Without it the first background save stalls for several times as long as later ones, for fresh host memory.
        """
        self._await_save()
        files = self._saver.plan_files(tensors)
        self._reserved = self._thread.submit(self._reserve, files)

    def wait(self) -> None:
        """Return when no save is running. Raises CheckpointError if it failed and `on_failure` is "raise"."""
        handle, self._running = self._running, None
        if handle is None:
            return
        try:
            handle.wait()
        except CheckpointError:
            if self._on_failure == "raise":
                raise

    def close(self) -> None:
        """Wait for a running save, then give up the thread and the store's own lock. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            # Whatever the wait raised: a store that keeps its lock would keep the next run out.
            self._closed = True
            self._thread.shutdown()
            if self._uploader is not None:
                self._uploader.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def find_any(self) -> str | None:
        """Return where there are checkpoints, the run directory or the address of uploads; None where nowhere.

        Raises CheckpointError where the store does not answer.
        """
        if self.newest() is not None:
            return str(self.root)
        upload = self._upload
        if upload is None:
            return None

        def look() -> str | None:
            try:
                return upload.address if upload.holds_any() else None
            except DataError as error:
                raise CheckpointError(f"checkpoint.upload={upload.address}: {error}") from error

        return self._ranks.from_first(look)

    def fetch_newer(self) -> int | None:
        """Copy the newest whole checkpoint at the address of uploads here, if it is newer than all whole ones here.

        Return its step, None where there is none. Where the store does not answer that is a warning on rank 0.
        """
        newest = self.newest()
        than = -1 if newest is None else newest.step
        return self._ranks.from_first(lambda: self._fetch_newer(than))

    def _fetch_newer(self, than: int) -> int | None:
        if self._upload is None:
            return None
        try:
            return self._upload.fetch_newer(self.root, than, self._warn)
        except DataError as error:
            # What is here counts; without any, a run that begins anew would hide the checkpoints that are there.
            if than < 0:
                raise CheckpointError(f"checkpoint.upload={self._upload.address}: {error}") from error
            self._warn(f"whether {self._upload.address} has a newer checkpoint is not known: {error}")
            return None

    def set_aside(self, checkpoints: Sequence[Checkpoint]) -> Sequence[str]:
        """Take checkpoints out of the listing whose weights give no finite step; return their new names."""
        self._await_save()
        return self._ranks.from_first(lambda: [folders.rename_aside(one, NONFINITE).name for one in checkpoints])

    def _take_over_directory(self) -> None:
        if not RunLock.held(self.root.parent):
            self._lock = RunLock(self.root.parent)
            self._lock.acquire()
        # Only with the lock: what looks half done may otherwise be a living process at work.
        folders.clear_up(self.root)

    def _reserve(self, files: Sequence[Sequence[Piece]]) -> None:
        try:
            self._saver.reserve(files)
        except NO_MEMORY as error:
            size = sum(piece.bytes for pieces in files for piece in pieces)
            self._warn(f"{size / 2**30:.1f} GiB of host memory for background checkpoints cannot be had: {error}")

    def _await_save(self) -> None:
        """Return when no save is running; its failure stays for the next save, wait or close."""
        # A save in the background exchanges through the same rank group: two exchanges at once would meet each other.
        if self._running is not None:
            self._running.join()

    def _complete_in_background(self, save: Save) -> None:
        error = self._complete(save)
        if error is not None and self._ranks.first:
            self._warn(str(error))

    def _complete(self, save: Save) -> CheckpointError | None:
        error = self._saver.complete(save)
        try:
            if error is None:
                self._keep_wanted(save)
                self._begin_upload(save.handle.step)
        finally:
            # Whoever waits must not wait for ever, even where a warning could not be written.
            save.handle.finish(error)
        return error

    def _begin_upload(self, step: int) -> None:
        if self._uploader is None or not self._whole[step]:
            return
        try:
            self._uploader.add(step)
        except CheckpointError as error:
            self._warn_first(f"checkpoint of step {step} is not uploaded: {error}")

    def _keep_wanted(self, save: Save) -> None:
        """Leave only the checkpoints to keep. A failure here is no failure of the save, which is on disk."""
        step = save.handle.step
        self._whole[step] = True
        try:
            old = self._ranks.from_first(lambda: self._find_old(step))
            if not old:
                return
            self._saver.read_back(save)
            self._ranks.on_first(lambda: folders.delete_checkpoints(old))
        except CheckpointDamaged as damage:
            self._whole[step] = False
            self._warn_first(f"checkpoint of step {step} does not read back as written, older ones are kept: {damage}")
        except CheckpointError as error:
            self._warn_first(f"{self.root}: an old checkpoint could not be removed: {error}")

    def _find_old(self, step: int) -> list[Checkpoint]:
        """Set later checkpoints than `step` aside; return those that need not be kept any more."""
        # First: a later step that stays listed would be what the next start resumes from.
        folders.supersede_later(self.root, step, self._warn)

        def counts(checkpoint: Checkpoint) -> bool:
            known = self._whole.get(checkpoint.step)
            return folders.is_whole(checkpoint) if known is None else known

        old = folders.find_old(self.root, keep_last=self._keep_last, keep_every=self._keep_every, counts=counts)
        # What is being uploaded stays until it is there.
        pending = self._uploader.pending() if self._uploader is not None else set()
        return [checkpoint for checkpoint in old if checkpoint.step not in pending]

    def _warn_first(self, text: str) -> None:
        if self._ranks.first:
            self._warn(text)
