"""Matrices that an optimizer updates whole, as Muon does: those of a model, and how ranks of a pipeline stage share them.

`layout.gathered_matrices` decides which rank gathers which; here are the counts that follow, for any number of ranks and
without building the model. Time and memory models ask for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from phalanx.layout.gathered_matrices import ROUND_ELEMENTS
from phalanx.layout.layout_model import named_parameters
from phalanx.layout.spec import LayoutTable
from phalanx.nn.adapters import TrainedParameters
from phalanx.planner.trace.traced_model import (
    PartName,
    Setting,
    TracedModel,
    build_stage,
    expert_parameters,
    part_tracer,
)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MatrixKind:
    """Equal units of a block, each gathered by one rank."""

    shape: tuple[int, int]
    """Rows and columns of a unit."""
    count: int
    """Units of a block: the stack of one parameter."""
    matrices: tuple[tuple[int, int], ...]
    """Rows and columns of the matrices that a unit is composed of."""
    expert: bool
    """Whether they belong to experts, which are sharded over the ranks of `ep`."""
    leading: bool = False
    """Whether they are those of a leading block of the model."""

    @property
    def elements(self) -> int:
        """Return the elements of a unit."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """Return the cost by which units are assigned (`gathered_matrices.Unit.cost`)."""
        return self.elements * min(self.shape)


def block_matrices(model: TracedModel) -> tuple[MatrixKind, ...]:
    """Return the matrices of a block, and of a leading one where there is one, the costliest first."""
    trained = TrainedParameters.of(model.run.training)
    setting = Setting(model.config, model.positions().count, trained=trained)
    kinds = [*_block_matrices("block", setting)]
    if model.config.leading_layers:
        kinds += [replace(kind, leading=True) for kind in _block_matrices("leading", setting)]
    return tuple(sorted(kinds, key=lambda kind: -kind.cost))


@cache
def _block_matrices(name: PartName, setting: Setting) -> tuple[MatrixKind, ...]:
    tracer, stage = part_tracer(setting), build_stage(name, setting)
    experts = {id(parameter) for parameter in expert_parameters(stage)}
    found = []
    for parameter_name, parameter in named_parameters(stage.part, tracer.tied()).items():
        rows = tracer.matrix_rows(parameter_name)
        # Norms, biases and tables are updated element by element, frozen parameters not at all.
        if rows is None or parameter.dim() != 2 or not parameter.requires_grad:
            continue
        shape = (parameter.shape[0], parameter.shape[1])
        unit = (shape[0] // rows.stack, shape[1])
        found.append(MatrixKind(unit, rows.stack, tuple(rows.shapes(shape)), id(parameter) in experts))
    return tuple(found)


@cache
def share_units(kinds: tuple[MatrixKind, ...], counts: tuple[int, ...], ranks: int, holders: int) -> Ints:
    """Return how many units of each kind each rank gathers, [kinds, ranks].

    Costly ones go first, each to the rank that has least to do so far. counts: units of each kind. ranks: that share them.
    holders: ranks that hold an expert whole, to which it goes; 0 where no rank holds experts whole.
    """
    owned, load = np.zeros((len(kinds), ranks), np.int64), np.zeros(ranks)
    for number, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        # A whole expert goes to one of the ranks that hold it: each group of these has an equal part of all experts.
        groups = ranks // holders if kind.expert and holders else 1
        each, left = divmod(count // groups, ranks // groups)
        owned[number] = each
        owned[number, np.argsort(load, kind="stable")[: left * groups]] += 1
        load += owned[number] * kind.cost
    return owned


@dataclass(frozen=True)
class SharedUnits:
    """The matrices that the busiest rank of a pipeline stage gathers in one update."""

    owned: tuple[int, ...]
    """Units of each kind."""
    copies: tuple[float, ...]
    """Ranks that hold the same part of a matrix of each kind."""
    travels: tuple[bool, ...]
    """Whether parts of each kind lie on several ranks before the update."""

    def elements(self, kinds: tuple[MatrixKind, ...]) -> tuple[float, float]:
        """Return the elements that arrive before the work, and those that are sent after it."""
        sizes = [number * kind.elements for number, kind in zip(self.owned, kinds, strict=True)]
        gathered = sum(size for size, moves in zip(sizes, self.travels, strict=True) if moves)
        returned = (
            size * (copies if moves else copies - 1)
            for size, copies, moves in zip(sizes, self.copies, self.travels, strict=True)
        )
        return gathered, sum(returned)

    def rounds(self, kinds: tuple[MatrixKind, ...]) -> int:
        """Return the rounds in which they travel."""
        sizes = (
            number * kind.elements * max(1.0, copies)
            for number, kind, copies in zip(self.owned, kinds, self.copies, strict=True)
        )
        return max(1, math.ceil(sum(sizes) / ROUND_ELEMENTS))


SHARED_BY = ("pp", "tp", "shards", "expert_shards", "expert_replicas", "world_size", "ep", "expert_tp")
"""What `share_of_layout` asks of a layout."""


def count_units(kinds: tuple[MatrixKind, ...], blocks: int, leading: int) -> tuple[int, ...]:
    """Return the units of each kind in so many leading blocks and so many others."""
    return tuple((leading if kind.leading else blocks) * kind.count for kind in kinds)


def share_of_layout(
    kinds: tuple[MatrixKind, ...], layouts: LayoutTable, row: int, blocks: int, leading: int = 0
) -> SharedUnits:
    """Return what the busiest rank gathers of the blocks of a pipeline rank, in one of `layouts`.

    blocks, leading: blocks of the pipeline rank, leading ones apart.
    """
    # All ranks of a pipeline stage share the work on its matrices, replicas too.
    ranks = int(layouts.world_size[row] // layouts.pp[row])
    parts = int(layouts.tp[row] * layouts.shards[row])
    # Of an expert: ranks that hold parts of it, and ranks that hold the same part.
    expert_parts, holders = parts, ranks // parts
    if layouts.ep[row] > 1:
        expert_parts = int(layouts.expert_shards[row] * layouts.expert_tp[row])
        holders = int(layouts.expert_replicas[row])
    owned = share_units(kinds, count_units(kinds, blocks, leading), ranks, holders if expert_parts == 1 else 0)
    load = np.asarray([kind.cost for kind in kinds], np.float64) @ owned
    copies = tuple(float(holders) if kind.expert else ranks / parts for kind in kinds)
    travels = tuple((expert_parts if kind.expert else parts) > 1 for kind in kinds)
    return SharedUnits(tuple(owned[:, int(load.argmax())].tolist()), copies, travels)
