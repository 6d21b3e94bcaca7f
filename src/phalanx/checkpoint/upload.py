"""Copies of a run's checkpoints at an fsspec address (`s3://`, `gs://`, ...): uploaded in the background, and fetched again.

    ADDRESS/checkpoints/step-00000120/manifest.json            written last: with it the checkpoint is whole
    ADDRESS/checkpoints/step-00000120/uploaded-00003           rank 3 has uploaded its files; gone once the manifest is there
    ADDRESS/checkpoints/step-00000120/manifest.superseded.json of a run that resumed from an earlier step; never deleted

Object stores cannot rename: a checkpoint there begins with its manifest being written, and ends with its being deleted.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint import folders
from phalanx.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    STATE_NAME,
    Manifest,
    compute_checksum,
    parse_manifest,
    parse_step,
    step_name,
)
from phalanx.checkpoint.rank_group import RankGroup
from phalanx.checkpoint.reader import verify_chunks
from phalanx.errors import CheckpointDamaged, CheckpointError, ConfigError, DataError
from phalanx.object_store import Store, StoredFile, StoreUnavailable

SUPERSEDED_MANIFEST = "manifest.superseded.json"
COMPANIONS = ("tokenizer/tokenizer.json", "elements.json")
"""Small files of a run directory that say what its weights are for."""
SLOWEST = 1e6
"""Bytes per second; an upload that is slower than this counts as one that failed."""
LONGEST_PAUSE_S = 60.0
HURRY_S = 5.0
"""Seconds without anything coming through after which a run that was told to stop waits for uploads no longer."""

logger = logging.getLogger(__name__)


class UploadAddress:
    """The checkpoints at one address. Every method but `refuse_unwritable` raises DataError where the store refuses."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address.rstrip("/")
        self.timeout_s = timeout_s
        self.run = Store(self.address, timeout_s)
        self.checkpoints = Store(f"{self.address}/checkpoints", timeout_s)

    def refuse_unwritable(self) -> None:
        """Write and delete a small object. Raises ConfigError where that fails, StoreUnavailable where nothing answers."""
        try:
            self.run.write(".phalanx-write-test", b"")
            self.run.delete(".phalanx-write-test")
        except StoreUnavailable:
            raise
        except DataError as error:
            raise ConfigError(
                f"checkpoint.upload={self.address}: cannot be written to ({error}); create the bucket, set the "
                "credentials that fsspec takes, or leave checkpoint.upload out"
            ) from error

    def list_objects(self) -> dict[int, dict[str, StoredFile]]:
        """Return the objects of each step's folder by name; steps that have no manifest included."""
        found: dict[int, dict[str, StoredFile]] = defaultdict(dict)
        for name, stored in (self.checkpoints.list_files() or {}).items():
            folder, _, file = name.partition("/")
            step = parse_step(folder)
            if step is not None and file:
                found[step][file] = stored
        return dict(found)

    def read_manifest(self, step: int, objects: dict[str, StoredFile]) -> tuple[bytes, Manifest]:
        """Return the manifest of a step whose `objects` are there, as text and parsed. Raises CheckpointDamaged where they
        differ from it."""
        where = f"{self.address}/checkpoints/{step_name(step)}"
        try:
            if objects[MANIFEST_NAME].size > MAX_MANIFEST_BYTES:
                raise ValueError(f"more than {MAX_MANIFEST_BYTES} bytes")
            text = self.checkpoints.read(f"{step_name(step)}/{MANIFEST_NAME}")
            manifest = parse_manifest(text)
        except (KeyError, FileNotFoundError):
            raise CheckpointDamaged(f"{where} has no {MANIFEST_NAME}: it was not uploaded whole") from None
        except ValueError as error:
            raise CheckpointDamaged(f"{where}/{MANIFEST_NAME}: {error}") from error
        if manifest.step != step:
            raise CheckpointDamaged(f"{where}/{MANIFEST_NAME}: step={manifest.step}; it is of another checkpoint")
        for name, size in [(STATE_NAME, manifest.state.bytes), *((file.name, file.bytes) for file in manifest.files)]:
            found = objects[name].size if name in objects else None
            if found != size:
                raise CheckpointDamaged(
                    f"{where}/{name}: {size} bytes expected, found {'nothing' if found is None else found}"
                )
        return text, manifest

    def holds_any(self) -> bool:
        """Return whether there is any checkpoint, whole or damaged."""
        return any(MANIFEST_NAME in objects for objects in self.list_objects().values())

    def is_whole(self, step: int, objects: dict[str, StoredFile]) -> bool:
        """Return whether the manifest of a step is sound, and every object there and as long as it should be."""
        try:
            self.read_manifest(step, objects)
        except CheckpointDamaged as damage:
            logger.info("not counted: %s", damage)
            return False
        return True

    def fetch_newer(self, root: Path, than: int, warn: Callable[[str], None]) -> int | None:
        """Copy the newest whole checkpoint of a later step than `than` to the folder `root`, every byte verified.

        Return its step; None where there is none. Damaged ones are passed over with a warning. Only for a process that owns
        the run directory. Raises DataError, and OSError where the disk takes no more.
        """
        objects = self.list_objects()
        for step in sorted((step for step in objects if step > than), reverse=True):
            if MANIFEST_NAME not in objects[step]:
                if SUPERSEDED_MANIFEST not in objects[step]:
                    warn(f"{self.address}/checkpoints/{step_name(step)} was not uploaded whole; passed over")
                continue
            try:
                self._fetch(root, step, objects[step])
                return step
            except CheckpointDamaged as damage:
                warn(f"a damaged checkpoint is passed over: {damage}")
        return None

    def _fetch(self, root: Path, step: int, objects: dict[str, StoredFile]) -> None:
        text, manifest = self.read_manifest(step, objects)
        root.mkdir(parents=True, exist_ok=True)
        folders.begin_folder(root, step)
        folder = folders.writing_folder(root, step)
        try:
            for record in manifest.files:
                with (folder / record.name).open("xb") as out:
                    out.writelines(self.checkpoints.stream(f"{step_name(step)}/{record.name}", record.bytes))
                folders.sync_path(folder / record.name)
            state = self.checkpoints.read(f"{step_name(step)}/{STATE_NAME}")
            folders.CheckpointText(folder.with_suffix(""), text, state).parse_state(manifest)
            with folders.CheckpointFolder(folder) as written:
                verify_chunks(written, manifest)
            folders.publish_folder(root, step, text, state)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


