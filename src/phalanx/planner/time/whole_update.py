"""Seconds of an update that needs matrices whole: the work on them, and their way to the ranks that do it and back.

The busiest rank decides. What every element of a parameter takes beside (momentum, decay) is in `step_time`.
"""

from __future__ import annotations

import numpy as np

from phalanx.hardware.collectives import Constants, all_to_all
from phalanx.hardware.machine import Machine
from phalanx.hardware.topology import place_groups
from phalanx.optimizers import find_optimizer
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.time.operation_time import Direction, Floats, Form, OperationTable, PartBreakdown, compute_seconds
from phalanx.planner.time.part_time import in_training
from phalanx.planner.time.profile import Profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.planner.trace.whole_matrices import SHARED_BY, MatrixKind, block_matrices, share_of_layout


def whole_update_seconds(
    model: TracedModel, steps: Steps, machine: Machine, profile: Profile, constants: Constants
) -> Floats:
    """Return the seconds of the work on whole matrices and of their exchange, [layouts].

    Those of the pipeline rank that takes longest. constants: of the machine's collectives, alone.
    """
    layouts = steps.layouts
    columns = [getattr(layouts, name) for name in SHARED_BY]
    counts = np.stack([steps.ranks.blocks, steps.ranks.leading], axis=2).astype(np.int64)
    # Pipeline ranks with their layouts: each of those is as slow as the slowest of its ranks.
    ranks = counts.shape[1]
    held = [np.repeat(column, ranks) for column in columns]
    first, inverse = distinct_rows([*held, *counts.reshape(-1, 2).T])
    some, blocks = layouts.take(first // ranks), counts.reshape(-1, 2)[first]
    kinds = block_matrices(model)
    each = _unit_seconds(model, kinds, profile)
    work, gathered, returned, rounds = np.zeros((4, len(first)))
    for row, of_rank in enumerate(blocks.tolist()):
        share = share_of_layout(kinds, some, row, *of_rank)
        work[row] = np.dot(each, share.owned)
        gathered[row], returned[row] = share.elements(kinds)
        rounds[row] = share.rounds(kinds)
    places = place_groups(machine, some.world_size // some.pp, np.ones_like(some.pp))
    width, slowed = model.precision.compute_dtype.itemsize, in_training(constants, profile)
    sent = sum(rounds * all_to_all(width * size / rounds, places, slowed) for size in (gathered, returned))
    return np.asarray((work + sent)[inverse].reshape(-1, ranks).max(axis=1))


def _unit_seconds(model: TracedModel, kinds: tuple[MatrixKind, ...], profile: Profile) -> Floats:
    """Return the seconds of the work on one unit of each kind, [kinds]."""
    optimizer, config = find_optimizer(model.run.optimizer), model.run.optimizer
    width = model.precision.compute_dtype.itemsize
    rows = []
    for number, kind in enumerate(kinds):
        for matrix in kind.matrices:
            short, long = min(matrix), max(matrix)
            flops = optimizer.matrix_flops(config, *matrix)
            # As products of short by long by short, each of which reads and writes its matrices.
            products = flops / (2.0 * short * short * long)
            traffic = width * products * (2 * short * long + short * short)
            sizes = (kind.count, short, short, long, flops * kind.count, traffic * kind.count, width)
            rows.append((number, Direction.BACKWARD, PartBreakdown.MATMUL, Form.PRODUCT, False, *sizes))
    table = OperationTable.of(rows)
    # Units of one parameter are worked on together, so that the device is as full as with all of them.
    seconds = compute_seconds(table, profile) / table.batch
    return np.asarray(np.bincount(table.part, seconds, len(kinds)), np.float64)
