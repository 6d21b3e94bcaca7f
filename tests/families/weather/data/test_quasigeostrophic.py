"""The sample atmosphere: what it must conserve it conserves, waves move as theory says, numbers come back the same."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import sph_harm_y

from phalanx.families.weather.data.quasigeostrophic import (
    DAY,
    RADII,
    RADIUS,
    ROTATION,
    Atmosphere,
    ComplexArray,
    Float64Array,
    Harmonics,
    Physics,
    legendre_functions,
)

HARMONICS = Harmonics(21)
UNDISTURBED = Physics(np.inf, np.inf, np.inf)
"""No forcing and no dissipation."""


def mean_square(coefficients: ComplexArray) -> Float64Array:
    """Mean over the sphere of the squares of fields of these coefficients, [...]."""
    squares = np.abs(coefficients) ** 2
    return np.asarray(2 * squares.sum((-2, -1)) - squares[..., 0, :].sum(-1))


def invariants(atmosphere: Atmosphere, state: ComplexArray) -> Float64Array:
    """Mean energy in m^2/s^2, kinetic and available potential between levels; and each level's enstrophy in 1/s^2."""
    stream = atmosphere.stream_function(state)
    speeds = mean_square(np.sqrt(-HARMONICS.laplacian / RADIUS**2) * stream)
    shears = mean_square(stream[:-1] - stream[1:]) / np.square(RADII)
    energy = 0.5 * float(speeds.sum() + shears.sum())
    return np.array([energy, *mean_square(state + atmosphere._absolute)])


def random_stream(seed: int, levels: int = 3) -> ComplexArray:
    """Stream functions in m^2/s of winds of some 10 m/s with waves of all lengths."""
    generator = np.random.default_rng(seed)
    size = HARMONICS.truncation + 1
    parts = generator.standard_normal((2, levels, size, size))
    waves = np.triu(parts[0] + 1j * parts[1]) / (1 + np.arange(size)) ** 2
    waves[:, 0] = waves[:, 0].real
    waves[:, :, 0] = 0.0
    return 2e7 * waves


def test_functions_are_the_spherical_harmonics() -> None:
    coefficients = np.zeros((22, 22), dtype=complex)
    for m, n, value in ((0, 2, 0.7), (3, 5, 1 - 2j), (21, 21, 0.5j)):
        coefficients[m, n] = value
    colatitudes = np.arccos(HARMONICS.sines)[:, None]
    longitudes = np.arange(HARMONICS.columns)[None] * 2 * np.pi / HARMONICS.columns
    expected = np.zeros((HARMONICS.rows, HARMONICS.columns))
    for m, n in zip(*np.nonzero(coefficients), strict=True):
        # of mean square 1 over the sine of latitude, and without the phase (-1)^m
        harmonic = sph_harm_y(n, m, colatitudes, longitudes) * np.sqrt(4 * np.pi) * (-1) ** m
        expected += np.real(coefficients[m, n] * harmonic) * (1 if m == 0 else 2)
    np.testing.assert_allclose(HARMONICS.synthesize(coefficients), expected, atol=1e-12)
    np.testing.assert_allclose(HARMONICS.analyze(expected), coefficients, atol=1e-14)
    assert mean_square(coefficients) == pytest.approx(
        np.average((expected**2).mean(1), weights=np.polynomial.legendre.leggauss(HARMONICS.rows)[1])
    )


def test_slopes_are_derivatives() -> None:
    fine, step = np.linspace(-0.95, 0.95, 5), 1e-6
    coefficients = random_stream(1)[0]
    from_above, from_below = (
        np.einsum("mn,mnh->mh", coefficients, legendre_functions(21, fine + shift)[0]) for shift in (step, -step)
    )
    slopes = np.einsum("mn,mnh->mh", coefficients, legendre_functions(21, fine)[1])
    np.testing.assert_allclose(slopes, (1 - fine**2) * (from_above - from_below) / (2 * step), rtol=1e-6, atol=1.0)


def test_energy_and_enstrophy_stay_where_nothing_drives_or_damps() -> None:
    ground = 2000.0 * np.exp(-((HARMONICS.sines[:, None] - 0.6) ** 2) / 0.05) * np.ones(HARMONICS.columns)
    lost = []
    for step in (3600.0, 1800.0):
        atmosphere = Atmosphere(HARMONICS, UNDISTURBED, ground, step)
        state = atmosphere.vorticity_of(random_stream(2))
        before = invariants(atmosphere, state)
        later = atmosphere.advance(state, round(2 * DAY / step))
        assert not np.allclose(later, state, rtol=0.1)
        lost.append(np.abs(invariants(atmosphere, later) / before - 1))
    # What is lost is the time step's alone: it falls by 2^4 at least.
    assert (lost[0] < 2e-5).all(), lost
    assert (lost[1] < lost[0] / 16).all(), lost