class Uploader:
    """Copies checkpoints under `root` to an address, on a thread of its own, one after the other.

    Each rank uploads the files that it wrote; rank 0 adds the manifest when all ranks have, and deletes what is not to be
    kept, by the rule of the run directory. What fails is tried again, ever less often, while the run lasts.

    warn: called with one line when uploads begin to fail, and when they succeed again. tell: called on rank 0 with step and
    seconds of each checkpoint that is whole at the address.
    """

    def __init__(
        self,
        address: UploadAddress,
        root: Path,
        ranks: RankGroup,
        *,
        keep_last: int,
        keep_every: int | None,
        warn: Callable[[str], None],
        tell: Callable[[int, float], None],
    ) -> None:
        self._at = address
        self._root = root
        self._ranks = ranks
        self._keep_last, self._keep_every = keep_last, keep_every
        self._warn, self._tell = warn, tell
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int]] = []
        """Number and step of the checkpoints to upload; the first may be under way. Numbers count calls of `add`."""
        self._added = 0
        self._begun = 0
        self._sent: set[tuple[int, str]] = set()
        self._failing = False
        self._due = 0.0
        """When what is being sent should be there, on the monotonic clock; `close` waits for `_patience_s` longer."""
        self._patience_s = address.timeout_s
        self._closing = threading.Event()
        self._stopped = threading.Event()
        # A daemon: a store that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def add(self, step: int) -> None:
        """Upload the published checkpoint of `step`. One that no rank has begun to upload gives way to it.

        Called by all ranks together. Raises CheckpointError where contact with another rank is lost.
        """
        # While the ranks agree none of them begins another: all keep the same checkpoints in the same order.
        with self._changed:
            begun = max(self._ranks.all_gather(self._begun))
            self._added += 1
            self._queue = [entry for entry in self._queue if entry[0] <= begun] + [(self._added, step)]
            self._changed.notify_all()

    def pending(self) -> set[int]:
        """Return the steps whose folders are still to be read; on rank 0, by any rank."""
        with self._changed:
            return {step for _, step in self._queue}

    def stop(self) -> None:
        """Give up what is not uploaded yet; `close` then waits for nothing."""
        self._stopped.set()

    def hurry(self) -> None:
        """Have `close` wait little for a store that does not answer: who told the run to stop may soon kill it."""
        self._patience_s = min(self._patience_s, HURRY_S)

    def close(self) -> None:
        """Wait until all is uploaded, or nothing more has come through for the store's time limit; then stop."""
        self._closing.set()
        with self._changed:
            self._due = max(self._due, time.monotonic())
            self._changed.notify_all()
            while self._queue and time.monotonic() < self._due + self._patience_s and not self._stopped.is_set():
                self._changed.wait(0.1)
            left = [step for _, step in self._queue]
        self._stopped.set()
        if left and self._ranks.first:
            self._warn(
                f"checkpoints of steps {', '.join(map(str, left))} are not at {self._at.address}; they are in {self._root}, "
                "and the run uploads its next one when it goes on"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closing.is_set(), timeout=None)
                if not self._queue:
                    return
                number, step = self._queue[0]
                self._begun = number
            self._upload(number, step)
            with self._changed:
                self._queue = [entry for entry in self._queue if entry[0] != number]
                self._changed.notify_all()
            if self._stopped.is_set():
                return

    def _upload(self, number: int, step: int) -> None:
        """Upload this rank's part of a checkpoint, again and again until it is there or its folder has gone."""
        pause, start = 1.0, time.monotonic()
        while not self._stopped.is_set():
            self._extend(0)
            try:
                text = (self._root / step_name(step) / MANIFEST_NAME).read_bytes()
                self._send_files(number, step, text)
                if self._ranks.first:
                    self._publish(step, text)
                    self._tell(step, time.monotonic() - start)
                if self._failing:
                    self._failing = False
                    self._warn(f"uploads to {self._at.address} succeed again")
                return
            # Any error: whatever a client of a store raises, training goes on.
            except Exception as error:
                if self._stopped.is_set():
                    return
                if not (self._root / step_name(step) / MANIFEST_NAME).exists() or isinstance(error, _SavedAgain):
                    self._warn(f"checkpoint of step {step} was not uploaded: it is no longer in {self._root}")
                    return
                if not self._failing:
                    self._failing = True
                    self._warn(
                        f"checkpoint of step {step} cannot be uploaded; tried again until it can, training goes on: {error}"
                    )
            self._stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _extend(self, size: int) -> None:
        """Have `close` wait for what is sent next, unless sending has failed."""
        if not self._failing:
            self._due = time.monotonic() + size / SLOWEST

    def _send_files(self, number: int, step: int, text: bytes) -> None:
        folder, name = self._root / step_name(step), step_name(step)
        for record in parse_manifest(text).files:
            if record.name.startswith(f"rank-{self._ranks.rank:05d}-") and (number, record.name) not in self._sent:
                self._extend(record.bytes)
                self._at.checkpoints.write_file(f"{name}/{record.name}", folder / record.name, record.bytes / SLOWEST)
                self._sent.add((number, record.name))
        if not self._ranks.first:
            self._at.checkpoints.write(f"{name}/{_mark(self._ranks.rank)}", compute_checksum(text).encode())
        self._sent = {entry for entry in self._sent if entry[0] == number}

    def _publish(self, step: int, text: bytes) -> None:
        """Make the checkpoint whole as soon as all ranks have uploaded their files, then delete old ones."""
        folder, name, store = self._root / step_name(step), step_name(step), self._at.checkpoints
        store.write(f"{name}/{STATE_NAME}", (folder / STATE_NAME).read_bytes())
        marks = [f"{name}/{_mark(rank)}" for rank in range(1, self._ranks.size)]
        for mark in marks:
            self._extend(0)
            pause = 0.1
            while not _holds(store, mark, compute_checksum(text).encode()):
                if self._stopped.wait(pause):
                    raise CheckpointError("the run has ended")
                if (folder / MANIFEST_NAME).read_bytes() != text:
                    raise _SavedAgain
                pause = min(2 * pause, 5.0)
        for companion in COMPANIONS:
            if (self._root.parent / companion).is_file():
                self._at.run.write(companion, (self._root.parent / companion).read_bytes())
        store.write(f"{name}/{MANIFEST_NAME}", text)
        for mark in marks:
            store.delete(mark)
        self._delete_old(step)

    def _delete_old(self, step: int) -> None:
        """Set later checkpoints than `step` aside and delete those that are not to be kept."""
        objects, store = self._at.list_objects(), self._at.checkpoints
        # Not as it was sent: older ones are then worth more than their room.
        if not self._at.is_whole(step, objects.get(step, {})):
            raise CheckpointDamaged(f"{self._at.address}/checkpoints/{step_name(step)} is not there as it was uploaded")
        for later in (other for other in objects if other > step and MANIFEST_NAME in objects[other]):
            store.write(f"{step_name(later)}/{SUPERSEDED_MANIFEST}", store.read(f"{step_name(later)}/{MANIFEST_NAME}"))
            store.delete(f"{step_name(later)}/{MANIFEST_NAME}")
            self._warn(
                f"{self._at.address}/checkpoints/{step_name(later)} is of a later step than {step}; set aside there"
            )
        kept = 0
        for other in sorted((other for other in objects if other <= step), reverse=True):
            wanted = kept < self._keep_last or (self._keep_every is not None and other % self._keep_every == 0)
            listed = MANIFEST_NAME in objects[other]
            if listed and kept < self._keep_last:
                kept += self._at.is_whole(other, objects[other])
            if SUPERSEDED_MANIFEST in objects[other] or (listed and wanted):
                continue
            # Without its manifest it is no checkpoint, should the rest be left over.
            if listed:
                store.delete(f"{step_name(other)}/{MANIFEST_NAME}")
            store.delete(step_name(other))


class _SavedAgain(CheckpointError):
    """The step being uploaded was saved anew; the new one is uploaded in its turn."""


def _mark(rank: int) -> str:
    return f"uploaded-{rank:05d}"


def _holds(store: Store, name: str, content: bytes) -> bool:
    try:
        return store.read(name) == content
    except FileNotFoundError:
        return False
