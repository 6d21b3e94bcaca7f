"""What matters most: error bars of measured trials that hold what they say, effects that can be computed by hand."""

from __future__ import annotations

import tracemalloc
from itertools import permutations, product

import numpy as np
import pytest

from phalanx.study.importance import (
    can_be_told_apart,
    interactions,
    measured_importance,
    shapley_effects,
    summarise_importance,
)

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
    assert summarise_importance(("a", "b"), codes[:5], np.arange(5.0), "seconds") is None
    assert summarise_importance(("a", "b"), np.ones((6, 2)), np.arange(6.0), "seconds") is None
    found = summarise_importance(("a", "b"), codes, np.arange(6.0), "seconds")
    assert found is not None and found["trials"] == 6 and found["of"] == "seconds"
    assert [row["name"] for row in found["importance"]] == ["a", "b"]


GRID = np.array(list(product(range(3), range(2), range(4))))


def test_of_a_sum_of_independent_parts() -> None:
    values = 3.0 * GRID[:, 0] + 1.0 * GRID[:, 1]
    effects = shapley_effects(NAMES, GRID, values)
    parts = {"a": 9 * 2 / 3, "b": 1 / 4, "c": 0.0}
    assert effects.names == ("a", "b", "c") and effects.variance == pytest.approx(sum(parts.values()))
    for name, share, alone in zip(effects.names, effects.shares, effects.alone, strict=True):
        assert share == pytest.approx(parts[name] / effects.variance, abs=1e-12)
        assert alone == pytest.approx(share, abs=1e-12)


def test_an_interaction_is_shared_by_halves() -> None:
    codes = np.array(list(product(range(2), range(2))))
    values = (codes[:, 0] == codes[:, 1]).astype(float)
    effects = shapley_effects(("a", "b"), codes, values)
    assert effects.shares.tolist() == pytest.approx([0.5, 0.5]) and effects.alone.tolist() == pytest.approx([0.0, 0.0])
    (pair,) = interactions(("a", "b"), codes, values, (2, 2))
    assert pair.share == pytest.approx(1.0) and pair.means.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_of_parameters_that_depend_on_each_other() -> None:
    """Against the definition: the mean over all orders of what each adds, on a space with holes."""
    random = np.random.default_rng(0)
    some = random.permutation(len(GRID))[:15]
    codes, values = GRID[some], random.standard_normal(15)

    def explained(known: tuple[int, ...]) -> float:
        groups: dict[tuple[int, ...], list[float]] = {}
        for row, value in zip(codes, values, strict=True):
            groups.setdefault(tuple(row[list(known)]), []).append(value)
        return sum(len(group) * (np.mean(group) - values.mean()) ** 2 for group in groups.values()) / len(values)

    wanted = np.zeros(3)
    for order in permutations(range(3)):
        for place, one in enumerate(order):
            wanted[one] += (explained(order[: place + 1]) - explained(order[:place])) / 6
    effects = shapley_effects(NAMES, codes, values)
    found = dict(zip(effects.names, effects.shares, strict=True))
    assert [found[name] for name in NAMES] == pytest.approx(wanted / values.var())
    assert effects.shares.sum() == pytest.approx(1.0)


def test_what_does_not_vary_has_no_effect() -> None:
    codes = np.concatenate([GRID, np.full((len(GRID), 1), 2)], axis=1)
    assert "d" not in shapley_effects((*NAMES, "d"), codes, GRID[:, 0] * 1.0).names


def test_subsets_of_many_parameters_are_not_all_held_at_once() -> None:
    random = np.random.default_rng(1)
    codes = np.stack([random.permutation(20_000) % 2 for _ in range(12)], axis=1)
    values = codes @ random.standard_normal(12)
    tracemalloc.start()
    effects = shapley_effects([str(number) for number in range(12)], codes, values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert effects.shares.sum() == pytest.approx(1.0)
    # 4,096 subsets of 20,000 points would take 328 MB at four bytes each.
    assert peak < 20e6


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((0, 3), False), ((10, 16), True), ((10, 17), False), ((300_000, 16), False), ((300_000, 12), True)],
)
def test_what_would_take_too_long_is_not_begun(shape: tuple[int, int], fits: bool) -> None:
    codes = np.zeros(shape, np.int64)
    codes[shape[0] // 2 :] = 1
    assert can_be_told_apart(codes) is fits