@pytest.mark.parametrize(("m", "n", "spin"), [(4, 5, 0.0), (4, 5, 8e-6), (1, 2, -3e-6)])
def test_a_rossby_haurwitz_wave_moves_at_its_speed(m: int, n: int, spin: float) -> None:
    """In a rotation of `spin` rad/s, alike at all levels, it moves without change of shape (Haurwitz 1940)."""
    wave = np.zeros((3, 22, 22), dtype=complex)
    wave[:, m, n] = 2e7
    solid = np.zeros_like(wave)
    # mu is P_1^0 / sqrt(3)
    solid[:, 0, 1] = -spin * RADIUS**2 / np.sqrt(3)
    atmosphere = Atmosphere(HARMONICS, UNDISTURBED, step=3600.0)
    days = 5
    later = atmosphere.stream_function(atmosphere.advance(atmosphere.vorticity_of(wave + solid), days * 24))
    speed = spin - 2 * (ROTATION + spin) / (n * (n + 1))
    np.testing.assert_allclose(later, solid + wave * np.exp(-1j * m * speed * days * DAY), atol=2e7 * 1e-4)


def test_temperature_relaxes_and_friction_spins_down() -> None:
    physics = Physics(relaxation=20.0, friction=3.0, diffusion=np.inf)
    atmosphere = Atmosphere(HARMONICS, physics)
    # Zonal flow alike at all levels, in which nothing is advected.
    stream = atmosphere.stream_function_of(np.broadcast_to(10 * np.sqrt(1 - HARMONICS.sines**2), (3, HARMONICS.rows)))
    change = atmosphere.tendency(atmosphere.vorticity_of(stream))
    drag = -HARMONICS.laplacian / RADIUS**2 * stream[2] / (3 * DAY)
    forcing = atmosphere.vorticity_of(atmosphere.equilibrium) - HARMONICS.laplacian / RADIUS**2 * atmosphere.equilibrium
    expected = forcing / (20 * DAY)
    expected[2] += drag
    np.testing.assert_allclose(change, expected, atol=1e-4 * np.abs(expected).max())
    winds = -HARMONICS.synthesize_slope(atmosphere.equilibrium) / RADIUS / np.sqrt(1 - HARMONICS.sines[:, None] ** 2)
    assert (winds[0] - winds[1]).max() == pytest.approx(35, rel=0.01)
    latitudes = np.rad2deg(np.arcsin(HARMONICS.sines))
    jets = [latitudes[half][winds[0][half, 0].argmax()] for half in (latitudes < 0, latitudes > 0)]
    assert jets == pytest.approx([-35, 35], abs=3)


def test_diffusion_takes_the_smallest_waves_in_its_time() -> None:
    stream = np.zeros((3, 22, 22), dtype=complex)
    stream[:, 21, 21] = 1e3
    found = [
        Atmosphere(HARMONICS, Physics(np.inf, np.inf, time)).tendency(
            Atmosphere(HARMONICS, UNDISTURBED).vorticity_of(stream)
        )
        for time in (2.0, np.inf)
    ]
    state = HARMONICS.laplacian[21] / RADIUS**2 * 1e3
    np.testing.assert_allclose((found[0] - found[1])[:, 21, 21], -state / (2 * DAY), rtol=1e-9)


def test_geopotential_is_in_linear_balance() -> None:
    """Of a wind in solid rotation: f u = -d(phi)/dy, whose integral is Omega a U mu^2 but for a constant."""
    atmosphere = Atmosphere(HARMONICS, UNDISTURBED)
    speed = 25.0
    stream = atmosphere.stream_function_of(
        np.broadcast_to(speed * np.sqrt(1 - HARMONICS.sines**2), (3, HARMONICS.rows))
    )
    found = HARMONICS.synthesize(atmosphere.geopotential(stream))[1, :, 0]
    expected = -ROTATION * RADIUS * speed * (HARMONICS.sines**2 - 1 / 3)
    np.testing.assert_allclose(found, expected, atol=1e-8 * np.abs(expected).max())
