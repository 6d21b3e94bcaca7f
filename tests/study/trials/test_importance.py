"""What matters most by measured trials: error bars that hold what they say."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.study.trials.importance import measured_importance

NAMES = ("a", "b", "c")


def test_measured_trials_with_error_bars() -> None:
    random = np.random.default_rng(1)
    codes = np.stack([random.integers(0, 4, 40) for _ in range(3)], axis=1)
    values = 1.0 * codes[:, 1] + 0.2 * codes[:, 0] + 0.05 * random.standard_normal(40)
    found = measured_importance(NAMES, codes, values, resampled=8)
    assert found.names[:2] == ("b", "a") and found.ranks[0, 0] == 1.0
    assert (found.low <= found.high).all() and found.low[0] < found.importance[0] * 1.2
    assert found.ranks.sum(axis=0) == pytest.approx([1.0] * 3)
    # Shapley values add up to what the forest says of a trial beyond the mean.
    total = found.values.sum(axis=1)
    assert np.corrcoef(total, values)[0, 1] > 0.95 and abs(total.mean()) < 0.5


def test_many_parameters_are_explained_in_part_together() -> None:
    random = np.random.default_rng(2)
    codes = random.integers(0, 3, (24, 10))
    found = measured_importance([f"p{n}" for n in range(10)], codes, codes[:, 4] * 1.0, resampled=2)
    assert found.names[0] == "p4" and "all others" in found.names and len(found.names) == 7
