"""Calibrated uncertainties hold what they say on data they were not fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.ensemble.error_calibration import (
    KINDS,
    Calibration,
    calibrate_residuals,
    conformal_part,
    conformal_quantile,
    fit_calibration,
)
from phalanx.ensemble.residuals import Residuals
from phalanx.ensemble.scores import interval_coverages, normal_nll
from phalanx.errors import DataError


def members(
    seed: int, structures: int = 400, *, common: float = 2.0, floor: float = 0.0, tails: float | None = None
) -> Residuals:
    """Five members whose common error is `common` times what they differ by, six numbers a structure."""
    draw = np.random.default_rng(seed)
    count = 6 * structures
    size_n = np.repeat(np.exp(draw.normal(0.0, 0.7, structures)), 6)
    shape_n = draw.normal(size=count) if tails is None else draw.standard_t(tails, count)
    shared_n = common * size_n * shape_n + floor * draw.normal(size=count)
    errors = shared_n + size_n * draw.normal(size=(5, count))
    return Residuals("toy", "forces", "eV/A", True, errors.astype(np.float32), np.repeat(np.arange(structures), 6))


WEIGHTS = [0.2] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_normal_intervals_hold_on_new_data(kind: str) -> None:
    fitted = calibrate_residuals(members(1), WEIGHTS, kind)  # type: ignore[arg-type]
    error_n, spread_n = members(2).combined(WEIGHTS)
    raw = interval_coverages(error_n, spread_n, [0.9])[0]
    half, most = interval_coverages(error_n, fitted.calibration.std(spread_n), (0.5, 0.9))
    assert raw < 0.75 and 0.85 < most < 0.95
    # five members tell their spread roughly, so that errors in its unit have heavier tails than a normal distribution
    assert 0.48 < half < 0.65


def test_factor_is_the_likeliest_one() -> None:
    error_n, spread_n = members(3).combined(WEIGHTS)
    found = fit_calibration("factor", error_n, spread_n)
    best = normal_nll(error_n, found.std(spread_n)).mean()
    for change in (0.98, 1.02):
        other = found.model_copy(update={"factor": change * found.factor})
        assert normal_nll(error_n, other.std(spread_n)).mean() > best


def test_floor_finds_what_all_members_err_alike_in() -> None:
    draw = np.random.default_rng(4)
    spread_n = np.exp(draw.normal(0.0, 1.0, 40_000))
    error_n = 1.5 * spread_n * draw.normal(size=40_000) + 0.7 * draw.normal(size=40_000)
    found = fit_calibration("floor", error_n, spread_n)
    assert found.factor == pytest.approx(1.5, rel=0.03)
    assert found.floor == pytest.approx(0.7, rel=0.03)


def test_isotonic_never_falls_and_grows_beyond_what_was_seen() -> None:
    error_n, spread_n = members(5).combined(WEIGHTS)
    found = fit_calibration("isotonic", error_n, spread_n)
    seen = found.std(np.linspace(0.0, spread_n.max(), 500))
    assert (np.diff(seen) >= -1e-12).all() and seen.min() > 0.0
    last = found.spreads[-1]
    far, at_last = found.std(np.array([3.0 * last, last]))
    assert far == pytest.approx(3.0 * at_last)


def test_the_kind_is_the_likeliest_on_held_out_structures() -> None:
    draw = np.random.default_rng(6)
    spread_n = np.exp(draw.normal(0.0, 1.0, 6000))
    # errors that hardly depend on the spread: a factor alone is far off
    error_n = (1.0 + 0.05 * spread_n) * draw.normal(size=6000)
    base = np.stack([error_n - spread_n / np.sqrt(2.0), error_n + spread_n / np.sqrt(2.0)]).astype(np.float32)
    rows = Residuals("toy", "energy", "eV/atom", True, base, np.arange(6000))
    fitted = calibrate_residuals(rows, [0.5, 0.5])
    assert fitted.calibration.kind != "factor"
    assert fitted.held_out_nll[fitted.calibration.kind] == min(fitted.held_out_nll[kind] for kind in KINDS)
    assert fitted.held_out_nll["factor"] > fitted.held_out_nll["floor"] + 0.1


def test_members_that_agree_by_chance_claim_no_certainty() -> None:
    error_n, spread_n = np.array([1.0, -1.0, 0.5, 2.0] * 30), np.array([0.0, 1.0, 2.0, 0.0] * 30)
    for kind in KINDS:
        found = fit_calibration(kind, error_n, spread_n)
        assert found.std(np.zeros(1))[0] > 0.0
        assert np.isfinite(normal_nll(error_n, found.std(spread_n))).all()
    nothing = fit_calibration("floor", np.zeros(20), np.zeros(20))
    assert np.isfinite(nothing.std(np.zeros(3))).all()


def test_split_conformal_quantile_by_hand() -> None:
    scores = np.arange(1.0, 20.0)  # 19 structures with one number: the 18th of 20 places holds 90%
    assert conformal_quantile(scores, np.arange(19), 0.9) == 18.0
    assert conformal_quantile(scores, np.arange(19), 0.95) == 19.0
    assert conformal_quantile(scores, np.arange(19), 0.96) is None
    # two structures: 1/3 each, so half of the weight is passed within the second one's four numbers
    assert conformal_quantile(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0, 1, 1, 1, 1]), 0.5) == 3.0


@pytest.mark.parametrize("tails", [None, 3.0])
def test_conformal_intervals_hold_whatever_the_errors_are(tails: float | None) -> None:
    """Over many draws of few structures the mean share inside is what was promised, or a little more."""
    shares = []
    for seed in range(40):
        rows = members(100 + seed, 60, tails=tails)
        fitted = calibrate_residuals(rows, WEIGHTS, "factor")
        error_n, spread_n = members(900 + seed, 60, tails=tails).combined(WEIGHTS)
        half_n = fitted.conformal.half_widths(spread_n, 0.9)
        assert half_n is not None
        shares.append((np.abs(error_n) <= half_n).mean())
    calibrating = 30
    assert 0.9 - 0.01 < np.mean(shares) < 0.9 + 1.0 / (calibrating + 1) + 0.02


def test_quantiles_come_from_structures_that_nothing_was_fitted_to() -> None:
    rows = members(7, 200)
    first_n = conformal_part(rows.structures_n)
    assert 0.35 < first_n.mean() < 0.65
    other = members(8, 200).errors_Mn
    changed = Residuals("toy", "forces", "eV/A", True, np.where(first_n, other, rows.errors_Mn), rows.structures_n)
    a, b = calibrate_residuals(rows, WEIGHTS, "floor"), calibrate_residuals(changed, WEIGHTS, "floor")
    assert a.conformal.calibration == b.conformal.calibration
    assert a.conformal.quantiles != b.conformal.quantiles
    assert a.calibration != b.calibration


def test_too_few_structures_are_refused() -> None:
    with pytest.raises(DataError, match=r"validation split has 9 structures with toy forces.*at least 10"):
        calibrate_residuals(members(1, 9), WEIGHTS)


def test_calibration_survives_being_written() -> None:
    error_n, spread_n = members(9).combined(WEIGHTS)
    for kind in KINDS:
        found = fit_calibration(kind, error_n, spread_n)
        back = Calibration.model_validate_json(found.model_dump_json())
        np.testing.assert_array_equal(back.std(spread_n), found.std(spread_n))
