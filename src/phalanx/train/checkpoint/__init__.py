"""Checkpoints: whole or absent, verified when read, loadable in any sharding, and free of pickle.

Knows tensors, names and files; knows nothing of models, run files or the training loop.
"""

from phalanx.train.checkpoint.damage import CheckpointDamaged
from phalanx.train.checkpoint.handle import SaveHandle
from phalanx.train.checkpoint.lock import RunLock
from phalanx.train.checkpoint.names import Checkpoint
from phalanx.train.checkpoint.reader import read_state, read_tensors
from phalanx.train.checkpoint.rng import RngState, rng_state, set_rng_state
from phalanx.train.checkpoint.store import CheckpointStore
from phalanx.train.checkpoint.tensors import collect_tensors, materialise_optimizer_state, placed_tensors

__all__ = [
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointStore",
    "RngState",
    "RunLock",
    "SaveHandle",
    "collect_tensors",
    "materialise_optimizer_state",
    "placed_tensors",
    "read_state",
    "read_tensors",
    "rng_state",
    "set_rng_state",
]
