"""Gridded fields in time: stores, splits, normalisation, deterministic samples. Needs the weather extra."""

from importlib.util import find_spec

from phalanx.errors import ConfigError


def require_package(name: str, what: str) -> None:
    """Raise ConfigError where the package `name` is not installed. what: what needs it, as in "netCDF files need"."""
    if find_spec(name) is None:
        raise ConfigError(f'{what} the package {name}; pip install "phalanx-train[weather]"')


# Every time axis needs calendars, whatever the files; packages that read files are asked for where a file needs them.
require_package("cftime", "weather data needs")
