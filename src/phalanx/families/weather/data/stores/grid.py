"""Latitude-longitude grids: one orientation for all fields, and the exact area of every cell.

Fields run from south to north and eastward, whatever the order in the file: files of the other order are turned while
they are read. A global grid begins at its first longitude from Greenwich, a regional one where the file begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_TOLERANCE = 1e-3
"""Degrees by which the coordinates of equal grids may differ: files keep them in single precision."""


@dataclass(frozen=True)
class Grid:
    """Cell centres in degrees."""

    latitudes: Float64Array
    """[H], south to north."""
    longitudes: Float64Array
    """[W], eastward, without a jump at the date line or at Greenwich; the first is in [0, 360)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.latitudes), len(self.longitudes)

    @property
    def wraps(self) -> bool:
        """Whether the last column is the western neighbour of the first."""
        columns = len(self.longitudes)
        if columns < 2:
            return False
        step = (self.longitudes[-1] - self.longitudes[0]) / (columns - 1)
        # Rounded coordinates may come short of the whole circle, but not by a column.
        return bool(abs(step * columns - 360) < min(360 * _TOLERANCE, step / 2))

    def difference(self, other: Grid) -> str | None:
        """The first way in which `other` is another grid, in words; None where it is the same."""
        if self.shape != other.shape:
            return f"{other.shape[0]} x {other.shape[1]} points instead of {self.shape[0]} x {self.shape[1]}"
        pairs = (("latitude", self.latitudes, other.latitudes), ("longitude", self.longitudes, other.longitudes))
        for name, mine, theirs in pairs:
            far = np.flatnonzero(np.abs(mine - theirs) > _TOLERANCE)
            if far.size:
                index = int(far[0])
                return f"{name} {index} is {theirs[index]:g} instead of {mine[index]:g}"
        return None

    def area_weights(self) -> Float64Array:
        """Areas of the cells [H, W] divided by their mean.

        A cell reaches half-way to its neighbours and its area is the difference of the sines of its latitude bounds
        times its width, so it is exact and positive at the poles too (WeatherBench 2, Rasp et al. 2024, section 3.1).
        The outermost cells of a grid end at the pole where that is less than a whole cell from their centres, else as
        far out as they reach in.
        """
        heights = np.diff(np.sin(np.deg2rad(_latitude_bounds(self.latitudes))))
        widths = np.gradient(self.longitudes) if len(self.longitudes) > 1 else np.ones(1)
        areas = heights[:, None] * widths[None, :]
        weights: Float64Array = areas / areas.mean()
        return weights


def _latitude_bounds(centres: Float64Array) -> Float64Array:
    if len(centres) == 1:
        return np.array([-90.0, 90.0])
    inner = (centres[:-1] + centres[1:]) / 2
    south, north = centres[1] - centres[0], centres[-1] - centres[-2]
    # Rounding of the coordinates must not decide, hence the hundredth.
    first = -90.0 if centres[0] - 1.01 * south <= -90.0 else centres[0] - south / 2
    last = 90.0 if centres[-1] + 1.01 * north >= 90.0 else centres[-1] + north / 2
    return np.concatenate([[first], inner, [last]])


@dataclass(frozen=True)
class Orientation:
    """How a field of a file is turned into one of its `Grid`."""

    flip: bool
    """Whether the file runs from north to south."""
    roll: int
    """Columns by which the file begins west of the grid."""

    def apply(self, fields: Float32Array) -> Float32Array:
        """Turn fields [..., H, W]."""
        if self.flip:
            fields = fields[..., ::-1, :]
        if self.roll:
            fields = np.roll(fields, -self.roll, axis=-1)
        return fields


def orient(latitudes: Float64Array, longitudes: Float64Array, where: str) -> tuple[Grid, Orientation]:
    """The grid of a file from its coordinates in degrees, in their order in the file, and how to get there.

    where: names the file in messages. Raises DataError for coordinates that are no latitude-longitude grid.
    """
    for name, values in (("latitude", latitudes), ("longitude", longitudes)):
        if values.ndim != 1 or not values.size or not np.isfinite(values).all():
            raise DataError(f"{where}: {name} of shape {values.shape} is not a list of finite degrees; regrid the file")
    steps = np.diff(latitudes)
    if np.abs(latitudes).max() > 90 + _TOLERANCE or not ((steps > 0).all() or (steps < 0).all()):
        raise DataError(
            f"{where}: latitudes from {latitudes[0]:g} to {latitudes[-1]:g} do not run steadily from one pole to the other"
        )
    eastward = np.mod(np.diff(longitudes), 360.0)
    if (eastward == 0).any() or eastward.sum() > 360 - _TOLERANCE:
        raise DataError(
            f"{where}: longitudes from {longitudes[0]:g} to {longitudes[-1]:g} do not run steadily eastward"
        )
    flip = bool(len(latitudes) > 1 and latitudes[0] > latitudes[-1])
    start = np.mod(longitudes[0], 360.0)
    grid = Grid(latitudes[::-1] if flip else latitudes, np.concatenate([[start], start + np.cumsum(eastward)]))
    if not grid.wraps:
        return grid, Orientation(flip, 0)
    roll = int(np.argmin(np.mod(longitudes + _TOLERANCE, 360.0)))
    rolled = np.roll(np.mod(longitudes + _TOLERANCE, 360.0) - _TOLERANCE, -roll)
    return Grid(grid.latitudes, rolled), Orientation(flip, roll)
