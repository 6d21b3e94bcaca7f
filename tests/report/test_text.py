"""Numbers as a person reads them."""

from __future__ import annotations

import math

import pytest

from phalanx.report.text import count, duration, number, percent, short


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
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (52_341, "52.3k"), (999_999, "1M"), (1_048_576_000, "1.05B"), (2.1e12, "2.1T")],
)
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (2500, "2500"), (12_500, "12.5k"), (3e-4, "3e−4"), (2.5e-5, "2.5e−5"), (1e9, "1B")],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.00 %"), (1e-6, "< 0.01 %"), (0.0012, "0.12 %"), (0.4179, "41.8 %"), (1, "100.0 %"), (math.nan, "NaN")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


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
    assert duration(seconds) == text
