"""Scales and their ticks, and drawings made of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.report.drawing import (
    Bar,
    Plot,
    Scale,
    choose_position_ticks,
    choose_value_ticks,
    draw_bars,
    fit_scale,
)

FINITE = st.floats(min_value=-1e30, max_value=1e30, allow_subnormal=False)


def test_linear_and_logarithmic_places() -> None:
    np.testing.assert_allclose(Scale(2, 4).share(np.array([2, 3, 4.0])), [0, 0.5, 1])
    np.testing.assert_allclose(Scale(1, 100, logarithmic=True).share(np.array([1, 10, 100.0])), [0, 0.5, 1])


def test_what_has_no_place_is_nan() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0, -1])
    assert np.isnan(Scale(1, 10, logarithmic=True).share(values)).all()
    assert np.isnan(Scale(-2, 10).share(values)).tolist() == [True, True, True, False, False]


@settings(deadline=None)
@given(st.lists(FINITE | st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=20), st.booleans())
def test_a_value_scale_holds_every_value_it_can_show(values: list[float], logarithmic: bool) -> None:
    array = np.array(values)
    scale = fit_scale(array, logarithmic=logarithmic, from_zero=False)
    assert scale.low < scale.high
    shares = scale.share(array)
    shown = np.isfinite(array) & ((array > 0) | (not logarithmic))
    assert np.isnan(shares[~shown]).all()
    assert ((shares[shown] >= 0) & (shares[shown] <= 1)).all()


def test_from_zero_starts_at_zero_unless_a_value_is_below() -> None:
    assert fit_scale(np.array([3.0, 4.0]), logarithmic=False, from_zero=True).low == 0
    assert fit_scale(np.array([-3.0, 4.0]), logarithmic=False, from_zero=True).low < -3


@settings(deadline=None)
@given(st.floats(1e-6, 1e12), st.floats(1.5, 1e12), st.booleans())
def test_value_ticks_are_few_in_order_and_distinct(low: float, ratio: float, logarithmic: bool) -> None:
    ticks = choose_value_ticks(Scale(low, low * ratio, logarithmic))
    assert 2 <= len(ticks) <= 12
    shares = [tick.share for tick in ticks]
    assert shares == sorted(shares) and shares[0] > -1e-6 and shares[-1] < 1 + 1e-6
    assert len({tick.label for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale(2.4, 12.4), ["4", "6", "8", "10", "12"]),
        (Scale(0, 3.2e-4), ["0", "1e−4", "2e−4", "3e−4"]),
        (Scale(2.5, 12, logarithmic=True), ["3", "4", "5", "6", "8", "10"]),
        (Scale(2e-7, 60, logarithmic=True), ["1e−6", "1e−4", "0.01", "1"]),
    ],
)
def test_value_tick_labels(scale: Scale, labels: list[str]) -> None:
    assert [tick.label for tick in choose_value_ticks(scale)] == labels


@pytest.mark.parametrize(
    ("axis", "high", "labels"),
    [
        ("step", 1, ["0", "1"]),
        ("step", 3, ["0", "1", "2", "3"]),
        ("step", 2000, ["0", "500", "1000", "1500", "2000"]),
        ("tokens", 1.05e9, ["0", "200M", "400M", "600M", "800M", "1B"]),
        ("time", 0.9, ["0 s", "0.2 s", "0.4 s", "0.6 s", "0.8 s"]),
        ("time", 893, ["0 s", "3 min", "6 min", "9 min", "12 min"]),
        ("time", 41_000, ["0 s", "2 h", "4 h", "6 h", "8 h", "10 h"]),
        ("time", 1e8, ["0 s", "200 d", "400 d", "600 d", "800 d", "1000 d"]),
    ],
)
def test_position_tick_labels(axis: str, high: float, labels: list[str]) -> None:
    assert [tick.label for tick in choose_position_ticks(Scale(0, high), axis)] == labels


def test_points_stand_where_both_scales_say() -> None:
    plot = Plot(Scale(0, 10), Scale(0, 100), left=100, top=10, tall=200, right=900)
    plot.add_curve([0, 5, 10], [0, 100, 50], 1)
    plot.add_dot(10, 0, "lone", "<b>")
    svg = str(plot.finish("Three points.").svg)
    assert '<polyline class="line-1" points="100.0,210.0 500.0,10.0 900.0,110.0"/>' in svg
    assert '<circle class="dot-1" cx="500.0" cy="10.0" r="5"/>' in svg
    assert '<circle class="lone" cx="900.0" cy="210.0" r="5"><title>&lt;b&gt;</title></circle>' in svg


def test_labels_keep_their_distance() -> None:
    plot = Plot(Scale(0, 1000), Scale(0, 1), left=0, right=1000)
    plot.label_across([0, 30, 60, 200], lambda value: f"{value:g}!", apart=55)
    assert re.findall(r">(\d+)!<", str(plot.finish("").svg)) == ["0", "60", "200"]


def test_the_longest_bar_takes_the_room_there_is() -> None:
    bars = [
        Bar("a", 3, "three", "fill-c1"),
        Bar("b", 1, "one", "fill-c2", start=3, marks=(2.0, 4.0)),
        Bar("c", 0, "", "x"),
    ]
    drawing = draw_bars(bars, "Bars.", left=200, behind=100)
    found = re.findall(r'<rect class="([\w-]+)" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', str(drawing.svg))
    # what is nothing still shows as a line
    assert found == [("fill-c1", "200.0", "525.0"), ("fill-c2", "725.0", "175.0"), ("x", "200.0", "1.0")]
    marks = re.findall(r'<line class="mark" x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)"', str(drawing.svg))
    assert marks == [("550.0", "550.0"), ("900.0", "900.0"), ("550.0", "900.0")]
    assert "nan" not in str(draw_bars([Bar("a", 0, "", "x")], "").svg)
