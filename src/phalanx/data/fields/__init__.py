"""Gridded fields in time: stores, splits, normalisation, deterministic samples. Needs the weather extra."""

from importlib.util import find_spec

from phalanx.errors import ConfigError

for _package in ("cftime", "netCDF4", "xarray", "zarr"):
    if find_spec(_package) is None:
        raise ConfigError(f'weather data needs the package {_package}; pip install "phalanx-train[weather]"')
