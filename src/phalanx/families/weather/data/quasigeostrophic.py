"""A global quasi-geostrophic atmosphere of three levels, after Marshall and Molteni (1993), on spherical harmonics.

    dq_i/dt = -J(psi_i, q_i) + forcing - dissipation        at 200, 500 and 800 hPa
    q = laplacian(psi) + S psi + f (+ f h / H0 at 800 hPa)

S couples neighbouring levels by their Rossby radii of deformation. The published model takes its forcing from analyses;
here temperature relaxes to a state with a westerly jet in both hemispheres, the same all year, whose
baroclinic instability makes the weather. Without forcing and dissipation, energy and each level's potential enstrophy stay.

A real field is sum over m and n of c[m, n] P_n^m(mu) exp(i m lambda), for m >= 0 with the conjugate added, where mu is the
sine of latitude and P are the associated Legendre functions with a mean square of 1 over mu. Coefficients are complex
[..., M, N] with zeros where n < m. On the Gaussian grid, products of two such fields are analysed without aliasing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

RADIUS = 6.371e6
"""Radius of the Earth, in m."""
ROTATION = 7.292e-5
"""Angular velocity of the Earth, in rad/s."""
LEVELS = (200, 500, 800)
"""Pressure of the levels in hPa, from the top."""
DAY = 86400.0
"""Seconds of a day."""
RADII = (700e3, 450e3)
"""Rossby radii of deformation between neighbouring levels, in m (Marshall and Molteni 1993)."""
_SCALE_HEIGHT = 9e3
"""Height in m that orography is divided by (H0 of the equation above)."""
Float64Array = npt.NDArray[np.float64]
ComplexArray = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class Physics:
    """Forcing and damping of the flow. Times in days; infinite ones leave the process out."""

    relaxation: float = 20.0
    """Time in which temperature relaxes to the equilibrium."""
    friction: float = 3.0
    """Time in which the flow at 800 hPa spins down."""
    diffusion: float = 2.0
    """Time in which the smallest waves lose potential vorticity; longer ones by the fourth power of the Laplacian."""
    shears: tuple[float, float] = (35.0, 35.0)
    """Largest difference in m/s between the equilibrium's westerlies of neighbouring levels."""


