"""Times of whole blocks."""

from __future__ import annotations

import pytest

from phalanx.hardware.calibrate.blocks import split_times


@pytest.mark.parametrize(("forward", "both"), [(1.0, 3.5), (2.0, 2.0), (3.0, 1.5)])
def test_both_passes_take_time_however_busy_the_machine_was(forward: float, both: float) -> None:
    parts = split_times(forward, both)
    assert sum(parts) == pytest.approx(both) and min(parts) > 0
    assert parts[0] == (forward if both > forward else pytest.approx(both / 3))
