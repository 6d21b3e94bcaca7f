"""Changing what lies under checkpoints/: publishing, retiring and clearing up, so that a kill at any moment does no harm.

A folder becomes a checkpoint by being renamed, and stops being one by being renamed; only folders that are no
checkpoints are ever changed or deleted. One process at a time does this: rank 0 of the run that holds run.lock.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from phalanx.train.checkpoint.files import sync_path, write_durably
from phalanx.train.checkpoint.manifest import MANIFEST_NAME, STATE_NAME
from phalanx.train.checkpoint.names import (
    DELETING,
    REPLACED,
    SUPERSEDED,
    WRITING,
    Checkpoint,
    published,
    step_name,
    step_of,
)

logger = logging.getLogger(__name__)


def writing_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is while it is written."""
    return root / (step_name(step) + WRITING)


def begin(root: Path, step: int) -> None:
    """Make an empty folder to write the checkpoint of `step` to."""
    # Not its parents: a run directory that was removed, or unmounted, is not made by the way.
    root.mkdir(exist_ok=True)
    folder = writing_folder(root, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def abandon(root: Path, step: int) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(writing_folder(root, step), ignore_errors=True)


def publish(root: Path, step: int, manifest: bytes, state: bytes) -> None:
    """Complete the folder of `step`, whose data files are already on disk, and give it its name.

    A former checkpoint of the same step makes way only when the new one is whole; `clear_up` puts it back if the
    process ends in between.
    """
    folder, final = writing_folder(root, step), root / step_name(step)
    write_durably(folder / STATE_NAME, state)
    write_durably(folder / MANIFEST_NAME, manifest)
    sync_path(folder)
    former = final.with_name(final.name + REPLACED)
    if final.exists():
        _remove(former)
        final.rename(former)
    folder.rename(final)
    sync_path(root)
    shutil.rmtree(former, ignore_errors=True)  # what is left of it, `clear_up` removes at the next start


def supersede(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Take checkpoints later than `step` out of the listing: the run has gone on from before them."""
    for checkpoint in published(root):
        if checkpoint.step > step:
            aside = unlist(checkpoint, SUPERSEDED)
            warn(f"{checkpoint.path} is of a later step than the one just saved, {step}; kept as {aside.name}")


def unlist(checkpoint: Checkpoint, suffix: str) -> Path:
    """Take a checkpoint out of the listing without deleting it; returns its new path."""
    aside = _free_name(checkpoint.path.with_name(checkpoint.path.name + suffix))
    checkpoint.path.rename(aside)
    return aside


def retire(root: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Delete checkpoints that are neither among the newest `keep_last` nor at a multiple of `keep_every` steps."""
    for checkpoint in published(root)[keep_last:]:
        if keep_every is None or checkpoint.step % keep_every:
            doomed = checkpoint.path.with_name(checkpoint.path.name + DELETING)
            _remove(doomed)
            checkpoint.path.rename(doomed)
            _remove(doomed)


def clear_up(root: Path) -> None:
    """Undo or complete what a killed process left half done. Only for a process that owns the run directory."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        name, _, suffix = path.name.partition(".")
        if step_of(name) is None or path.is_symlink():
            continue
        if f".{suffix}" == REPLACED and not (root / name).exists():
            path.rename(root / name)
            logger.warning("%s was being replaced when its writer ended; put back", root / name)
        elif f".{suffix}" in (WRITING, REPLACED, DELETING):
            _remove(path)
            logger.warning("removed %s, left by a process that has ended", path)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _free_name(path: Path) -> Path:
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate
