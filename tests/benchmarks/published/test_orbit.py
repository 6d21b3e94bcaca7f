"""ORBIT's published ranges of scaling: how far plans are from them, as benchmarks/README.md says it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.presets import load_preset
from phalanx.layout.spec import Recompute
from phalanx.planner.trace.traced_model import Setting
from published.frameworks import OtherFramework, framework_of
from published.orbit import Batch, PlannedPoint, plan_points, read_figures

MOST = 49_152
RESULT = Path(__file__).parents[3] / "benchmarks/results/planner/orbit_scaling.json"


@cache
def planned(preset: str, batch: Batch, most_samples: int = 1) -> dict[int, PlannedPoint]:
    return {point.devices: point for point in plan_points(preset, "ORBIT", batch, most_samples)}


@cache
def on_most(batch: Batch, most_samples: int = 1) -> list[PlannedPoint]:
    return [planned(row["preset"], batch, most_samples)[MOST] for row in read_figures()["models"]]


def published(devices: int) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in read_figures()["published"] if row["devices"] == devices)
    return found


def test_rates_with_one_sample_are_near_the_published_range() -> None:
    # A micro-batch of one is an assumption: with four the range is two to three times as high.
    low, high = published(MOST)["pflop_s"]
    rates = [point.pflop_s for point in on_most("grows")]
    assert min(rates) == pytest.approx(low, rel=0.15)
    assert max(rates) == pytest.approx(high, rel=0.10)


@pytest.mark.parametrize(
    ("batch", "most_samples", "points"), [("grows", 1, (57, 14)), ("stays", 1, (42, 14)), ("stays", 4, (-9, -14))]
)
def test_errors_of_scaling_are_as_stated(batch: Batch, most_samples: int, points: tuple[int, int]) -> None:
    """What the ends of the planned range are above those of the published one, in points."""
    shares = [point.efficiency for point in on_most(batch, most_samples)]
    low, high = published(MOST)["efficiency"]
    assert (100 * (min(shares) - low), 100 * (max(shares) - high)) == pytest.approx(points, abs=3)


def test_smaller_micro_batches_lose_more_than_fewer() -> None:
    by_devices = planned("orbit-113b", "stays", 4)
    assert [point.microbatch for point in by_devices.values()] == [4, 2, 1]
    assert {point.global_batch for point in by_devices.values()} == {MOST // 8}
    fewer, smaller = planned("orbit-113b", "stays")[MOST], by_devices[MOST]
    assert smaller.step_s == pytest.approx(fewer.step_s)
    assert smaller.efficiency < fewer.efficiency / 2


@pytest.mark.parametrize(("tp", "recompute", "passes"), [(1, "none", 3), (4, "none", 3), (4, "full", 4)])
def test_published_aggregation_projects_every_variable(tp: int, recompute: Recompute, passes: int) -> None:
    """Keys and values of 48 variables at 2,048 locations of two samples: forward and both gradients, and forward again."""
    framework = framework_of("ORBIT")
    assert isinstance(framework, OtherFramework)
    setting = Setting(load_preset("orbit-1b").model(), 2048, tp=tp, recompute=recompute, compile=False)
    published, ours = (
        sum(op.matmul.flops for op in program.part_operations("embedding", setting, 2) if op.matmul is not None)
        for program in (framework, replace(framework, projects_variables=False))
    )
    assert (published - ours) * tp == passes * 2 * (2 * 2048 * 48) * 3072 * (2 * 3072)


def test_the_committed_result_is_of_these_figures() -> None:
    kept = json.loads(RESULT.read_text("utf-8"))
    assert kept["figures"] == read_figures()
    points = {
        (row["model"], row["batch"]): row
        for row in kept["points"]
        if row["program"] == "ORBIT" and row["devices"] == MOST and row["microbatch"] == 1
    }
    for point in on_most("grows"):
        assert points[point.model, "grows"]["step_s"] == pytest.approx(point.step_s, rel=0.02)
