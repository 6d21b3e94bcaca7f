"""Fitting the constants: known ones are found again, unknown ones stay where they were, and measured collectives are met."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from described import cube_mesh, infiniband, switched
from phalanx.hardware.calibrate.fit_collectives import SPREAD, Point, fit_constants, make_predictor
from phalanx.hardware.collectives import COLLECTIVES, Constants, bus_bandwidth, default_constants
from phalanx.hardware.machine import Machine, load_machine
from phalanx.hardware.topology import place_groups

MEASURED = Path(__file__).parents[4] / "shared" / "reference" / "collectives.csv"
CLUSTER = switched(network=infiniband(8, 4, 25))


def synthetic(constants: Constants, groups: list[tuple[int, int]], noise: float = 0.0) -> list[Point]:
    generator = np.random.default_rng(0)
    points = [
        Point(name, size, place_groups(CLUSTER, *group), 1.0)
        for name in COLLECTIVES
        for group in groups
        for size in np.geomspace(1e5, 1e9, 9)
    ]
    times = make_predictor(points)(constants) * np.exp(noise * generator.standard_normal(len(points)))
    return [replace(point, seconds=float(time)) for point, time in zip(points, times, strict=True)]


TRUTH = Constants(
    launch_s=2e-5,
    step_s=3e-6,
    efficiency=0.8,
    pass_b_s=1e12,
    ramp=0.3,
    step_across_s=1.2e-5,
    efficiency_across=0.7,
    tree=0.9,
)


def test_known_constants_are_found_again() -> None:
    points = synthetic(TRUTH, [(2, 1), (8, 1), (16, 1), (64, 1), (8, 8), (64, 8)], noise=0.02)
    fit = fit_constants(points, default_constants(CLUSTER), noise=0.02)
    for name, spread in SPREAD.items():
        if name != "multicast":
            off = np.log(getattr(fit.constants, name) / getattr(TRUTH, name))
            assert abs(off) < 4 * fit.spread[name] < 2 * spread, name
    assert fit.median < 0.02 and fit.p95 < 0.06
    again = fit_constants(points, default_constants(CLUSTER), noise=0.02)
    assert again.constants == fit.constants and again.spread == fit.spread


def test_what_no_point_tells_stays_at_its_prior() -> None:
    prior = default_constants(CLUSTER)
    fit = fit_constants(synthetic(TRUTH, [(2, 1), (8, 1)]), prior)
    for name in ("step_across_s", "efficiency_across", "tree"):
        assert getattr(fit.constants, name) == pytest.approx(getattr(prior, name), rel=1e-6)
        assert fit.spread[name] == pytest.approx(SPREAD[name], rel=1e-6)
    assert fit.constants.efficiency == pytest.approx(TRUTH.efficiency, rel=0.05)


def test_one_point_moves_the_constants_but_does_not_throw_them_far() -> None:
    prior = default_constants(CLUSTER)
    (point,) = synthetic(TRUTH, [(8, 1)])[:1]
    fit = fit_constants([replace(point, seconds=point.seconds * 10)], prior)
    assert prior.launch_s < fit.constants.launch_s < 20 * prior.launch_s
    assert fit.constants.efficiency == pytest.approx(prior.efficiency, rel=0.1)


def test_only_the_named_constants_are_fitted_and_shares_stay_shares() -> None:
    prior = default_constants(CLUSTER)
    points = [replace(point, seconds=point.seconds / 100) for point in synthetic(TRUTH, [(8, 1), (16, 1)])]
    fit = fit_constants(points, prior, {"efficiency": 1.0, "efficiency_across": 1.0})
    assert set(fit.spread) == {"efficiency", "efficiency_across"}
    assert (fit.constants.efficiency, fit.constants.efficiency_across) == (1.0, 1.0)
    assert replace(fit.constants, efficiency=prior.efficiency, efficiency_across=prior.efficiency_across) == prior


def measured(gpu: str, machine: Machine, members: set[int]) -> list[Point]:
    if not MEASURED.exists():
        pytest.skip(f"{MEASURED} is not there: measured collectives are not part of the repository")
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    points = []
    for row in rows:
        count = 32 if gpu == "unstated" else int(row["n_gpus"])
        if count in members:
            size = float(row["size_bytes"])
            bus = 2 * (count - 1) / count * size / (float(row["busbw_gb_s"]) * 1e9)
            seconds = float(row["time_us"]) * 1e-6 if row["time_us"] else bus
            points.append(Point("all_reduce", size, place_groups(machine, count, 1, world=count), seconds))
    assert points
    return points


@pytest.mark.parametrize(
    ("gpu", "machine", "members", "median", "p95"),
    [
        ("A100", load_machine("selene"), set(range(2, 9)), 0.035, 0.18),
        # Five of them are not on any ring of links: the fifth hangs on one of the others only.
        ("V100", cube_mesh(), {2, 3, 4, 6, 7, 8}, 0.04, 0.15),
    ],
    ids=["A100", "V100"],
)
def test_measured_all_reduces_in_a_node(
    gpu: str, machine: Machine, members: set[int], median: float, p95: float
) -> None:
    """VIA-Research/vTrain@f8dda84. The defaults, and a fit of each half of the points judged on the other."""
    points = measured(gpu, machine, members)
    prior = default_constants(machine)
    for constants, held_out in [
        (prior, points),
        (fit_constants(points[::2], prior).constants, points[1::2]),
        (fit_constants(points[1::2], prior).constants, points[::2]),
    ]:
        errors = np.abs(make_predictor(held_out)(constants) / [point.seconds for point in held_out] - 1)
        assert np.median(errors) < median and np.quantile(errors, 0.95) < p95


def test_measured_all_reduces_over_four_nodes() -> None:
    """stas00/ml-engineering@744d01e. The hardware is not named; the rates are those of 4 interfaces of 25 GB/s a node."""
    points = measured("unstated", CLUSTER, {32})
    seconds = np.array([point.seconds for point in points])
    sizes = np.array([point.size for point in points])
    times = make_predictor(points)(default_constants(CLUSTER))
    errors = np.abs(times / seconds - 1)
    assert np.median(errors) < 0.08 and errors[sizes >= 2**26].max() < 0.08 and errors.max() < 0.55
    assert float(bus_bandwidth("all_reduce", sizes[-1], 32, times[-1])) == pytest.approx(92e9, rel=0.03)
