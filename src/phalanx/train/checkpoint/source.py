"""Finding and loading checkpoints. Changes nothing on disk and needs no lock, so a run may be read while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.damage import CheckpointDamaged
from phalanx.train.checkpoint.files import CheckpointFolder
from phalanx.train.checkpoint.names import Checkpoint, published, step_of
from phalanx.train.checkpoint.plan import SavedTensors
from phalanx.train.checkpoint.rank_group import RankGroup
from phalanx.train.checkpoint.reader import load_tensors

logger = logging.getLogger(__name__)


class CheckpointSource:
    """Checkpoints to load: all of the folder `root`, or the one called `only`.

    With several ranks every method is called by all of them, in the same order. warn: called on rank 0 with one line.
    """

    def __init__(self, root: Path, ranks: RankGroup, warn: Callable[[str], None], only: str | None = None) -> None:
        self.root = root
        self._ranks = ranks
        self._warn = warn
        self._only = only

    @classmethod
    def at(
        cls,
        path: Path,
        *,
        warn: Callable[[str], None] = logger.warning,
        timeout_s: float = 1800.0,
        alone: bool = False,
    ) -> CheckpointSource:
        """What `path` holds: a run directory, its checkpoints/ folder, or one checkpoint.

        alone: whether this process reads by itself, whatever other ranks there are.
        """
        path = path.resolve()
        ranks = RankGroup(None) if alone else RankGroup.own(timeout_s)
        if step_of(path.name) is not None:
            return CheckpointSource(path.parent, ranks, warn, only=path.name)
        inner = path / "checkpoints"
        return CheckpointSource(inner if inner.is_dir() else path, ranks, warn)

    def list(self) -> Sequence[Checkpoint]:
        """Whole checkpoints, newest first: manifest sound, every file there and as long as it should be."""
        return self._ranks.from_first(lambda: [found for found in self._published() if _whole(found)])

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, if there is one."""
        return self._ranks.from_first(lambda: next((found for found in self._published() if _whole(found)), None))

    def load(self, checkpoint: Checkpoint, tensors: SavedTensors, *, prefix: str = "") -> dict[str, Any]:
        """Fill `tensors` in place, in whatever sharding they have, and return the state.

        prefix: load only the tensors of the checkpoint whose names start with this; `tensors` must then be exactly
        those, over all ranks together. Every byte read is verified. Raises CheckpointDamaged, a CheckpointError, naming
        file and tensor with the checksum expected and found, and CheckpointError naming tensors that do not fit.
        """
        return load_tensors(checkpoint.path, tensors, prefix, self._ranks)

    def load_newest_usable(
        self,
        tensors: SavedTensors,
        *,
        prefix: str = "",
        check: Callable[[Checkpoint, dict[str, Any]], None] | None = None,
    ) -> tuple[Checkpoint, dict[str, Any]] | None:
        """Load the newest checkpoint that is not damaged, with a warning for each one passed over.

        check: called with a checkpoint and its state once `tensors` are filled; raises CheckpointDamaged, on all ranks
        alike, for one that is not to be used.

        None if there is no checkpoint at all. Raises CheckpointError if there are some but none is usable, and if the
        newest sound one does not fit `tensors`: an older one would not fit either.
        """
        damages = []
        for checkpoint in self._ranks.from_first(self._published):
            try:
                state = self.load(checkpoint, tensors, prefix=prefix)
                if check is not None:
                    check(checkpoint, state)
                return checkpoint, state
            except CheckpointDamaged as damage:
                damages.append(str(damage))
                if self._ranks.first:
                    self._warn(f"checkpoint of step {checkpoint.step} is damaged, trying the one before: {damage}")
        if damages:
            raise CheckpointError(
                f"none of the {len(damages)} checkpoints in {self.root} is usable; newest: {damages[0]}"
            )
        return None

    def _published(self) -> Sequence[Checkpoint]:
        return [found for found in published(self.root) if self._only in (None, found.path.name)]


def _whole(checkpoint: Checkpoint) -> bool:
    try:
        with CheckpointFolder(checkpoint.path) as folder:
            folder.check_lengths(folder.read_contents().manifest())
    except CheckpointDamaged as damage:
        logger.info("not listed: %s", damage)
        return False
    return True
