"""Padded batches: everything of the batch in its place, and nothing behind it that could be learnt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.families.materials.data.padding import BatchSizes, empty_batch, rows_of, sizes_of

CUTOFF = 5.0


def tensors(graphs: int, atoms: int, edges: int) -> dict[str, Tensor]:
    """A batch of two sources with some labels; numbers that tell rows apart."""
    return {
        "species_N": torch.arange(atoms) % 9 + 1,
        "positions_N3": torch.randn(atoms, 3),
        "graph_N": torch.arange(atoms) * graphs // atoms,
        "edges_2E": torch.randint(atoms, (2, edges)),
        "shifts_E3": torch.zeros(edges, 3),
        "cells_G33": torch.ones(graphs, 3, 3),
        "source_G": torch.arange(graphs) % 2,
        "energy_G": torch.randn(graphs, dtype=torch.float64),
        "forces_N3": torch.randn(atoms, 3),
        "properties_GP": torch.randn(graphs, 2, dtype=torch.float64),
    }


def test_room_is_made_for_what_stands_behind() -> None:
    sizes = BatchSizes(4, 70, 900)
    room = sizes.room(0.1)
    assert room.holds(sizes) and room.holds(BatchSizes(4, 77, 990))
    assert not room.holds(BatchSizes(4, 70, room.edges + 1))
    assert not room.holds(BatchSizes(room.graphs, 70, 900)), "one structure must be left for what stands behind"
    assert not room.holds(BatchSizes(4, room.atoms, 900)), "and some atoms"
    assert not room.holds(BatchSizes(4, room.atoms - 7, 900))


@pytest.mark.parametrize("edges", [0, 900, 5000])
def test_what_stands_behind_is_one_more_structure_without_labels(edges: int) -> None:
    batch = tensors(4, 70, edges)
    sizes = sizes_of(batch)
    assert sizes == BatchSizes(4, 70, edges)
    room = sizes.room(0.2)
    padded = empty_batch(batch, room, source=1, cutoff=CUTOFF)
    assert sizes_of(padded) == room
    for name, value in batch.items():
        for to, of in zip(
            rows_of(name, padded[name], sizes, behind=False), rows_of(name, value, sizes, behind=False), strict=True
        ):
            to.copy_(of)
    for name, value in batch.items():
        ours = padded[name][:, :edges] if name == "edges_2E" else padded[name][: len(value)]
        assert padded[name].dtype == value.dtype and ours.equal(value)
    assert (padded["graph_N"].diff() >= 0).all() and (padded["graph_N"][70:] == room.graphs - 1).all()
    assert (padded["source_G"][4:] == 1).all()
    for label in ("energy_G", "forces_N3", "properties_GP"):
        assert padded[label][len(batch[label]) :].isnan().all()
    behind_2E = padded["edges_2E"][:, edges:]
    assert behind_2E[0].equal(behind_2E[1]) and (behind_2E[1].diff() >= 0).all()
    assert (behind_2E >= 70).all() and (behind_2E < room.atoms).all()
    assert (padded["shifts_E3"][edges:].norm(dim=1) > CUTOFF).all()
    # No atom gets so many that sums into it take long.
    assert behind_2E.shape[1] == 0 or behind_2E[0].bincount().max() <= 1024


def test_rows_behind_are_those_that_the_batch_leaves() -> None:
    sizes, room = BatchSizes(2, 10, 30), BatchSizes(4, 24, 48)
    padded = empty_batch(tensors(2, 10, 30), room, source=0, cutoff=CUTOFF)
    assert [len(part) for part in rows_of("edges_2E", padded["edges_2E"], sizes, behind=True)] == [18, 18]
    assert [len(part) for part in rows_of("forces_N3", padded["forces_N3"], sizes, behind=True)] == [14]
    assert rows_of("energy_G", padded["energy_G"], room, behind=True) == []
    assert all(part.is_contiguous() for part in rows_of("edges_2E", padded["edges_2E"], sizes, behind=True))


def test_there_is_room_for_edges_where_the_first_batch_has_none() -> None:
    """A size of 0 could not be told from one that never changes."""
    assert BatchSizes(2, 3, 0).room(0.1).edges >= 16
