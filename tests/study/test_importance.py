"""What matters most: error bars of measured trials that hold what they say, effects that can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.study.importance import measured_importance, summarize_importance

NAMES = ("a", "b", "c")


def test_measured_trials_with_error_bars() -> None:
    random = np.random.default_rng(1)
    codes = np.stack([random.integers(0, 4, 40) for _ in range(3)], axis=1)
    values = 1.0 * codes[:, 1] + 0.2 * codes[:, 0] + 0.05 * random.standard_normal(40)
    found = measured_importance(NAMES, codes, values, resampled=8)
    assert found.names[:2] == ("b", "a") and found.ranks[0, 0] == 1.0
    assert (found.low <= found.high).all() and found.low[0] < found.importance[0] * 1.2
    assert found.ranks.sum(axis=0) == pytest.approx([1.0] * 3)
    # Two values of b, drawn from all trials, differ by 1.25 in the mean; a's differ by a fifth of that.
    assert 0.8 < found.importance[0] < 1.6 and found.importance[1] < 0.4 * found.importance[0]
    assert found.importance[2] < 0.05


def test_what_does_not_vary_is_left_out_and_many_parameters_are_told_apart() -> None:
    random = np.random.default_rng(2)
    codes = random.integers(0, 3, (24, 10))
    codes[:, 7] = 1
    found = measured_importance([f"p{n}" for n in range(10)], codes, codes[:, 4] * 1.0, resampled=2)
    assert found.names[0] == "p4" and len(found.names) == 9 and "p7" not in found.names
    assert found.low[0] > found.high[1:].max()


def test_few_trials_or_equal_ones_say_nothing() -> None:
    codes = np.arange(12).reshape(6, 2)
    assert summarize_importance(("a", "b"), codes[:5], np.arange(5.0), "seconds") is None
    assert summarize_importance(("a", "b"), np.ones((6, 2)), np.arange(6.0), "seconds") is None
    found = summarize_importance(("a", "b"), codes, np.arange(6.0), "seconds")
    assert found is not None and found["trials"] == 6 and found["of"] == "seconds"
    assert [row["name"] for row in found["importance"]] == ["a", "b"]
