"""Neighbour lists: by vesin on the CPU for preparing data, and in plain PyTorch on any device for dynamics.

Both find the same edges. An edge leads from a source to a target atom: r = position[target] + image @ cell -
position[source].
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.errors import DataError, PhalanxError

try:
    import vesin
except ImportError as error:
    raise PhalanxError('neighbour lists need vesin: pip install "phalanx-train[materials]"') from error


def find_edges(
    positions: npt.NDArray[np.floating],
    cell: npt.NDArray[np.floating],
    periodic: tuple[bool, bool, bool],
    cutoff: float,
    max_neighbours: int | None = None,
) -> Edges:
    """Return all edges of at most `cutoff` A between atoms at `positions` [N, 3]; an atom and its own images too.

    cell: lattice vectors as rows [3, 3]; rows of directions that are not periodic are not looked at. Cells may be
    smaller than the cutoff. max_neighbours: keep the nearest for each target, and all that tie with the last one kept:
    dropping some of several equally near atoms would break the symmetry of a crystal.
    """
    # Both directions of every pair: messages go both ways.
    finder = vesin.NeighborList(cutoff=cutoff, full_list=True)
    box = np.eye(3)
    kept = [row for row in range(3) if periodic[row]]
    if kept:
        box = np.array(cell, dtype=np.float64)
        # Directions that are not periodic get unit vectors at right angles to the others: the last right singular vectors.
        _, _, directions = np.linalg.svd(box[kept])
        box[[row for row in range(3) if not periodic[row]]] = directions[len(kept) :]
    source, target, images, distances = finder.compute(
        points=np.asarray(positions, dtype=np.float64), box=box, periodic=periodic, quantities="ijSd"
    )
    images = images.astype(np.int64)
    # vesin's order depends on its algorithm; ours is a function of the structure, as checksums of shards need.
    order = np.lexsort((images[:, 2], images[:, 1], images[:, 0], source, target))
    edges = Edges(
        source.astype(np.int64)[order],
        target.astype(np.int64)[order],
        images[order],
        distances.astype(np.float64)[order],
    )
    if max_neighbours is None:
        return edges
    # By target, the nearest first: all up to the distance of the last one kept stay.
    by_distance = np.lexsort((edges.distances, edges.target))
    near_target, near = edges.target[by_distance], edges.distances[by_distance]
    starts = np.flatnonzero(np.diff(near_target, prepend=-1))
    counts = np.diff(starts, append=len(near_target))
    last = near[starts + np.minimum(counts, max_neighbours) - 1]
    chosen = np.sort(by_distance[near <= np.repeat(last, counts) + TIE_A])
    return Edges(edges.source[chosen], edges.target[chosen], edges.images[chosen], edges.distances[chosen])


TIE_A = 1e-3
"""Neighbours whose distances differ by less than this many angstrom count as equally near."""


@dataclass(frozen=True)
class Edges:
    """Directed edges, ordered by target, then source, then image."""

    source: npt.NDArray[np.int64]
    """[E]."""
    target: npt.NDArray[np.int64]
    """[E]."""
    images: npt.NDArray[np.int64]
    """[E, 3]: lattice vectors added to the target's position."""
    distances: npt.NDArray[np.float64]
    """[E] in A."""

    def __len__(self) -> int:
        return len(self.source)


_MARGIN = 1e-4
"""Bins are wider than the cutoff by this share: rounding may put an atom into the bin beside its own."""
_CANDIDATES = 2**24
"""Pairs compared at once: about 1 GB."""
_BINS_AN_ATOM = 4
"""Most bins for each atom; a gas in a huge box needs no more."""


class DeviceEdges(NamedTuple):
    """Directed edges, ordered by target, then source, then image."""

    edges_2E: Tensor
    """int64: source and target atom."""
    images_E3: Tensor
    """int64: lattice vectors added to the target's position."""
    shifts_E3: Tensor
    """The same as a vector, in the format of the positions: edge vector = position[target] + shift - position[source]."""


