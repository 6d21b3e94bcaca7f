"""The one error that makes a run fall back to an older checkpoint."""

from __future__ import annotations

from phalanx.errors import CheckpointError


class CheckpointDamaged(CheckpointError):
    """What is on disk is not what was written: altered, truncated, missing, unreadable or made up.

    Distinct from a checkpoint that is sound but belongs to another model, where an older one would not help either.
    """
