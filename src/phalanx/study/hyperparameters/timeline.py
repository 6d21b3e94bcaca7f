"""When devices computed and when they were idle.

A device is busy while at least one trial on it is in its training loop. Starting processes, opening data and waiting for
something to do are idle time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SHADES = " .:-=+*#"
"""From never to always busy."""


@dataclass(frozen=True)
class Span:
    """A trial in its training loop."""

    device: str
    begin: float
    """Seconds on any clock that all spans share."""
    end: float
    label: str = ""


@dataclass(frozen=True)
class Window:
    """A time in which somebody had devices."""

    devices: tuple[str, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class DeviceUse:
    """What became of a device's time."""

    device: str
    held_s: float
    busy_s: float
    shared_s: float
    """Busy with more than one trial."""
    trials: int
    """Parts of trials that ran on it."""

    @property
    def idle(self) -> float:
        """Share of the time that it was idle, from 0 to 1."""
        return 1.0 - self.busy_s / self.held_s if self.held_s else 0.0


def device_use(windows: Sequence[Window], spans: Sequence[Span]) -> list[DeviceUse]:
    """Return the use of each device that a window names, over all windows."""
    names = dict.fromkeys(name for window in windows for name in window.devices)
    found = []
    for name in names:
        held = busy = shared = 0.0
        for window in (window for window in windows if name in window.devices):
            held += window.end - window.begin
            inside = [_intersect_span(span, window) for span in spans if span.device == name]
            one, more = _covered_seconds([span for span in inside if span is not None])
            busy, shared = busy + one, shared + more
        found.append(DeviceUse(name, held, busy, shared, sum(span.device == name for span in spans)))
    return found


def idle_share(uses: Iterable[DeviceUse]) -> float:
    """Return the idle time of all devices over the time they were held, from 0 to 1."""
    uses = list(uses)
    held = sum(use.held_s for use in uses)
    return 1.0 - sum(use.busy_s for use in uses) / held if held else 0.0


def draw_bars(windows: Sequence[Window], spans: Sequence[Span], columns: int = 60) -> dict[str, str]:
    """Return a line of `columns` letters for each device, from the first window's beginning to the last one's end.

    Each letter says how much of its time the device was busy, from a blank (never) to # (always).
    """
    if not windows:
        return {}
    begin, end = min(window.begin for window in windows), max(window.end for window in windows)
    width = max(end - begin, 1e-9) / columns
    lines = {}
    for name in dict.fromkeys(name for window in windows for name in window.devices):
        mine = [span for span in spans if span.device == name]
        letters = []
        for column in range(columns):
            cell = Window((name,), begin + column * width, begin + (column + 1) * width)
            parts = [part for span in mine if (part := _intersect_span(span, cell)) is not None]
            share = _covered_seconds(parts)[0] / width
            letters.append(_SHADES[min(round(share * (len(_SHADES) - 1)), len(_SHADES) - 1)])
        lines[name] = "".join(letters)
    return lines


def _intersect_span(span: Span, window: Window) -> tuple[float, float] | None:
    begin, end = max(span.begin, window.begin), min(span.end, window.end)
    return (begin, end) if end > begin else None


def _covered_seconds(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds that at least one span covers, and that at least two do."""
    changes: dict[float, int] = {}
    for begin, end in spans:
        changes[begin] = changes.get(begin, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    once = twice = 0.0
    depth, before = 0, 0.0
    for time in sorted(changes):
        once += (time - before) * (depth >= 1)
        twice += (time - before) * (depth >= 2)
        depth, before = depth + changes[time], time
    return once, twice
