"""Spherical harmonics in triangular truncation: fields on a grid to coefficients and back, with derivatives.

A real field is sum over m and n of c[m, n] P_n^m(mu) exp(i m lambda), for m >= 0 with the conjugate added, where mu is the
sine of latitude and P are the associated Legendre functions with a mean square of 1 over mu. Coefficients are complex
[..., M, N] with zeros where n < m. On the Gaussian grid, products of two such fields are analysed without aliasing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
ComplexArray = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class Harmonics:
    """Spherical harmonics up to total wavenumber `truncation`."""

    truncation: int

    @property
    def columns(self) -> int:
        """Longitudes of the Gaussian grid, at least 3 T + 1 and a multiple of 16."""
        return -(-(3 * self.truncation + 1) // 16) * 16

    @property
    def rows(self) -> int:
        """Latitudes of the Gaussian grid, at least (3 T + 1) / 2."""
        return self.columns // 2

    @cached_property
    def _quadrature(self) -> tuple[Float64Array, Float64Array]:
        points, weights = np.polynomial.legendre.leggauss(self.rows)
        return points, weights

    @property
    def sines(self) -> Float64Array:
        """[H]: sines of the latitudes of the Gaussian grid, south to north."""
        return self._quadrature[0]

    @cached_property
    def zonal(self) -> Float64Array:
        """[M, 1]: m of each coefficient."""
        return np.arange(self.truncation + 1, dtype=np.float64)[:, None]

    @cached_property
    def laplacian(self) -> Float64Array:
        """[N]: what the Laplacian on the unit sphere multiplies coefficients by, -n (n + 1)."""
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
        weighted = 0.5 * self._legendre[0] * self._quadrature[1]
        # [M, ..., H] times [M, H, N]
        found = np.matmul(np.moveaxis(waves, -1, 0).reshape(len(weighted), -1, self.rows), weighted.transpose(0, 2, 1))
        return np.moveaxis(found.reshape(-1, *fields.shape[:-2], self.truncation + 1), 0, -2)

    def mean_square(self, coefficients: ComplexArray) -> Float64Array:
        """Return the mean over the sphere of the squares of fields of these coefficients, [...]."""
        squares = np.abs(coefficients) ** 2
        return np.asarray(2 * squares.sum((-2, -1)) - squares[..., 0, :].sum(-1))


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
