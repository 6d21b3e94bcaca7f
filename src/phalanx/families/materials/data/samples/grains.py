"""Sample polycrystals: Voronoi cells that conduct heat, as graphs of grains and the faces between them.

Grains fill a unit cube whose walls at x = 0 and x = 1 are held at temperatures 1 and 0. Each conducts best along its axis;
heat also has to pass the boundary between two grains, the worse the more their axes differ (Kapitza's resistance). A
finite-volume balance over the faces (two-point flux: Eymard, Gallouet and Herbin 2000, Finite volume methods, chapter 3)
gives the temperature of every grain, the heat through every face, and from the heat through the cube its conductivity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.data.prepared_folder import Progress, SampleManifest
from phalanx.errors import PhalanxError
from phalanx.families.materials.data.samples.graph_sample import write_graphs

try:
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve
    from scipy.spatial import Voronoi
except ImportError as error:
    raise PhalanxError('sample grains need scipy: pip install "phalanx-train[materials]"') from error

GRAINS = "grains.npz"
ALONG, ACROSS = 10.0, 1.0
"""Conductivity of a grain along its axis and across it."""
BOUNDARY = 0.1
"""Resistance of a unit area of boundary between grains whose axes are at right angles."""
BUSIEST = 0.1
"""Share of the grains of a polycrystal that count as those which carry most heat."""
_LEAST_AREA = 1e-9
"""Faces smaller than this are points where four grains meet, rounded."""
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def write_grains(
    folder: Path, *, polycrystals: int = 400, seed: int = 0, progress: Progress = lambda what, done, total: None
) -> SampleManifest:
    """Make polycrystals of 30 to 60 grains, write them into `folder` and return its record.

    The same seed gives the same bytes on the same machine. Raises DataError where files are already there.
    """

    return write_graphs(
        folder,
        GRAINS,
        draw_polycrystal,
        kind="grains",
        what="polycrystals",
        count=polycrystals,
        seed=seed,
        progress=progress,
    )


def draw_polycrystal(random: np.random.Generator) -> dict[str, Any]:
    """Return the graph of 30 to 60 grains anywhere, with axes of any direction."""
    seeds_N3 = random.uniform(size=(int(random.integers(30, 61)), 3))
    return make_polycrystal(seeds_N3, random.standard_normal(seeds_N3.shape))


def make_polycrystal(seeds_N3: Floats, axes_N3: Floats) -> dict[str, Any]:
    """Return one graph by the names of its arrays; see `pack_graphs`. axes_N3: of any length."""
    cells = find_faces(seeds_N3)
    axes_N3 = axes_N3 / np.linalg.norm(axes_N3, axis=1, keepdims=True)
    heat = conduct(seeds_N3, axes_N3, cells)
    # An axis has no sign: its products say which way it lies.
    orientation_N6 = (axes_N3[:, :, None] * axes_N3[:, None, :])[:, *np.triu_indices(3)]
    busy = np.argsort(-heat.through_N, kind="stable")[: max(1, round(BUSIEST * len(seeds_N3)))]
    carries_N = np.zeros(len(seeds_N3), dtype=np.int64)
    carries_N[busy] = 1
    ends_F2, both = cells.ends_F2, np.concatenate
    return {
        "edges": both((ends_F2, ends_F2[:, ::-1])),
        "pos": seeds_N3,
        "volume": cells.volume_N,
        "orientation": orientation_N6,
        "place": seeds_N3[:, :1],
        "wall_areas": np.stack((cells.hot_N, cells.cold_N), axis=1),
        "area": both((cells.area_F, cells.area_F)),
        "distance": both((cells.distance_F, cells.distance_F)),
        "normal": both((cells.normal_F3, -cells.normal_F3)),
        "misorientation": both((heat.angle_F, heat.angle_F)),
        "conductivity": heat.conductivity,
        "temperature": heat.temperature_N,
        "carries_most": carries_N,
        "heat": both((heat.heat_F, -heat.heat_F)),
    }


class Cells(NamedTuple):
    """Grains of a unit cube and what they touch."""

    volume_N: Floats
    hot_N: Floats
    """Area of the wall at x = 0."""
    cold_N: Floats
    """Area of the wall at x = 1."""
    ends_F2: Integers
    """The two grains of each face."""
    area_F: Floats
    normal_F3: Floats
    """From the first to the second."""
    distance_F: Floats
    """Between their seeds, which are as far from the face on either side."""


def find_faces(seeds_N3: Floats) -> Cells:
    """Return the Voronoi cells of points in the unit cube, cut off at its walls."""
    count = len(seeds_N3)
    # A point and its image in a wall are as far from it: the wall is where their cells meet.
    images = [seeds_N3]
    for axis in range(3):
        for wall in (0.0, 1.0):
            image = seeds_N3.copy()
            image[:, axis] = 2.0 * wall - image[:, axis]
            images.append(image)
    diagram = Voronoi(np.concatenate(images))
    pairs = diagram.ridge_points
    volume_N, hot_N, cold_N = np.zeros(count), np.zeros(count), np.zeros(count)
    faces: list[tuple[int, int, float]] = []
    for (one, other), corners in zip(pairs.tolist(), diagram.ridge_vertices, strict=True):
        if min(one, other) >= count:
            continue
        first, second = min(one, other), max(one, other)
        step = diagram.points[second] - diagram.points[first]
        area = polygon_area(diagram.vertices[corners], step)
        # A pyramid over the face with the seed at its tip, half the distance high.
        height = 0.5 * float(np.linalg.norm(step))
        volume_N[first] += area * height / 3.0
        if second < count:
            volume_N[second] += area * height / 3.0
            if area > _LEAST_AREA:
                faces.append((first, second, area))
        elif second // count == 1:
            hot_N[first] += area
        elif second // count == 2:
            cold_N[first] += area
    ends_F2 = np.array([face[:2] for face in faces], dtype=np.int64)
    steps_F3 = seeds_N3[ends_F2[:, 1]] - seeds_N3[ends_F2[:, 0]]
    distance_F = np.linalg.norm(steps_F3, axis=1)
    area_F = np.array([face[2] for face in faces])
    return Cells(volume_N, hot_N, cold_N, ends_F2, area_F, steps_F3 / distance_F[:, None], distance_F)


def polygon_area(corners_V3: Floats, normal_3: Floats) -> float:
    """Return the area of a convex polygon whose corners come in any order. normal_3: of any length."""
    middle = corners_V3.mean(axis=0)
    normal_3 = normal_3 / np.linalg.norm(normal_3)
    right = np.cross(normal_3, np.eye(3)[np.abs(normal_3).argmin()])
    right = right / np.linalg.norm(right)
    x, y = (corners_V3 - middle) @ right, (corners_V3 - middle) @ np.cross(normal_3, right)
    around = np.argsort(np.arctan2(y, x))
    x, y = x[around], y[around]
    return float(0.5 * abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)))


class Heat(NamedTuple):
    """How a polycrystal conducts."""

    temperature_N: Floats
    heat_F: Floats
    """Heat through each face, from its first grain to its second."""
    through_N: Floats
    """Heat that enters each grain, and leaves it."""
    angle_F: Floats
    """Between the axes of both grains, radians; at most a right angle."""
    conductivity: float


def conduct(seeds_N3: Floats, axes_N3: Floats, cells: Cells) -> Heat:
    """Return the steady state between walls at temperatures 1 and 0. axes_N3: of length 1."""
    (first, second), count = cells.ends_F2.T, len(seeds_N3)

    def conductivity_along(grains: Integers, normals: Floats) -> Floats:
        found: Floats = ACROSS + (ALONG - ACROSS) * (axes_N3[grains] * normals).sum(axis=1) ** 2
        return found

    angle_F = np.arccos(np.clip(np.abs((axes_N3[first] * axes_N3[second]).sum(axis=1)), 0.0, 1.0))
    # From one seed to the face, through the boundary, and on to the other seed: resistances in a row.
    halves = 0.5 * cells.distance_F
    inside_F = halves / conductivity_along(first, cells.normal_F3) + halves / conductivity_along(
        second, cells.normal_F3
    )
    passed_F = cells.area_F / (inside_F + BOUNDARY * np.sin(angle_F))
    everyone = np.arange(count)
    toward_x = conductivity_along(everyone, np.broadcast_to([1.0, 0.0, 0.0], (count, 3)))
    hot_N, cold_N = cells.hot_N * toward_x / seeds_N3[:, 0], cells.cold_N * toward_x / (1.0 - seeds_N3[:, 0])
    diagonal = hot_N + cold_N + np.bincount(first, passed_F, count) + np.bincount(second, passed_F, count)
    values = np.concatenate((-passed_F, -passed_F, diagonal))
    places = (np.concatenate((first, second, everyone)), np.concatenate((second, first, everyone)))
    temperature_N: Floats = spsolve(coo_array((values, places), shape=(count, count)).tocsc(), hot_N)
    heat_F = passed_F * (temperature_N[first] - temperature_N[second])
    into_N = hot_N * (1.0 - temperature_N)
    through_N = into_N + np.bincount(second, heat_F.clip(min=0.0), count)
    through_N = through_N + np.bincount(first, (-heat_F).clip(min=0.0), count)
    # Of a cube of side 1 under a difference of 1, the heat that passes is the conductivity.
    return Heat(temperature_N, heat_F, through_N, angle_F, float(into_N.sum()))