class _Grid(NamedTuple):
    """The bins of all structures."""

    cells_G33: Tensor
    """Lattice vectors, completed where a structure is not periodic."""
    bins_G3: Tensor
    """Bins in each direction."""
    reach_G3: Tensor
    """Bins to look at to either side."""
    first_G: Tensor
    """Number of each structure's first bin."""
    total: int
    """Bins of all structures."""


def device_edges(
    positions_N3: Tensor,
    cells_G33: Tensor,
    cutoff: float,
    *,
    graph_N: Tensor | None = None,
    periodic_G3: Tensor | None = None,
    max_neighbours: int | None = None,
) -> DeviceEdges:
    """Return all edges of at most `cutoff` A between atoms of the same structure, as `find_edges` gives them, on the atoms'
    device.

    Found by a cell list: space is cut into bins no smaller than the cutoff, and atoms are compared with those of the bins
    around theirs. Cells smaller than the cutoff look several images far; structures without bins worth the name are one bin,
    and all pairs are compared. Several structures are treated in one go.

    positions_N3: float, in A, inside their cells or not. cells_G33: lattice vectors as rows in A; rows of directions that
    are not periodic are not looked at. graph_N: int64, the structure of each atom; None where there is one structure.
    periodic_G3: bool; None takes a direction as periodic where its lattice vector is not zero. max_neighbours: keep the
    nearest for each target and all that tie with the last one kept, as `find_edges` does.

    Raises DataError for a position that is no number, and for a periodic cell without volume. Waits for the device.
    """
    if graph_N is None:
        graph_N = torch.zeros(len(positions_N3), dtype=torch.int64, device=positions_N3.device)
    if periodic_G3 is None:
        periodic_G3 = cells_G33.abs().sum(2) > 0.0
    strange = (~positions_N3.isfinite().all(1)).nonzero()
    if len(strange):
        atom = int(strange[0])
        raise DataError(f"atom {atom} has position {positions_N3[atom].tolist()}; the run before it went astray")
    # Which atoms are neighbours has no derivative.
    positions, cells = positions_N3.detach(), cells_G33.detach().to(positions_N3.dtype)
    if len(positions) == 0:
        return _edges_of(graph_N.new_empty((0, 5)), cells, graph_N)
    grid, fractions_N3 = _make_grid(positions, cells, graph_N, periodic_G3, cutoff)
    wraps_N3 = torch.where(periodic_G3[graph_N], fractions_N3.floor(), 0.0)
    bins_N3 = ((fractions_N3 - wraps_N3) * grid.bins_G3[graph_N]).long()
    bins_N3 = torch.minimum(bins_N3.clamp(min=0), grid.bins_G3[graph_N] - 1)
    found = _find_pairs(positions, graph_N, bins_N3, wraps_N3.long(), periodic_G3, grid, cutoff)
    edges = _edges_of(found, torch.where(periodic_G3[:, :, None], cells, 0.0), graph_N)
    if max_neighbours is None:
        return edges
    source_E, target_E = edges.edges_2E
    distance_E = (positions[target_E] + edges.shifts_E3 - positions[source_E]).norm(dim=1)
    # By distance, then stably by target: one run for each target, the nearest first.
    by_distance_E = distance_E.argsort(stable=True)
    order_E = by_distance_E[target_E[by_distance_E].argsort(stable=True)]
    count_N = torch.bincount(target_E, minlength=len(positions))
    last_N = count_N.cumsum(0) - count_N + count_N.clamp(max=max_neighbours) - 1
    farthest_E = distance_E[order_E[last_N[target_E]]]
    kept = (distance_E <= farthest_E + TIE_A).nonzero().squeeze(1)
    return DeviceEdges(edges.edges_2E[:, kept], edges.images_E3[kept], edges.shifts_E3[kept])


