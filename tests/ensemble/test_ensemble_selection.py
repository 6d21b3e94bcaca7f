"""Choosing members: by the error of their mean, of which disagreement is a part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from phalanx.ensemble.residuals import Residuals, assign_parts
from phalanx.ensemble.select_members import best_by_score, choose_members, fit_weights, relative_products
from phalanx.errors import ConfigError, DataError


def residuals(errors_Mn: np.ndarray, *, learned: bool = True) -> Residuals:
    return Residuals(
        "toy", "energy", "eV/atom", learned, errors_Mn.astype(np.float32), np.arange(errors_Mn.shape[1]) // 3
    )


def twins_and_a_stranger() -> np.ndarray:
    """Two candidates that err alike, and two, a little worse, that err in ways of their own."""
    draw = np.random.default_rng(0)
    shared, own, other, noise = draw.normal(size=(4, 4000))
    return np.stack([shared, shared + 0.1 * noise, 1.2 * own, 1.5 * other])


def test_diversity_counts_and_score_alone_takes_twins() -> None:
    rows = residuals(twins_and_a_stranger())
    products = relative_products([rows])
    assert best_by_score(products, [None] * 4, 2).members == (0, 1)
    assert choose_members(products, 2, diversity=0.0).members == (0, 1)
    chosen = choose_members(products, 2)
    assert chosen.members == (0, 2)
    mean = rows.combined([0.5, 0.0, 0.5, 0.0])[0]
    alone = np.sqrt(np.square(rows.errors_Mn[0].astype(float)).mean())
    assert chosen.errors[-1] == pytest.approx(np.sqrt(np.square(mean).mean()) / alone, rel=1e-6)
    assert chosen.errors[-1] < 0.85 < best_by_score(products, [None] * 4, 2).errors[-1]


def test_scores_of_a_study_decide_what_is_best_by_score() -> None:
    products = relative_products([residuals(twins_and_a_stranger())])
    assert best_by_score(products, [3.0, 2.0, 1.0, 4.0], 2).members == (2, 1)


def test_greedy_choice_is_nearly_the_best_of_all_subsets() -> None:
    draw = np.random.default_rng(5)
    for _ in range(5):
        errors = draw.normal(size=(7, 3)) @ draw.normal(size=(3, 300)) + draw.normal(size=(7, 300))
        products = relative_products([residuals(errors)])
        every = [products[np.ix_(some, some)].mean() for some in map(list, itertools.combinations(range(7), 3))]
        assert min(every) - 1e-12 <= choose_members(products, 3).errors[-1] ** 2 <= 1.4 * min(every)


def test_fitted_weights_come_close_to_the_best_ones() -> None:
    errors = np.random.default_rng(2).normal(size=(3, 20_000)) * np.array([[1.0], [2.0], [4.0]])
    chosen = fit_weights(
        relative_products([residuals(errors)]), choose_members(relative_products([residuals(errors)]), 3)
    )
    # of errors that know nothing of each other the weights go as one over the variance
    expected = dict(zip((0, 1, 2), np.array([16.0, 4.0, 1.0]) / 21.0, strict=True))
    assert sum(chosen.weights) == pytest.approx(1.0)
    for member, weight in zip(chosen.members, chosen.weights, strict=True):
        assert weight == pytest.approx(expected[member], abs=0.02)


def test_kinds_of_numbers_weigh_alike_and_only_what_was_learned() -> None:
    small, large = np.array([[1.0, 1.0], [2.0, 2.0]]), 1e3 * np.array([[3.0, 3.0], [1.0, 1.0]])
    products = relative_products([residuals(small), residuals(large), residuals(large, learned=False)])
    np.testing.assert_allclose(np.diag(products), [(1 + 9) / 2, (4 + 1) / 2])
    with pytest.raises(DataError, match="no label of anything that the members learned"):
        relative_products([residuals(large, learned=False)])


def test_more_members_than_candidates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--top 3: there are only 2 candidates; give at most 2"):
        choose_members(np.eye(2), 3)


def test_spread_is_the_unbiased_one_and_weights_count() -> None:
    errors = np.random.default_rng(1).normal(size=(5, 50))
    rows = residuals(errors)
    mean, spread = rows.combined([0.2] * 5)
    np.testing.assert_allclose(mean, errors.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(spread, errors.std(axis=0, ddof=1), rtol=1e-5)
    mean, spread = rows.combined([0.0, 0.5, 0.5, 0.0, 0.0])
    np.testing.assert_allclose(spread, errors[1:3].std(axis=0, ddof=1), rtol=1e-4)
    assert not rows.of_members([3]).combined([1.0])[1].any()


def test_parts_depend_on_the_structure_alone() -> None:
    whole = assign_parts(np.arange(4000), 4, "some")
    np.testing.assert_array_equal(assign_parts(np.arange(1000, 2000), 4, "some"), whole[1000:2000])
    assert np.bincount(whole, minlength=4).min() > 900
    assert (whole != assign_parts(np.arange(4000), 4, "other")).mean() > 0.5
