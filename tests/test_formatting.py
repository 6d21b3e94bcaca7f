"""Numbers as a person reads them."""

from __future__ import annotations

import math

import pytest

from phalanx.formatting import (
    format_count,
    format_difference,
    format_duration,
    format_interval,
    format_number,
    format_percent,
    format_tick,
    shorten_blank_lines,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2.81234, "2.812"),
        (10.9, "10.90"),
        (9.99996, "10.00"),
        (1234.5, "1234"),
        (-0.25, "−0.2500"),
        (3e-4, "3.00e−4"),
        (123456.0, "1.23e5"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (52_341, "52.3k"), (999_999, "1M"), (1_048_576_000, "1.05B"), (2.1e12, "2.1T")],
)
def test_count(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (2500, "2500"), (12_500, "12.5k"), (3e-4, "3e−4"), (2.5e-5, "2.5e−5"), (1e9, "1B")],
)
def test_short(value: float, text: str) -> None:
    assert format_tick(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.00 %"), (1e-6, "< 0.01 %"), (0.0012, "0.12 %"), (0.4179, "41.8 %"), (1, "100.0 %"), (math.nan, "NaN")],
)
def test_percent(share: float, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0041, "4.1 ms"),
        (0.41, "0.41 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min"),
        (250, "4 min 10 s"),
        (3599.9, "1 h"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((0.0132, 0.0112, 0.0155), "13.2 ms (11.2 to 15.5)"),
        ((0.0987, 0.08, 1.25), "98.7 ms (80 to 1,250)"),
        ((0.343, 0.293, 0.401), "0.343 s (0.293 to 0.401)"),
        ((100.0, 91.0, 130.0), "100 s (91 to 130)"),
        ((1500.0, 1280.0, 1760.0), "25 min (21.3 to 29.3)"),
        ((9000.0, 7200.0, 10800.0), "2.5 h (2 to 3)"),
        ((400000.0, 300000.0, 500000.0), "4.63 d (3.47 to 5.79)"),
    ],
)
def test_a_time_and_its_interval_share_a_unit(times: tuple[float, float, float], text: str) -> None:
    assert format_interval(*times) == text


def test_differences_of_times() -> None:
    assert [format_difference(one) for one in (0.0236, -0.00795, 90.0)] == ["+23.6 ms", "−7.95 ms", "+1 min 30 s"]


def test_blank_lines_of_a_sample_are_shortened() -> None:
    assert shorten_blank_lines("a\n\n \n\t\nb\nc" + "\n" * 60) == "a\n\nb\nc"
