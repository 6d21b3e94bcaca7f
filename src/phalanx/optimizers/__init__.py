"""Optimizers by name: how each is built and updated, what it keeps for a parameter, and the learning rate of a step.

Knows parameters and the optimizer section of a run file; knows nothing of layouts, files or the training loop.
"""

from phalanx.optimizers.offloaded_state import OffloadedOptimizer, choose_kind
from phalanx.optimizers.optimizer_kind import (
    OPTIMIZERS,
    HeldParameters,
    LearningRateSchedule,
    OptimizerKind,
    build_optimizer,
    find_optimizer,
    kept_values,
    learning_rate_ratio,
    set_learning_rate,
    updates_whole_matrices,
)
from phalanx.optimizers.whole_matrices import WholeMatrices

__all__ = [
    "OPTIMIZERS",
    "HeldParameters",
    "LearningRateSchedule",
    "OffloadedOptimizer",
    "OptimizerKind",
    "WholeMatrices",
    "build_optimizer",
    "choose_kind",
    "find_optimizer",
    "kept_values",
    "learning_rate_ratio",
    "set_learning_rate",
    "updates_whole_matrices",
]
