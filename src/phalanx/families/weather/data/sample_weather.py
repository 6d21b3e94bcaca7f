"""Sample weather: days of the quasi-geostrophic atmosphere as one netCDF file that a run reads.

On the 5.625 degree grid of ClimaX and WeatherBench, with idealised mountains where Tibet and the Rocky Mountains are. The
year has no seasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xarray

from phalanx.counter_random import stream_key, uniform_values
from phalanx.data.prepared_folder import Progress, SampleManifest, write_sample
from phalanx.families.weather.data import require_package
from phalanx.families.weather.data.quasigeostrophic import (
    LEVELS,
    RADIUS,
    Atmosphere,
    ComplexArray,
    Float64Array,
    Harmonics,
    Physics,
    legendre_functions,
    to_grid,
)

FILE = "weather.nc"
TRUNCATION = 21
LATITUDES = np.arange(-87.1875, 90.0, 5.625)
LONGITUDES = np.arange(0.0, 360.0, 5.625)
FRAME_HOURS = 12
SPIN_UP_DAYS = 60
PHYSICS = Physics(relaxation=25.0, friction=2.0, diffusion=1.0, shears=(24.0, 18.0))
"""Forcing and damping that make jets of 40 m/s, and weather that persistence forecasts worse than climatology after two
days."""
MOUNTAINS = ((35.0, 88.0, 4000.0, 12.0, 20.0), (42.0, 252.0, 2000.0, 14.0, 12.0))
"""Mountains: latitude, longitude, height in m, and half widths in degrees from south to north and from west to east."""
_MEAN_GEOPOTENTIAL = {200: 115700.0, 500: 54600.0, 800: 19100.0}
"""Geopotential of the standard atmosphere by level in hPa, in m^2/s^2."""
_GAS = 287.05
"""Gas constant of dry air, in J/(kg K)."""
_KINDS = {"geopotential": ("m2 s-2", 2.0), "temperature": ("K", 0.02), "u_component": ("m s-1", 0.05)}
_KINDS["v_component"] = _KINDS["u_component"]
"""Unit of the variables whose names begin so, and the step that their numbers are rounded to in the file."""


def write_weather(
    folder: Path,
    *,
    days: int,
    seed: int = 0,
    spin_up_days: int = SPIN_UP_DAYS,
    progress: Progress = lambda what, done, total: None,
) -> SampleManifest:
    """Simulate `days` after a spin-up, write them into `folder` and return its record; the file appears when it is whole.

    The same seed gives the same bytes on the same machine. Raises DataError where it is already there or cannot be written.
    """
    require_package("netCDF4", "sample weather needs")

    def make(target: Path) -> None:
        simulate_weather(days, seed, spin_up_days, progress).to_netcdf(target / FILE, engine="netcdf4")

    return write_sample(folder, "weather", seed, (FILE,), make)


def simulate_weather(
    days: int,
    seed: int,
    spin_up_days: int = SPIN_UP_DAYS,
    progress: Progress = lambda what, done, total: None,
) -> xarray.Dataset:
    """Return frames every 12 hours of `days`, with their packing; the same numbers for the same seed."""
    harmonics = Harmonics(TRUNCATION)
    latitudes = np.rad2deg(np.arcsin(harmonics.sines))
    longitudes = np.arange(harmonics.columns) * 360 / harmonics.columns
    atmosphere = Atmosphere(harmonics, PHYSICS, mountain_heights(latitudes, longitudes))
    steps = round(FRAME_HOURS * 3600 / atmosphere.step)
    frames, skipped = days * 24 // FRAME_HOURS, spin_up_days * 24 // FRAME_HOURS
    state = disturbed_state(atmosphere, seed)
    found: list[dict[str, Float64Array]] = []
    grid = OutputGrid.of(LATITUDES, len(LONGITUDES))
    # The first weeks still remember the artificial start; they are simulated and left out.
    for frame in range(-skipped, frames):
        if frame >= 0:
            found.append(grid.fields_of(atmosphere, state))
        state = atmosphere.advance(state, steps)
        progress("simulating weather", skipped + frame + 1, skipped + frames)
    return _build_dataset(found)


def mountain_heights(latitudes: Float64Array, longitudes: Float64Array) -> Float64Array:
    """Return the height of the ground in m, [H, W]."""
    height = np.zeros((len(latitudes), len(longitudes)))
    for latitude, longitude, top, tall, wide in MOUNTAINS:
        # Degrees to the east, the short way round.
        east = (longitudes - longitude + 180) % 360 - 180
        height += top * np.exp(-(((latitudes[:, None] - latitude) / tall) ** 2) - (east / wide) ** 2)
    return height


def disturbed_state(atmosphere: Atmosphere, seed: int) -> ComplexArray:
    """Return a weak flow of the kind that temperature relaxes to, with random waves that break its symmetry."""
    size = atmosphere.harmonics.truncation + 1
    drawn = uniform_values(stream_key("sample weather", str(seed)), torch.arange(2 * size * size)).double().numpy()
    parts = drawn.reshape(2, size, size) - 0.5
    waves = np.triu(parts[0] + 1j * parts[1]) / (1 + np.arange(size)) ** 2
    waves[0] = 0.0
    return atmosphere.vorticity_of(0.5 * atmosphere.equilibrium + 1e6 * waves)


@dataclass(frozen=True)
class OutputGrid:
    """The grid of a file, at whose points states are evaluated."""

    latitudes: Float64Array
    """[H], without the poles."""
    columns: int
    values: Float64Array
    """Legendre functions [M, N, H]."""
    slopes: Float64Array
    """(1 - mu^2) times their derivative by the sine of latitude [M, N, H]."""

    @classmethod
    def of(cls, latitudes: Float64Array, columns: int) -> Self:
        """Return the grid of these latitudes in degrees, [H], with so many columns from Greenwich."""
        return cls(latitudes, columns, *legendre_functions(TRUNCATION, np.sin(np.deg2rad(latitudes))))

    def fields_of(self, atmosphere: Atmosphere, state: ComplexArray) -> dict[str, Float64Array]:
        """Return all variables of a state, each [H, W]."""
        stream = atmosphere.stream_function(state)
        metric = RADIUS * np.cos(np.deg2rad(self.latitudes))[:, None]
        eastward = -to_grid(stream, self.slopes, self.columns) / metric
        northward = to_grid(1j * atmosphere.harmonics.zonal * stream, self.values, self.columns) / metric
        heights = to_grid(atmosphere.geopotential(stream), self.values, self.columns)
        heights += np.array([_MEAN_GEOPOTENTIAL[level] for level in LEVELS])[:, None, None]
        found = {"geopotential_500": heights[1]}
        for upper, lower in ((0, 1), (1, 2)):
            # The hypsometric equation: thickness of a layer to its mean temperature.
            thickness = _GAS * np.log(LEVELS[lower] / LEVELS[upper])
            found[f"temperature_{(LEVELS[upper] + LEVELS[lower]) // 2}"] = (heights[upper] - heights[lower]) / thickness
        for number, level in enumerate(LEVELS):
            found[f"u_component_of_wind_{level}"] = eastward[number]
            found[f"v_component_of_wind_{level}"] = northward[number]
        return found


def _build_dataset(frames: list[dict[str, Float64Array]]) -> xarray.Dataset:
    """Return frames as a dataset whose variables are packed as 16-bit integers, compressed by 16 frames."""
    hours = np.arange(len(frames), dtype=np.int32) * FRAME_HOURS
    dataset = xarray.Dataset(
        coords={
            "time": ("time", hours, {"units": "hours since 2000-01-01 00:00", "calendar": "standard"}),
            "lat": ("lat", LATITUDES, {"units": "degrees_north"}),
            "lon": ("lon", LONGITUDES, {"units": "degrees_east"}),
        },
        attrs={"title": "A quasi-geostrophic atmosphere of three levels (Marshall and Molteni 1993) at T21, simulated"},
    )
    for name in frames[0]:
        unit, step = next(known for kind, known in _KINDS.items() if name.startswith(kind))
        fields = np.stack([frame[name] for frame in frames])
        # A multiple of the step: values are then rounded to multiples of it, whatever their mean.
        offset = step * round(float(fields.mean()) / step)
        packing = {
            "dtype": "int16",
            "scale_factor": step,
            "add_offset": offset,
            "_FillValue": np.int16(-(2**15)),
            "zlib": True,
            "chunksizes": (min(16, len(frames)), len(LATITUDES), len(LONGITUDES)),
        }
        dataset[name] = (("time", "lat", "lon"), fields.astype(np.float32), {"units": unit}, packing)
    dataset["orography"] = (("lat", "lon"), mountain_heights(LATITUDES, LONGITUDES).astype(np.float32), {"units": "m"})
    return dataset
