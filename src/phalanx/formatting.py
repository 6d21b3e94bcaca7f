"""Numbers and text as a person reads them, the same on a terminal and on a page."""

from __future__ import annotations

import math
import re

_BLANK_LINES = re.compile(r"\n\s*\n")


def format_number(value: float) -> str:
    """Write four significant digits; very large and small values as three with an exponent, NaN and infinities by name."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    # the exponent after rounding to four digits: 9.99996 becomes 10.00 and not 10.000
    _, _, exponent = f"{value:.3e}".partition("e")
    return f"{value:.{max(0, 3 - int(exponent))}f}".replace("-", "−")


def format_count(value: float) -> str:
    """Write a count in three digits and a letter: 950, 52.3k, 1.05B (billion), 2.1T (trillion)."""
    if not math.isfinite(value):
        return format_number(value)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,999 would round to 1000k
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def format_tick(value: float) -> str:
    """Write the round value of a tick exactly, in as few characters as it takes: 0.5, 2500, 12.5k, 3e−4."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.6e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.10g}{letter}"
    return f"{value:.10g}".replace("-", "−")


def format_percent(share: float) -> str:
    """Write a share of one as a percentage: three digits from 10 % on, two decimals below, a bound under 0.01 %."""
    if not math.isfinite(share):
        return format_number(share)
    if -0.00005 < share <= 0:
        return "0.00 %"
    if 0 < share < 0.0001:
        return "< 0.01 %"
    return f"{100 * share:.1f} %" if share >= 0.1 else f"{100 * share:.2f} %"


def format_gibibytes(size: float, decimals: int = 1) -> str:
    """Write a number of bytes as GiB, without the unit."""
    return f"{size / 2**30:.{decimals}f}"


def format_duration(seconds: float) -> str:
    """Write seconds in the two largest units that matter: 4.1 ms, 12.3 s, 4 min 10 s, 3 h 20 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return format_number(seconds)
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    # 59.96 s would round to 60.0 s
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        whole, rest = divmod(round(seconds / small), size // small)
        if whole:
            return f"{whole} {unit} {rest} {small_unit}" if rest else f"{whole} {unit}"
    return f"{round(seconds)} s"


def format_interval(seconds: float, low: float, high: float) -> str:
    """Write a time and the bounds around it, all in the unit that suits the time: 24.7 min (21.3 to 29.4)."""
    if not math.isfinite(seconds):
        return format_number(seconds)
    units = ((86400.0, "d", 2 * 86400), (3600.0, "h", 2 * 3600), (60.0, "min", 120), (1.0, "s", 0.1), (1e-3, "ms", 0.0))
    size, unit = next((size, unit) for size, unit, least in units if seconds >= least)
    scaled = (one / size for one in (seconds, low, high))
    value, below, above = (f"{one:,.0f}" if abs(one) >= 999.5 else f"{one:.3g}" for one in scaled)
    return f"{value} {unit} ({below} to {above})"


def format_difference(seconds: float) -> str:
    """Write a difference of times with its sign: +36.3 ms, −4.1 s."""
    return ("−" if seconds < 0 else "+") + format_duration(abs(seconds))


def shorten_blank_lines(text: str) -> str:
    """Return `text` with a single blank line where several follow each other, and none at its end.

    Models that have learnt little may write nothing but line ends.
    """
    return _BLANK_LINES.sub("\n\n", text).rstrip()
