"""Which packages of the weather extra are needed is asked where a file needs one."""

from __future__ import annotations

from importlib.util import find_spec

from phalanx.errors import ConfigError


def require_package(name: str, what: str) -> None:
    """Raises ConfigError where the package `name` is not installed. what: what needs it, as in "netCDF files need"."""
    if find_spec(name) is None:
        raise ConfigError(f'{what} the package {name}; pip install "phalanx-train[weather]"')
