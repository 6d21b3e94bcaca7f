"""Sample polycrystals and plates against what is known of their physics by other means."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from phalanx.families.materials.data.samples import grains, plate


def test_cells_fill_the_cube_and_share_its_walls() -> None:
    seeds = np.random.default_rng(0).uniform(size=(40, 3))
    cells = grains.find_faces(seeds)
    assert cells.volume_N.sum() == pytest.approx(1.0) and (cells.volume_N > 0.0).all()
    assert cells.hot_N.sum() == pytest.approx(1.0) and cells.cold_N.sum() == pytest.approx(1.0)
    # Each cell is closed: its faces and walls along x, with their directions, add up to nothing.
    along = cells.area_F * cells.normal_F3[:, 0]
    closed = np.bincount(cells.ends_F2[:, 0], along, 40) - np.bincount(cells.ends_F2[:, 1], along, 40)
    assert np.allclose(closed + cells.cold_N - cells.hot_N, 0.0, atol=1e-9)


def test_grains_alike_conduct_as_one_piece_and_heat_is_kept() -> None:
    random = np.random.default_rng(1)
    seeds, axes = random.uniform(size=(50, 3)), random.standard_normal((50, 3))
    cells = grains.find_faces(seeds)
    axes /= np.linalg.norm(axes, axis=1, keepdims=True)
    with patch.object(grains, "ALONG", 3.0), patch.object(grains, "ACROSS", 3.0), patch.object(grains, "BOUNDARY", 0.0):
        plain = grains.conduct(seeds, axes, cells)
    assert plain.conductivity == pytest.approx(3.0)
    assert np.allclose(plain.temperature_N, 1.0 - seeds[:, 0], atol=1e-9)
    heat = grains.conduct(seeds, axes, cells)
    net = np.bincount(cells.ends_F2[:, 1], heat.heat_F, 50) - np.bincount(cells.ends_F2[:, 0], heat.heat_F, 50)
    # What comes out of the cold wall went into the hot one; grains without a wall keep nothing.
    inner = (cells.hot_N == 0.0) & (cells.cold_N == 0.0)
    assert inner.any() and np.allclose(net[inner], 0.0, atol=1e-9)
    assert net[cells.cold_N > 0.0].sum() == pytest.approx(-net[(cells.hot_N > 0.0) & (cells.cold_N == 0.0)].sum())
    assert grains.ACROSS < heat.conductivity < grains.ALONG


def test_a_plate_bends_and_stretches_as_a_beam() -> None:
    points, triangles = plate.mesh_plate(np.array([1.5, 0.5]), 0.03, spacing=0.05)
    tip = np.isclose(points[:, 0], plate.LENGTH)
    pulled, stress, area = plate.solve_plate(points, triangles, np.array([1.0, 0.0]))
    assert area.sum() == pytest.approx(plate.LENGTH, rel=0.002)
    # Hooke; at the clamp the plate cannot grow thinner, which stiffens it a little.
    assert pulled[tip, 0].mean() == pytest.approx(plate.LENGTH, rel=0.03)
    middle = np.abs(points[triangles].mean(axis=1)[:, 0] - 0.9) < 0.1
    assert np.allclose(stress[middle], [1.0, 0.0, 0.0], atol=0.05)
    bent, _, _ = plate.solve_plate(points, triangles, np.array([0.0, 1.0]))
    # Timoshenko's beam: bending P L^3 / 3 E I and shear P L / k G A.
    shear = plate.LENGTH / (5.0 / 6.0 / (2.0 * (1.0 + plate.POISSON)))
    assert bent[tip, 1].mean() == pytest.approx(plate.LENGTH**3 * 4.0 + shear, rel=0.05)


def test_a_hole_raises_the_stress_beside_it() -> None:
    center, radius = np.array([1.0, 0.5]), 0.12
    points, triangles = plate.mesh_plate(center, radius, spacing=0.015)
    assert (np.linalg.norm(points - center, axis=1) > radius - 1e-9).all()
    moved, stress, _ = plate.solve_plate(points, triangles, np.array([1.0, 0.0]))
    # Above the hole as in an endless plate (Kirsch), but for what this one's sides and its triangles change.
    away = points[triangles].mean(axis=1) - center
    above = (np.abs(away[:, 0]) < 0.01) & (away[:, 1] > 0.0) & (away[:, 1] < 2.0 * radius)
    ratio = radius / away[above, 1]
    assert np.allclose(stress[above, 0], 1.0 + 0.5 * ratio**2 + 1.5 * ratio**4, rtol=0.18)
    assert stress[above, 0].max() > 2.5
    work = (plate.side_forces(points, np.array([1.0, 0.0])) * moved).sum()
    assert work == pytest.approx(plate.make_plate(center, radius, np.array([1.0, 0.0]))["compliance"], rel=0.03)


@pytest.mark.parametrize("kind", ["grains", "plate"])
def test_a_seed_gives_the_same_files(tmp_path: Path, kind: str) -> None:
    def write(folder: str, seed: int) -> str:
        to = tmp_path / folder
        if kind == "grains":
            return grains.write_grains(to, polycrystals=2, seed=seed).files[0].sha256
        return plate.write_plates(to, plates=2, seed=seed).files[0].sha256

    assert write("first", 3) == write("again", 3) != write("other", 4)
