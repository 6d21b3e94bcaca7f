"""How the folders under a run's checkpoints/ are called.

step-00000120               a whole checkpoint
step-00000120.writing       being written; worthless once its writer is gone
step-00000120.replaced      the former checkpoint of a step saved again, until the new one has its name
step-00000120.deleting      no longer kept
step-00000120.superseded    left behind by a run that went on from an earlier step; never deleted by itself
step-00000120.nonfinite     holds weights with which the next step was not finite; never deleted by itself
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

WRITING, REPLACED, DELETING, SUPERSEDED = ".writing", ".replaced", ".deleting", ".superseded"
NONFINITE = ".nonfinite"
_NAME = re.compile(r"step-([0-9]{8,18})")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A published checkpoint: the step it was taken after, and its folder."""

    step: int
    path: Path


def step_name(step: int) -> str:
    """Name of the folder that holds the checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a checkpoint folder called `name` holds; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def published(root: Path) -> list[Checkpoint]:
    """Checkpoint folders in `root`, newest first, by step and never by time stamp; their content is not looked at."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(
        (Checkpoint(step, root / name) for name in folders if (step := step_of(name)) is not None), reverse=True
    )