@dataclass(frozen=True)
class Atmosphere:
    """The model. States are potential vorticity without f and orography in 1/s, complex [3, M, N]."""

    harmonics: Harmonics
    physics: Physics = Physics()
    orography: Float64Array | float = 0.0
    """Height in m on the Gaussian grid [H, W]."""
    step: float = 5400.0
    """Seconds of one Runge-Kutta step."""
    _absolute: ComplexArray = field(init=False)
    """Planetary vorticity and, at the lowest level, the effect of orography [3, M, N]."""

    def __post_init__(self) -> None:
        planetary = np.broadcast_to(
            2 * ROTATION * self.harmonics.sines[:, None], (self.harmonics.rows, self.harmonics.columns)
        )
        ground = planetary * (self.orography / _SCALE_HEIGHT)
        fields = np.stack([planetary, planetary, planetary + ground])
        # Set behind the back of the frozen class: it follows from the other fields.
        object.__setattr__(self, "_absolute", self.harmonics.analyze(fields))

    @cached_property
    def _coupling(self) -> Float64Array:
        """Return S of the module's equation [3, 3], in 1/m^2."""
        upper, lower = (radius**-2 for radius in RADII)
        return np.array([[-upper, upper, 0.0], [upper, -upper - lower, lower], [0.0, lower, -lower]])

    @cached_property
    def _inverse(self) -> Float64Array:
        """Return the matrices that turn potential vorticity into stream function, [N, 3, 3]; the mean of both is 0."""
        # From n = 1 on: for n = 0 the operator has no inverse.
        operators = self.harmonics.laplacian[1:, None, None] / RADIUS**2 * np.eye(3) + self._coupling
        return np.concatenate([np.zeros((1, 3, 3)), np.linalg.inv(operators)])

    @cached_property
    def equilibrium(self) -> ComplexArray:
        """Return the stream function that temperature relaxes to, [3, M, N]."""
        sines = self.harmonics.sines
        cosines = np.sqrt(1 - sines**2)
        upper, lower = self.physics.shears
        # One where it is largest, at 35 degrees.
        jets = 27 / 4 * sines**2 * cosines**4
        winds = np.array([upper + lower, lower, 0.0])[:, None] * jets
        return self.stream_function_of(winds)

    def stream_function_of(self, winds: Float64Array) -> ComplexArray:
        """Return the stream function [3, M, N] of westerly winds [3, H] in m/s that depend on latitude alone."""
        cosines = np.sqrt(1 - self.harmonics.sines**2)
        fields = np.broadcast_to((winds * cosines)[..., None], (*winds.shape, self.harmonics.columns))
        momentum = self.harmonics.analyze(fields)
        # Vorticity is minus the slope of u cos(latitude) by mu.
        slope = self.harmonics.synthesize_slope(momentum) / (1 - self.harmonics.sines[:, None] ** 2)
        return self._inverse_laplacian(self.harmonics.analyze(-slope / RADIUS))

    def _inverse_laplacian(self, coefficients: ComplexArray) -> ComplexArray:
        # A constant has no Laplacian: n = 0 stays 0.
        factors = np.zeros(self.harmonics.truncation + 1)
        factors[1:] = RADIUS**2 / self.harmonics.laplacian[1:]
        return coefficients * factors

    def vorticity_of(self, stream: ComplexArray) -> ComplexArray:
        """Return the potential vorticity, the model's state, of a stream function in m^2/s; both [3, M, N]."""
        return self.harmonics.laplacian / RADIUS**2 * stream + np.tensordot(self._coupling, stream, 1)

    def stream_function(self, state: ComplexArray) -> ComplexArray:
        """Return the stream function in m^2/s [3, M, N]."""
        stream: ComplexArray = np.einsum("nij,jmn->imn", self._inverse, state)
        return stream

    def tendency(self, state: ComplexArray) -> ComplexArray:
        """Return the time derivative of a state."""
        stream = self.stream_function(state)
        # Both fields at once: transforms are most of the work.
        both = np.stack([stream, state + self._absolute])
        eastward = self.harmonics.synthesize(1j * self.harmonics.zonal * both)
        northward = self.harmonics.synthesize_slope(both)
        jacobian = eastward[0] * northward[1] - northward[0] * eastward[1]
        area = RADIUS**2 * (1 - self.harmonics.sines[:, None] ** 2)
        change: ComplexArray = -self.harmonics.analyze(jacobian / area)
        relaxation = 1 / (self.physics.relaxation * DAY)
        change -= relaxation * np.tensordot(self._coupling, stream - self.equilibrium, 1)
        # Friction of the ground acts on the lowest level alone.
        change[2] -= self.harmonics.laplacian / RADIUS**2 * stream[2] / (self.physics.friction * DAY)
        # A high power of the Laplacian damps the smallest waves, where enstrophy gathers, and leaves weather alone.
        scale = (self.harmonics.laplacian / self.harmonics.laplacian[-1]) ** 4
        change -= scale / (self.physics.diffusion * DAY) * state
        return change

    def advance(self, state: ComplexArray, steps: int) -> ComplexArray:
        """Return the state `steps` steps later, by the classical Runge-Kutta method of fourth order."""
        for _ in range(steps):
            first = self.tendency(state)
            second = self.tendency(state + 0.5 * self.step * first)
            third = self.tendency(state + 0.5 * self.step * second)
            fourth = self.tendency(state + self.step * third)
            state = state + self.step / 6 * (first + 2 * second + 2 * third + fourth)
        return state

    def geopotential(self, stream: ComplexArray) -> ComplexArray:
        """Return the deviation of geopotential from its mean, in m^2/s^2, by the linear balance [3, M, N].

        Its Laplacian is the divergence of f times the gradient of the stream function, f zeta + grad f . grad psi.
        """
        planetary = 2 * ROTATION * self.harmonics.sines[:, None]
        vorticity = self.harmonics.synthesize(self.harmonics.laplacian / RADIUS**2 * stream)
        slope = self.harmonics.synthesize_slope(stream)
        return self._inverse_laplacian(self.harmonics.analyze(planetary * vorticity + 2 * ROTATION / RADIUS**2 * slope))


