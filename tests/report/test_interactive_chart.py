"""What a curve's path holds: every outline point, no line over a gap, a dot for a point alone."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.report.drawing import Scale
from phalanx.report.interactive_chart import (
    AXES,
    BUCKETS,
    MOST_MARKS,
    MOST_POINTS_UNREDUCED,
    PLOT_HEIGHT,
    Chart,
    ChartDrawing,
    Marks,
    Positions,
    Series,
    draw_chart,
    reduce_points,
)
from phalanx.report.run_log import FloatArray


def _positions(steps: FloatArray) -> Positions:
    return Positions(steps, steps * 100, steps * 0.5)


NO_MARKS = Marks(_positions(np.array([])), _positions(np.array([])))


def _draw(values: list[float] | FloatArray, marks: Marks = NO_MARKS, look: str = "line") -> ChartDrawing:
    array = np.asarray(values, dtype=np.float64)
    positions = _positions(np.arange(len(array), dtype=np.float64))
    series = Series("key", "label", 1, positions, array, reduce_points(array), look)
    domains = {axis: Scale(0.0, max(1.0, float(positions.on(axis)[-1]))) for axis in AXES}
    return draw_chart(Chart("key", "Title", "", "", (series,)), domains, marks)


def _shape(drawing: ChartDrawing, *classes: str) -> str:
    return "".join(path.d for path in drawing.paths if set(classes) <= set(path.classes.split()))


def test_a_short_curve_keeps_every_point() -> None:
    values = np.arange(MOST_POINTS_UNREDUCED, dtype=np.float64)
    assert reduce_points(values).tolist() == list(range(MOST_POINTS_UNREDUCED))


@settings(max_examples=20, deadline=None)
@given(st.integers(MOST_POINTS_UNREDUCED + 1, 20_000))
def test_a_long_curve_keeps_its_outline(n: int) -> None:
    random = np.random.default_rng(n)
    values = random.standard_normal(n)
    values[random.random(n) < 0.1] = np.nan
    kept = reduce_points(values)
    assert len(kept) <= 2 * BUCKETS + 2
    assert kept[0] == 0 and kept[-1] == n - 1 and (np.diff(kept) > 0).all()
    edges = np.linspace(0, n, BUCKETS + 1).astype(np.int64)
    for start, stop in pairwise(edges):
        bucket = values[start:stop]
        if np.isfinite(bucket).any():
            inside = values[kept[(kept >= start) & (kept < stop)]]
            assert np.nanmin(inside) == np.nanmin(bucket) and np.nanmax(inside) == np.nanmax(bucket)


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn() -> None:
    values = np.ones(100_000)
    values[54_321] = 50
    top = min(float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", _shape(_draw(values), "curve", "x-step", "y-linear")))
    assert top < 0.06 * PLOT_HEIGHT


def test_each_axis_and_scale_has_its_path() -> None:
    shown = [path.classes for path in _draw([1, 10, 100]).paths]
    expected = {f"curve line colour-1 x-{axis} y-{scale}" for axis in AXES for scale in ("linear", "log")}
    assert set(shown) == expected and len(shown) == 6
    # on the logarithmic scale the three points lie on one straight line
    (first, middle, last) = re.findall(r"[ML]([\d.]+) ([\d.]+)", _shape(_draw([1, 10, 100]), "x-step", "y-log"))
    assert abs(float(first[1]) + float(last[1]) - 2 * float(middle[1])) < 0.2


def test_no_line_crosses_a_gap() -> None:
    shape = _shape(_draw([1, 2, float("nan"), 2, 1]), "curve", "x-step", "y-linear")
    assert re.sub(r"[\d. ]+", "", shape) == "MLML"


def test_no_line_crosses_a_gap_that_reduction_dropped() -> None:
    values = np.linspace(1, 2, 50_000)
    values[25_003] = np.inf
    assert 25_003 not in reduce_points(values)
    assert _shape(_draw(values), "curve", "x-step", "y-linear").count("M") == 2


def test_a_point_alone_is_a_dot() -> None:
    for values, alone in (([1.0], 1), ([1.0, np.nan, 2.0, np.nan, 3.0, 4.0], 2), ([np.nan, 1.0, 2.0], 0)):
        assert _shape(_draw(values), "lone", "x-step", "y-linear").count("h0") == alone


def test_zeros_have_no_place_on_a_logarithmic_scale() -> None:
    drawing = _draw([0.0, 3.0, 0.0, 0.0])
    assert _shape(drawing, "lone", "x-step", "y-log").count("h0") == 1
    assert _shape(drawing, "curve", "x-step", "y-linear").count("L") == 3


def test_a_curve_without_any_finite_value_still_has_ticks() -> None:
    drawing = _draw([float("nan"), float("inf")])
    assert drawing.paths == []
    assert all(axis.ticks for axis in (*drawing.value_ticks, *drawing.position_ticks))


def test_dotted_curves_have_a_dot_at_each_point() -> None:
    assert _shape(_draw([3, 2, 1], look="dotted"), "dots", "x-time", "y-linear").count("h0") == 3


def test_marks_stand_at_their_positions_on_each_axis() -> None:
    at = _positions(np.array([25.0, 50.0]))
    drawing = _draw(np.ones(101), Marks(resumes=at, checkpoints=at))
    for axis in AXES:
        assert re.findall(r"M([\d.]+) 0V400", _shape(drawing, "resumes", f"x-{axis}")) == ["250.0", "500.0"]
        assert re.findall(r"M([\d.]+) 400v-12", _shape(drawing, "checkpoints", f"x-{axis}")) == ["250.0", "500.0"]


def test_thousands_of_marks_are_thinned() -> None:
    at = _positions(np.arange(5000.0))
    drawing = _draw(np.ones(5000), Marks(resumes=at, checkpoints=at))
    assert 90 <= _shape(drawing, "resumes", "x-step").count("M") <= MOST_MARKS + 1


def test_spans_without_finite_values_are_shaded_and_joined_where_they_touch() -> None:
    values = np.ones(1001)
    positions = _positions(np.arange(1001.0))
    series = Series("key", "label", 1, positions, values, reduce_points(values))
    first, last = _positions(np.array([100.0, 301.0, 700.0])), _positions(np.array([300.0, 400.0, 700.0]))
    chart = Chart("key", "Title", "", "", (series,), nonfinite=(first, last))
    domains = {axis: Scale(0.0, float(positions.on(axis)[-1])) for axis in AXES}
    shape = _shape(draw_chart(chart, domains, NO_MARKS), "nonfinite", "x-time")
    assert shape == "M100.0 0H400.0V400H100.0ZM700.0 0H700.0V400H700.0Z"


def test_a_chart_starts_logarithmic_only_when_a_linear_one_would_show_little() -> None:
    positions = _positions(np.arange(4.0))

    def starts(values: list[float], scales: tuple[str, ...] = ("linear", "log")) -> bool:
        series = Series("key", "", 1, positions, np.array(values), np.arange(4))
        return Chart("key", "", "", "", (series,), scales=scales).starts_logarithmic

    assert starts([100, 1, 1, 1]) and not starts([10, 1, 1, 1]) and not starts([np.inf, 1, 1, 1])
    assert not starts([100, 1, 1, 1], ("linear",))