def _edges_of(found_E5: Tensor, cells_G33: Tensor, graph_N: Tensor) -> DeviceEdges:
    """Return edges from rows of source, target and image, ordered."""
    # Stable sorts by the least significant key first: target, then source, then image.
    for column in (4, 3, 2, 0, 1):
        found_E5 = found_E5[found_E5[:, column].argsort(stable=True)]
    images_E3 = found_E5[:, 2:]
    shifts_E3 = torch.einsum("ek,ekj->ej", images_E3.to(cells_G33.dtype), cells_G33[graph_N[found_E5[:, 0]]])
    return DeviceEdges(found_E5[:, :2].T.contiguous(), images_E3.contiguous(), shifts_E3)


def _make_grid(
    positions_N3: Tensor, cells_G33: Tensor, graph_N: Tensor, periodic_G3: Tensor, cutoff: float
) -> tuple[_Grid, Tensor]:
    """Return the bins, and each atom's place in its cell in units of the lattice vectors."""
    graphs = len(cells_G33)
    # Directions that are not periodic get unit vectors at right angles to the periodic ones.
    cells = torch.where(periodic_G3[:, :, None], cells_G33, 0.0)
    for row in range(3):
        others = cells[:, [(row + 1) % 3, (row + 2) % 3]]
        # Of the three axes, the one whose part at right angles to the other vectors is the longest.
        rest = torch.eye(3, dtype=cells.dtype, device=cells.device) - torch.linalg.pinv(others) @ others
        longest = rest.norm(dim=2).argmax(1)
        direction = rest[torch.arange(graphs, device=cells.device), longest]
        direction = direction / direction.norm(dim=1, keepdim=True)
        cells[:, row] = torch.where(periodic_G3[:, row, None], cells[:, row], direction)
    volumes_G = torch.linalg.det(cells).abs()
    # With a vector of zeros both sides are 0.
    flat = (volumes_G <= 1e-6 * cells.norm(dim=2).prod(1)).nonzero()
    if len(flat):
        graph = int(flat[0])
        raise DataError(f"structure {graph} is periodic but its cell {cells_G33[graph].tolist()} has no volume")
    places_N3 = torch.einsum("nk,nkj->nj", positions_N3, torch.linalg.inv(cells)[graph_N])
    index_N3 = graph_N[:, None].expand(-1, 3)
    low_G3 = cells.new_full((graphs, 3), torch.inf).scatter_reduce_(0, index_N3, places_N3, "amin")
    high_G3 = cells.new_full((graphs, 3), -torch.inf).scatter_reduce_(0, index_N3, places_N3, "amax")
    # A direction that is not periodic has a unit vector, which is stretched over all atoms.
    extent_G3 = torch.where(periodic_G3 | ~low_G3.isfinite(), 1.0, (high_G3 - low_G3).clamp(min=1e-3) * (1 + _MARGIN))
    low_G3 = torch.where(periodic_G3 | ~low_G3.isfinite(), 0.0, low_G3)
    fractions_N3 = (places_N3 - low_G3[graph_N]) / extent_G3[graph_N]
    cells = cells * extent_G3[:, :, None]
    # Distances between opposite faces: in a skewed cell shorter than its vectors.
    heights_G3 = 1.0 / torch.linalg.inv(cells).norm(dim=1)
    reach = cutoff * (1 + _MARGIN)
    atoms_G = torch.bincount(graph_N, minlength=graphs)
    most_G1 = (_BINS_AN_ATOM * atoms_G.clamp(min=1)).to(cells.dtype).pow(1 / 3).ceil()[:, None]
    bins_G3 = torch.minimum((heights_G3 / reach).floor().clamp(min=1), most_G1)
    reach_G3 = (reach * bins_G3 / heights_G3).ceil().long()
    bins_G3 = bins_G3.long()
    # One bin that is not periodic has nothing to either side.
    reach_G3 = torch.where((bins_G3 == 1) & ~periodic_G3, 0, reach_G3)
    totals_G = bins_G3.prod(1)
    return _Grid(cells, bins_G3, reach_G3, totals_G.cumsum(0) - totals_G, int(totals_G.sum())), fractions_N3


