"""One trainer to a run directory: run.lock says which process on which host has it (see phalanx.locks)."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from phalanx.errors import CheckpointError
from phalanx.locks import FolderLock
from phalanx.train.checkpoint.rank_group import RankGroup

LOCK_NAME = "run.lock"


class RunLock(FolderLock):
    """Holds a run directory while the `with` block runs, on rank 0 for all ranks of the default process group.

    heartbeat_s: seconds between signs of life, and between a newcomer's looks at a lock from another host.

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
        """Whether this process holds the lock of `run_dir`."""
        return FolderLock.is_held(run_dir / LOCK_NAME)
