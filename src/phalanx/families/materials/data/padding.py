"""Batches of structures brought to one size: what stands behind the last structure, and changes nothing.

Programs that are recorded or compiled once run on tensors of one shape. Behind a batch's own atoms, edges and structures
stand atoms that belong to a last structure without labels, so that they enter no loss and no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.families.materials.data.graph_batches import PER_ATOM

_PER_EDGE = ("edges_2E", "shifts_E3")
_WITHOUT_LABELS = ("positions_N3", "shifts_E3", "cells_G33", "total_charge_G")
_BEYOND = 1.25
"""Length of edges that stand for none, in cutoffs: messages have faded to exactly 0, so that features of these atoms, and
with them whatever is multiplied by 0 later on, stay small in every model."""
_EDGES_BY_ATOM = 1024
"""Edges of a batch for each atom that stands for none: threads take turns at the sums of one atom."""


@dataclass(frozen=True)
class BatchSizes:
    """How much a batch holds, or has room for."""

    graphs: int
    atoms: int
    edges: int

    def room(self, margin: float) -> BatchSizes:
        """Room for batches larger by the factor 1 + margin, and for what stands behind them."""
        graphs, atoms, edges = (
            -int(-size * (1.0 + margin) // 16) * 16 for size in (self.graphs + 1, self.atoms, max(self.edges, 1))
        )
        return BatchSizes(graphs, atoms + _spare_atoms(edges), edges)

    def holds(self, other: BatchSizes) -> bool:
        """Whether a batch of these sizes fits, with what must stand behind it."""
        atoms = self.atoms - _spare_atoms(self.edges)
        return other.graphs < self.graphs and other.atoms <= atoms and other.edges <= self.edges


def sizes_of(tensors: Mapping[str, Tensor]) -> BatchSizes:
    """Of a batch's tensors by name, as `GraphBatch` has them."""
    return BatchSizes(len(tensors["cells_G33"]), len(tensors["species_N"]), tensors["edges_2E"].shape[1])


def empty_batch(like: Mapping[str, Tensor], room: BatchSizes, *, source: int, cutoff: float) -> dict[str, Tensor]:
    """Tensors of the names, formats and devices of `like` and the sizes `room`, in which nothing has a label.

    All atoms are hydrogen in the last structure, which belongs to the data set of number `source`. Every edge joins one of
    the last atoms to its own image beyond `cutoff` (A).
    """
    content = {"graph_N": room.graphs - 1, "source_G": source, "species_N": 1, **dict.fromkeys(_WITHOUT_LABELS, 0)}
    found = {}
    for name, value in like.items():
        if name == "edges_2E":
            spare = _spare_atoms(room.edges)
            ends_E = torch.arange(room.edges, device=value.device) * spare // max(room.edges, 1) + room.atoms - spare
            found[name] = ends_E.expand(2, -1).contiguous()
        else:
            shape = (_rows(name, room), *value.shape[1:])
            found[name] = value.new_full(shape, content.get(name, torch.nan))
    found["shifts_E3"][:, 0] = _BEYOND * cutoff
    return found


def varying_size(name: str) -> tuple[str, int]:
    """Which of `BatchSizes` changes the shape of a batch's tensor, and the dimension that has that size."""
    if name in _PER_EDGE:
        return "edges", 1 if name == "edges_2E" else 0
    return "atoms" if name in PER_ATOM else "graphs", 0


def rows_of(name: str, tensor: Tensor, sizes: BatchSizes, *, behind: bool) -> Sequence[Tensor]:
    """The parts of a padded tensor that a batch of `sizes` fills, or those behind it; contiguous, none empty."""
    count = _rows(name, sizes)
    whole = tensor.unbind() if name == "edges_2E" else (tensor,)
    parts = [part[count:] if behind else part[:count] for part in whole]
    return [part for part in parts if part.numel()]


def _rows(name: str, sizes: BatchSizes) -> int:
    count: int = getattr(sizes, varying_size(name)[0])
    return count


def _spare_atoms(edges: int) -> int:
    """Atoms at the end of a padded batch that always stand for none."""
    return 8 + edges // _EDGES_BY_ATOM
