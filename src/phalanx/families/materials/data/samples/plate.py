"""Sample plates: a sheet with a hole, clamped on the left and pulled on the right, as graphs of the nodes of its mesh.

Plane stress by finite elements: linear triangles, whose strain and stress are constant (Zienkiewicz and Taylor, The finite
element method, chapter 4). Lengths are in heights of the plate, stresses in its Young's modulus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.prepared_folder import Progress, SampleManifest
from phalanx.errors import PhalanxError
from phalanx.families.materials.data.samples.graph_sample import write_graphs

try:
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve
    from scipy.spatial import Delaunay
except ImportError as error:
    raise PhalanxError('sample plates need scipy: pip install "phalanx-train[materials]"') from error

PLATE = "plate.npz"
LENGTH = 2.0
POISSON = 0.3
SPACING = 0.1
"""Distance of nodes."""
YIELD = 5.0
"""Von Mises stress, in units of the load on the right side, from which the material at a node yields."""
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def write_plates(
    folder: Path, *, plates: int = 400, seed: int = 0, progress: Progress = lambda what, done, total: None
) -> SampleManifest:
    """Make plates with a hole somewhere under loads of any direction, write them into `folder` and return its record.

    The same seed gives the same bytes on the same machine. Raises DataError where files are already there.
    """

    return write_graphs(
        folder, PLATE, draw_plate, kind="plate", what="plates", count=plates, seed=seed, progress=progress
    )


def draw_plate(random: np.random.Generator) -> dict[str, Any]:
    """Return the graph of a plate with a hole of any size somewhere, under a load of any direction."""
    radius = random.uniform(0.12, 0.3)
    center = np.array([random.uniform(0.5, LENGTH - 0.5), random.uniform(radius + 0.15, 0.85 - radius)])
    angle = random.uniform(0.0, 2.0 * np.pi)
    return make_plate(center, radius, np.array([np.cos(angle), np.sin(angle)]))


def make_plate(center_2: Floats, radius: float, load_2: Floats) -> dict[str, Any]:
    """Return one graph by the names of its arrays; see `pack_graphs`. load_2: force on a unit of the right side."""
    points_N2, triangles_T3 = mesh_plate(center_2, radius)
    moved_N2, stress_T3, area_T = solve_plate(points_N2, triangles_T3, load_2)
    mises_N = node_means(von_mises(stress_T3), area_T, triangles_T3, len(points_N2))
    edges_E2 = mesh_edges(triangles_T3)
    steps_E2 = points_N2[edges_E2[:, 1]] - points_N2[edges_E2[:, 0]]
    forces_N2 = side_forces(points_N2, load_2)
    return {
        "edges": edges_E2,
        "pos": points_N2,
        "place": points_N2,
        "held": (points_N2[:, 0] == 0.0).astype(np.float64),
        "force": forces_N2,
        "rim": np.linalg.norm(points_N2 - center_2, axis=1) - radius,
        "step": steps_E2,
        "length": np.linalg.norm(steps_E2, axis=1),
        "load": load_2[None],
        "displacement": moved_N2,
        "mises": mises_N,
        "yields": (mises_N > YIELD * np.linalg.norm(load_2)).astype(np.int64),
        "compliance": float((forces_N2 * moved_N2).sum()),
    }


def mesh_plate(center_2: Floats, radius: float, spacing: float = SPACING) -> tuple[Floats, Integers]:
    """Return nodes [N, 2] and triangles [T, 3] of a plate with a round hole."""
    columns, rows = round(LENGTH / spacing) + 1, round(1.0 / spacing) + 1
    grid = np.meshgrid(np.linspace(0.0, LENGTH, columns), np.linspace(0.0, 1.0, rows), indexing="ij")
    grid_N2 = np.stack(grid, axis=-1).reshape(-1, 2)
    # Nodes right at the rim would make slivers.
    outside = np.linalg.norm(grid_N2 - center_2, axis=1) > radius + 0.5 * spacing
    angles = np.linspace(0.0, 2.0 * np.pi, max(8, round(2.0 * np.pi * radius / spacing)), endpoint=False)
    rim_N2 = center_2 + radius * np.stack((np.cos(angles), np.sin(angles)), axis=1)
    points_N2 = np.concatenate((grid_N2[outside], rim_N2))
    triangles_T3 = Delaunay(points_N2).simplices.astype(np.int64)
    inside = (np.linalg.norm(points_N2[triangles_T3].mean(axis=1) - center_2, axis=1) < radius) & (
        triangles_T3 >= len(points_N2) - len(rim_N2)
    ).all(axis=1)
    a, b, c = points_N2[triangles_T3].transpose(1, 0, 2)
    area_T = 0.5 * ((b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0])
    # Points on a straight side form triangles without an area.
    return points_N2, triangles_T3[~inside & (np.abs(area_T) > 1e-9)]


def mesh_edges(triangles_T3: Integers) -> Integers:
    """Return every side of the triangles once in each direction, [E, 2]."""
    sides = np.concatenate([triangles_T3[:, pair] for pair in ([0, 1], [1, 2], [2, 0])])
    return np.unique(np.concatenate((sides, sides[:, ::-1])), axis=0)


def side_forces(points_N2: Floats, load_2: Floats) -> Floats:
    """Return the forces [N, 2] that an even load on the right side puts on its nodes: half of each piece on either end."""
    forces_N2 = np.zeros_like(points_N2)
    side = np.flatnonzero(np.isclose(points_N2[:, 0], LENGTH))
    side = side[np.argsort(points_N2[side, 1])]
    pieces = np.diff(points_N2[side, 1])
    forces_N2[side[:-1]] += 0.5 * pieces[:, None] * load_2
    forces_N2[side[1:]] += 0.5 * pieces[:, None] * load_2
    return forces_N2


def solve_plate(points_N2: Floats, triangles_T3: Integers, load_2: Floats) -> tuple[Floats, Floats, Floats]:
    """Return displacements [N, 2], stresses [T, 3] (xx, yy, xy) and areas [T] of a plate held where x = 0."""
    elastic_33 = np.array([[1.0, POISSON, 0.0], [POISSON, 1.0, 0.0], [0.0, 0.0, 0.5 * (1.0 - POISSON)]])
    elastic_33 = elastic_33 / (1.0 - POISSON**2)
    corners = points_N2[triangles_T3]
    x, y = corners[..., 0], corners[..., 1]
    # Gradients of the three functions that are 1 at a corner and 0 at the others, times twice the (signed) area.
    by_x, by_y = np.roll(y, -1, axis=1) - np.roll(y, 1, axis=1), np.roll(x, 1, axis=1) - np.roll(x, -1, axis=1)
    twice_T = (x * by_x).sum(axis=1)
    strain_T36 = np.zeros((len(triangles_T3), 3, 6))
    strain_T36[:, 0, 0::2] = strain_T36[:, 2, 1::2] = by_x / twice_T[:, None]
    strain_T36[:, 1, 1::2] = strain_T36[:, 2, 0::2] = by_y / twice_T[:, None]
    area_T = 0.5 * np.abs(twice_T)
    stiff_T66 = area_T[:, None, None] * (strain_T36.transpose(0, 2, 1) @ elastic_33 @ strain_T36)
    places_T6 = (2 * triangles_T3[:, :, None] + np.arange(2)).reshape(-1, 6)
    rows, columns = np.repeat(places_T6, 6, axis=1).ravel(), np.tile(places_T6, (1, 6)).ravel()
    size = 2 * len(points_N2)
    stiff = coo_array((stiff_T66.ravel(), (rows, columns)), shape=(size, size)).tocsc()
    free = np.flatnonzero(np.repeat(points_N2[:, 0] > 0.0, 2))
    moved = np.zeros(size)
    moved[free] = spsolve(stiff[free][:, free], side_forces(points_N2, load_2).ravel()[free])
    stress_T3 = (elastic_33 @ strain_T36 @ moved[places_T6][:, :, None])[..., 0]
    return moved.reshape(-1, 2), stress_T3, area_T


def von_mises(stress_T3: Floats) -> Floats:
    """Return the von Mises stress [T] of plane stresses (xx, yy, xy)."""
    xx, yy, xy = stress_T3.T
    found: Floats = np.sqrt(xx**2 - xx * yy + yy**2 + 3.0 * xy**2)
    return found


def node_means(values_T: Floats, area_T: Floats, triangles_T3: Integers, nodes: int) -> Floats:
    """Return at each node the mean over the triangles around it, weighed by their areas."""
    corners = triangles_T3.ravel()
    weights = np.bincount(corners, np.repeat(area_T, 3), nodes)
    found: Floats = np.bincount(corners, np.repeat(area_T * values_T, 3), nodes) / weights
    return found