def _find_pairs(
    positions_N3: Tensor,
    graph_N: Tensor,
    bins_N3: Tensor,
    wraps_N3: Tensor,
    periodic_G3: Tensor,
    grid: _Grid,
    cutoff: float,
) -> Tensor:
    """Return rows of source, target and image, int64 [E, 5], in no order."""
    flat_N = _flat_bin(bins_N3, grid.bins_G3[graph_N]) + grid.first_G[graph_N]
    by_bin_N = flat_N.argsort(stable=True)
    atoms_B = torch.bincount(flat_N, minlength=grid.total)
    first_B = atoms_B.cumsum(0) - atoms_B
    width_N3 = 2 * grid.reach_G3[graph_N] + 1
    looks_N = width_N3.prod(1)
    found: list[Tensor] = []
    # In runs: all bins around all atoms of a large structure would not fit.
    for start, stop in _split_runs(looks_N):
        atom_L, turn_L = _repeat_by_count(torch.arange(start, stop, device=graph_N.device), looks_N[start:stop])
        graph_L = graph_N[atom_L]
        # The number of a look written in digits, one a direction: how many bins it lies beside the first.
        width_L3 = width_N3[atom_L]
        rest_L = turn_L.div(width_L3[:, 2], rounding_mode="floor")
        offset_L3 = torch.stack((rest_L // width_L3[:, 1], rest_L % width_L3[:, 1], turn_L % width_L3[:, 2]), dim=1)
        beside_L3 = bins_N3[atom_L] + offset_L3 - grid.reach_G3[graph_L]
        bins_L3 = grid.bins_G3[graph_L]
        image_L3 = beside_L3.div(bins_L3, rounding_mode="floor")
        there_L = ((image_L3 == 0) | periodic_G3[graph_L]).all(1)
        atom_L, graph_L, image_L3 = atom_L[there_L], graph_L[there_L], image_L3[there_L]
        bin_L = _flat_bin(beside_L3[there_L] - image_L3 * bins_L3[there_L], bins_L3[there_L]) + grid.first_G[graph_L]
        for first, last in _split_runs(atoms_B[bin_L]):
            look_P, place_P = _repeat_by_count(
                torch.arange(first, last, device=graph_N.device), atoms_B[bin_L[first:last]]
            )
            source_P = atom_L[look_P]
            target_P = by_bin_N[first_B[bin_L[look_P]] + place_P]
            # Counted from where atoms were written, not from where they were moved to.
            image_P3 = image_L3[look_P] - wraps_N3[target_P] + wraps_N3[source_P]
            # Not an atom and itself, but an atom and its own image in another cell.
            shifts_P3 = torch.einsum("pk,pkj->pj", image_P3.to(grid.cells_G33.dtype), grid.cells_G33[graph_N[source_P]])
            vectors_P3 = positions_N3[target_P] + shifts_P3 - positions_N3[source_P]
            other_P = (source_P != target_P) | (image_P3 != 0).any(1)
            kept = (other_P & (vectors_P3.norm(dim=1) <= cutoff)).nonzero().squeeze(1)
            found.append(torch.cat((source_P[kept, None], target_P[kept, None], image_P3[kept]), dim=1))
    return torch.cat(found)


def _split_runs(counts: Tensor) -> list[tuple[int, int]]:
    """Return ranges of rows whose counts add up to at most _CANDIDATES, or single rows."""
    ends = counts.cumsum(0)
    if len(ends) == 0 or int(ends[-1]) <= _CANDIDATES:
        return [(0, len(ends))]
    run = (ends - 1).div(_CANDIDATES, rounding_mode="floor")
    cuts = [0, *((run[1:] != run[:-1]).nonzero().squeeze(1) + 1).tolist(), len(ends)]
    return list(pairwise(cuts))


def _repeat_by_count(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each value as often as its count says, and the number of each repetition."""
    repeated = values.repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return repeated, torch.arange(len(repeated), device=values.device) - starts


def _flat_bin(places: Tensor, sizes: Tensor) -> Tensor:
    return (places[:, 0] * sizes[:, 1] + places[:, 1]) * sizes[:, 2] + places[:, 2]
