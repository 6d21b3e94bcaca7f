"""Opening a store of fields whatever its format: told apart by what lies at the path, never by a setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import DataError
from phalanx.families.weather.data.packages import require_package
from phalanx.families.weather.data.prepared import PreparedStore, is_prepared
from phalanx.families.weather.data.stores.npz_store import NpzStore, is_climax
from phalanx.families.weather.data.stores.store import BlockCache, FieldStore
from phalanx.families.weather.data_config import FieldSource

_NETCDF = (".nc", ".nc4", ".netcdf", ".cdf")
_ZARR = ("zarr.json", ".zgroup", ".zmetadata")
_PATTERN = "*?["


def open_store(source: FieldSource, variables: Sequence[str], statics: Sequence[str], cache: BlockCache) -> FieldStore:
    """The fields at `source.path`: a prepared folder, ClimaX shards, a netCDF file, a zarr store, or several of these two.

    Raises DataError where nothing readable is there, or something is wrong with what is.
    """
    path = Path(source.path)
    if is_prepared(path):
        return PreparedStore(path, source, variables, statics)
    if is_climax(path):
        return NpzStore(path, source, variables, statics, cache)
    files = field_files(path)
    require_package("xarray", f"{path} needs")
    from phalanx.families.weather.data.stores.xarray_store import XarrayStore  # noqa: PLC0415  (needs xarray)

    return XarrayStore(path, files, source, variables, statics, cache)


def require_fields(path: Path) -> None:
    """Raise DataError where nothing at `path` looks like fields. Opens nothing."""
    if not is_prepared(path) and not is_climax(path):
        field_files(path)


def field_files(path: Path) -> list[Path]:
    """The netCDF files and zarr stores at `path`: itself, those in the folder, or those a pattern names."""
    if any(sign in path.name for sign in _PATTERN):
        found = sorted(item for item in path.parent.glob(path.name) if _is_fields(item))
        if not found:
            raise DataError(f"{path}: no netCDF file or zarr store has a name like that")
        return found
    if _is_fields(path):
        return [path]
    if path.is_dir():
        found = sorted(item for item in path.iterdir() if _is_fields(item))
        if found:
            return found
        there = ", ".join(sorted(item.name for item in path.iterdir())[:6]) or "nothing"
        raise DataError(
            f"{path}: no prepared fields, ClimaX shards (lat.npy and lon.npy), netCDF files or zarr stores in it; "
            f"it holds {there}"
        )
    if path.exists():
        raise DataError(f"{path} is no netCDF file by its name; {', '.join(_NETCDF)} can be read, and zarr stores")
    raise DataError(f"{path}: nothing there; name a netCDF file, a zarr store, or a folder or pattern of such")


def _is_fields(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).is_file() for name in _ZARR)
    return path.is_file() and path.suffix.lower() in _NETCDF
