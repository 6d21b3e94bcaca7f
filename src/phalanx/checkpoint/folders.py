"""The folders under a run's checkpoints/: their names, and changing them so that a kill at any moment does no harm.

    step-00000120               a whole checkpoint
    step-00000120.writing       being written; worthless once its writer is gone
    step-00000120.replaced      the former checkpoint of a step saved again, until the new one has its name
    step-00000120.deleting      no longer kept
    step-00000120.superseded    of a run that resumed from an earlier step and passed this one; never deleted by Phalanx
    step-00000120.nonfinite     holds weights with which the next step was not finite; never deleted by Phalanx

A folder becomes a checkpoint by being renamed, and stops being one by being renamed; only folders that are no
checkpoints are ever changed or deleted. One process at a time does this: rank 0 of the run that holds run.lock.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.manifest import MANIFEST_NAME, STATE_NAME, parse_step, step_name
from phalanx.checkpoint.verified_files import sync_path, write_durably

WRITING, REPLACED, DELETING, SUPERSEDED = ".writing", ".replaced", ".deleting", ".superseded"
NONFINITE = ".nonfinite"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A published checkpoint: the step it was taken after, and its folder."""

    step: int
    path: Path


def list_published(root: Path) -> list[Checkpoint]:
    """Return the checkpoint folders in `root`, newest first by step, never by time stamp, without opening them."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        # A link is never followed: what it points to may change behind the manifest's back.
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    found = [Checkpoint(step, root / name) for name in names if (step := parse_step(name)) is not None]
    return sorted(found, reverse=True)


def writing_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies while it is written."""
    return root / (step_name(step) + WRITING)


def begin_folder(root: Path, step: int) -> None:
    """Make an empty folder to write the checkpoint of `step` to."""
    # Without `parents`: a run directory that was removed or unmounted must not be made anew here.
    root.mkdir(exist_ok=True)
    folder = writing_folder(root, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def abandon_folder(root: Path, step: int) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(writing_folder(root, step), ignore_errors=True)


def publish_folder(root: Path, step: int, manifest: bytes, state: bytes) -> None:
    """Complete the folder of `step`, whose data files are already on disk, and give it its name.

    A former checkpoint of the same step makes way only when the new one is whole; `clear_up` puts it back if the
    process ends in between.
    """
    folder, final = writing_folder(root, step), root / step_name(step)
    write_durably(folder / STATE_NAME, state)
    # The manifest comes last: without it the folder is no checkpoint, whatever else it holds.
    write_durably(folder / MANIFEST_NAME, manifest)
    sync_path(folder)
    former = final.with_name(final.name + REPLACED)
    if final.exists():
        if former.exists():
            shutil.rmtree(former)
        final.rename(former)
    folder.rename(final)
    # A rename is on disk only when the folder above it is.
    sync_path(root)
    # Whatever cannot be removed now, `clear_up` removes at the next start.
    shutil.rmtree(former, ignore_errors=True)


def supersede_later(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Take checkpoints later than `step` out of the listing: the run resumed from before them."""
    for checkpoint in list_published(root):
        if checkpoint.step > step:
            aside = unlist(checkpoint, SUPERSEDED)
            warn(f"{checkpoint.path} is of a later step than the one just saved, {step}; kept as {aside.name}")


def unlist(checkpoint: Checkpoint, suffix: str) -> Path:
    """Take a checkpoint out of the listing without deleting it; return its new path."""
    wanted = checkpoint.path.with_name(checkpoint.path.name + suffix)
    aside, count = wanted, 1
    while aside.exists():
        count += 1
        aside = wanted.with_name(f"{wanted.name}-{count}")
    checkpoint.path.rename(aside)
    return aside


def delete_old(root: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Delete checkpoints that are neither among the newest `keep_last` nor at a multiple of `keep_every` steps."""
    for checkpoint in list_published(root)[keep_last:]:
        if keep_every is None or checkpoint.step % keep_every:
            # Deleting takes many system calls; renamed first, a half-deleted folder is never taken for a checkpoint.
            doomed = checkpoint.path.with_name(checkpoint.path.name + DELETING)
            if doomed.exists():
                shutil.rmtree(doomed)
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed)


def clear_up(root: Path) -> None:
    """Undo or complete what a killed process left half done. Only for a process that owns the run directory."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        name, _, suffix = path.name.partition(".")
        if parse_step(name) is None or path.is_symlink():
            continue
        if f".{suffix}" == REPLACED and not (root / name).exists():
            path.rename(root / name)
            logger.warning("%s was being replaced when its writer ended; put back", root / name)
        elif f".{suffix}" in (WRITING, REPLACED, DELETING):
            shutil.rmtree(path)
            logger.warning("removed %s, left by a process that has ended", path)