@dataclass(frozen=True)
class Harmonics:
    """Spherical harmonics up to total wavenumber `truncation`."""

    truncation: int

    @property
    def columns(self) -> int:
        """Return the number of longitudes of the Gaussian grid, at least 3 T + 1 and a multiple of 16."""
        return -(-(3 * self.truncation + 1) // 16) * 16

    @property
    def rows(self) -> int:
        """Return the number of latitudes of the Gaussian grid, at least (3 T + 1) / 2."""
        return self.columns // 2

    @cached_property
    def _quadrature(self) -> tuple[Float64Array, Float64Array]:
        points, weights = np.polynomial.legendre.leggauss(self.rows)
        return points, weights

    @property
    def sines(self) -> Float64Array:
        """Return the sines of the latitudes of the Gaussian grid, south to north, [H]."""
        return self._quadrature[0]

    @cached_property
    def zonal(self) -> Float64Array:
        """Return m of each coefficient, [M, 1]."""
        return np.arange(self.truncation + 1, dtype=np.float64)[:, None]

    @cached_property
    def laplacian(self) -> Float64Array:
        """Return the eigenvalues of the Laplacian on the unit sphere, -n (n + 1), [N]."""
        total = np.arange(self.truncation + 1, dtype=np.float64)
        return -total * (total + 1)

    @cached_property
    def _legendre(self) -> tuple[Float64Array, Float64Array]:
        return legendre_functions(self.truncation, self.sines)

    def synthesize(self, coefficients: ComplexArray) -> Float64Array:
        """Return the fields [..., H, W] of coefficients [..., M, N] on the Gaussian grid."""
        return to_grid(coefficients, self._legendre[0], self.columns)

    def synthesize_slope(self, coefficients: ComplexArray) -> Float64Array:
        """Return (1 - mu^2) times the derivative by mu on the Gaussian grid, [..., H, W]."""
        return to_grid(coefficients, self._legendre[1], self.columns)

    def analyze(self, fields: Float64Array) -> ComplexArray:
        """Return the coefficients [..., M, N] of fields [..., H, W] on the Gaussian grid."""
        waves = np.fft.rfft(fields, axis=-1, norm="forward")[..., : self.truncation + 1]
        # Gaussian quadrature over latitude is exact for products of two truncated fields.
        weighted = 0.5 * self._legendre[0] * self._quadrature[1]
        # [M, ..., H] times [M, H, N]
        found = np.matmul(np.moveaxis(waves, -1, 0).reshape(len(weighted), -1, self.rows), weighted.transpose(0, 2, 1))
        return np.moveaxis(found.reshape(-1, *fields.shape[:-2], self.truncation + 1), 0, -2)


def legendre_functions(truncation: int, sines: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return P_n^m and (1 - mu^2) dP_n^m / dmu at sines [H], each [M, N, H]; zero where n < m."""
    size = truncation + 1
    # One more degree than is kept: the slope of P_n needs P_{n+1}.
    values = np.zeros((size, size + 1, len(sines)))
    m, n = np.meshgrid(np.arange(size), np.arange(size + 1), indexing="ij")
    step = np.sqrt(np.maximum(n**2 - m**2, 0) / np.maximum(4.0 * n**2 - 1, 1))
    cosines = np.sqrt(1 - sines**2)
    for order in range(size):
        values[order, order] = (
            1.0 if order == 0 else np.sqrt((2 * order + 1) / (2 * order)) * cosines * values[order - 1, order - 1]
        )
        for degree in range(order + 1, size + 1):
            before = step[order, degree - 1] * values[order, degree - 2] if degree > order + 1 else 0.0
            values[order, degree] = (sines * values[order, degree - 1] - before) / step[order, degree]
    lower = np.concatenate([np.zeros((size, 1, len(sines))), values[:, : size - 1]], axis=1)
    scale = n[..., None].astype(np.float64)
    slopes = (scale[:, :size] + 1) * step[:, :size, None] * lower - scale[:, :size] * step[:, 1:, None] * values[:, 1:]
    return values[:, :size], slopes


def to_grid(coefficients: ComplexArray, functions: Float64Array, columns: int) -> Float64Array:
    """Return fields [..., H, W] of coefficients [..., M, N] by Legendre functions [M, N, H] at the grid's latitudes."""
    size = len(functions)
    waves = np.matmul(np.moveaxis(coefficients, -2, 0).reshape(size, -1, size), functions)
    waves = np.moveaxis(waves.reshape(size, *coefficients.shape[:-2], -1), 0, -1)
    return np.fft.irfft(waves, n=columns, axis=-1, norm="forward")
