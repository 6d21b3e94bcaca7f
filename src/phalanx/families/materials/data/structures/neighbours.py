"""Neighbour lists on the CPU, for preparing data: vesin finds the pairs, this module orders and limits them.

An edge leads from a source to a target atom: r = position[target] + image @ cell - position[source].
`device_neighbours` finds the same pairs on any device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.errors import PhalanxError
from phalanx.families.materials.data.structures.edges import TIE_A, Edges

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
    """All edges of at most `cutoff` A between atoms at `positions` [N, 3]; an atom and its own images too.

    cell: lattice vectors as rows [3, 3]; rows of directions that are not periodic are not looked at. Cells may be
    smaller than the cutoff. max_neighbours: keep the nearest for each target, and all that tie with the last one kept:
    dropping some of several equally near atoms would break the symmetry of a crystal.
    """
    finder = vesin.NeighborList(cutoff=cutoff, full_list=True)
    box = _complete(np.asarray(cell, dtype=np.float64), periodic)
    source, target, images, distances = finder.compute(
        points=np.asarray(positions, dtype=np.float64), box=box, periodic=periodic, quantities="ijSd"
    )
    images = images.astype(np.int64)
    order = np.lexsort((images[:, 2], images[:, 1], images[:, 0], source, target))
    edges = Edges(
        source.astype(np.int64)[order],
        target.astype(np.int64)[order],
        images[order],
        distances.astype(np.float64)[order],
    )
    return edges if max_neighbours is None else _nearest(edges, max_neighbours)


def _complete(cell: npt.NDArray[np.float64], periodic: tuple[bool, bool, bool]) -> npt.NDArray[np.float64]:
    """The cell with unit vectors at right angles to the others in the directions that are not periodic."""
    box = cell.copy()
    kept = [row for row in range(3) if periodic[row]]
    if not kept:
        return np.eye(3)
    _, _, directions = np.linalg.svd(box[kept])
    for row, direction in zip((row for row in range(3) if not periodic[row]), directions[len(kept) :], strict=True):
        box[row] = direction
    return box


def _nearest(edges: Edges, limit: int) -> Edges:
    order = np.lexsort((edges.distances, edges.target))
    target, distances = edges.target[order], edges.distances[order]
    starts = np.flatnonzero(np.diff(target, prepend=-1))
    counts = np.diff(starts, append=len(target))
    last = distances[starts + np.minimum(counts, limit) - 1]
    kept = np.sort(order[distances <= np.repeat(last, counts) + TIE_A])
    return Edges(edges.source[kept], edges.target[kept], edges.images[kept], edges.distances[kept])
