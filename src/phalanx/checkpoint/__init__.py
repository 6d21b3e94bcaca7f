"""Checkpoints: whole or absent, verified when read, loadable in any sharding, and free of pickle.

Knows tensors, names and files; knows nothing of models, run files or the training loop.
"""

from phalanx.checkpoint.checkpoint_store import CheckpointStore, RunLock
from phalanx.checkpoint.folders import Checkpoint
from phalanx.checkpoint.memory_copies import MemoryCopies
from phalanx.checkpoint.rank_group import RankGroup
from phalanx.checkpoint.reader import (
    CheckpointReader,
    TensorReader,
    open_checkpoints,
    read_state,
    read_tensors,
)
from phalanx.checkpoint.saver import SaveHandle
from phalanx.checkpoint.training_state import (
    RngState,
    collect_tensors,
    materialise_optimizer_state,
    placed_tensors,
    rng_state,
    set_rng_state,
)
from phalanx.checkpoint.upload import UploadAddress
from phalanx.errors import CheckpointDamaged

__all__ = [
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointReader",
    "CheckpointStore",
    "MemoryCopies",
    "RankGroup",
    "RngState",
    "RunLock",
    "SaveHandle",
    "TensorReader",
    "UploadAddress",
    "collect_tensors",
    "materialise_optimizer_state",
    "open_checkpoints",
    "placed_tensors",
    "read_state",
    "read_tensors",
    "rng_state",
    "set_rng_state",
]
