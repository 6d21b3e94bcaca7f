"""Forecasts as files that other programs open: netCDF or zarr with CF metadata.

Dimensions have the names of WeatherBench 2, which WeatherBench-X reads too: `time` (of the input), `prediction_timedelta`,
of ensembles `number`, `level`, `latitude` and `longitude`. Variables of several pressure levels become one array; a level
that a variable does not have is missing.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError
from phalanx.families.weather.data import require_package
from phalanx.families.weather.data.coordinates import EPOCH, Float32Array, Grid
from phalanx.families.weather.data.field_store import FieldStore
from phalanx.families.weather.model.grid_features import split_level
from phalanx.files import TEMPORARY

_MISSING = np.float32(np.nan)
_STARTS = ("time", "prediction_timedelta")
_PLACE = ("latitude", "longitude")


@dataclass(frozen=True)
class _Coordinate:
    """Values along one dimension."""

    name: str
    values: npt.NDArray[Any]
    attributes: dict[str, str]


@dataclass(frozen=True)
class _FileArray:
    """One array of the file."""

    name: str
    places: tuple[int | None, ...]
    """Places of its levels among the variables predicted, None for a level it does not have; just one of an array without
    levels."""
    has_levels: bool
    unit: str
    """Unit of the values; empty where the data do not say."""


@dataclass(frozen=True)
class FileLayout:
    """Says what a file of forecasts holds."""

    grid: Grid
    calendar: str
    seconds: Int64Array
    """[T]: times of the inputs, seconds since 1970."""
    lead_hours: tuple[int, ...]
    members: int
    """Members of each forecast; 1 has no dimension for them."""
    levels: tuple[int, ...]
    """Pressure levels in hPa, ascending; none where no variable has one."""
    arrays: tuple[_FileArray, ...]

    @classmethod
    def of(
        cls,
        store: FieldStore,
        outputs: Sequence[str],
        seconds: Int64Array,
        lead_hours: Sequence[int],
        members: int = 1,
    ) -> FileLayout:
        """Return the layout for the variables `outputs` of a store, forecast from the times `seconds`."""
        by_level: dict[str, dict[int, int]] = {}
        plain: dict[str, int] = {}
        for place, name in enumerate(outputs):
            named = split_level(name)
            # An array that is there without a level too cannot have the same name with levels.
            if named is None or named[0] in outputs:
                plain[name] = place
            else:
                by_level.setdefault(named[0], {})[named[1]] = place
        levels = tuple(sorted({level for places in by_level.values() for level in places}))

        def unit_of(place: int) -> str:
            return store.unit_of(store.variables.index(outputs[place]))

        arrays = [_FileArray(name, (place,), False, unit_of(place)) for name, place in plain.items()]
        for name, places in by_level.items():
            unit = unit_of(next(iter(places.values())))
            arrays.append(_FileArray(name, tuple(places.get(level) for level in levels), True, unit))
        return cls(store.grid, store.times.calendar, seconds, tuple(lead_hours), members, levels, tuple(arrays))

    def coordinates(self) -> list[_Coordinate]:
        """Return the coordinates, with attributes by CF."""
        found = [
            _Coordinate(
                "time",
                self.seconds,
                {"standard_name": "forecast_reference_time", "units": EPOCH, "calendar": self.calendar},
            ),
            _Coordinate(
                "prediction_timedelta",
                np.array(self.lead_hours, dtype=np.int64),
                # xarray makes time differences of numbers that say so.
                {"standard_name": "forecast_period", "units": "hours", "dtype": "timedelta64[ns]"},
            ),
            _Coordinate(
                "latitude",
                self.grid.latitudes,
                {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
            ),
            _Coordinate(
                "longitude",
                self.grid.longitudes,
                {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
            ),
        ]
        if self.members > 1:
            found.append(_Coordinate("number", np.arange(self.members), {"standard_name": "realization"}))
        if self.levels:
            attributes = {"standard_name": "air_pressure", "units": "hPa", "positive": "down", "axis": "Z"}
            found.append(_Coordinate("level", np.array(self.levels, dtype=np.int64), attributes))
        return found

    def dimensions(self, array: _FileArray) -> tuple[str, ...]:
        """Return the dimensions of an array."""
        return (*_STARTS, *("number",) * (self.members > 1), *("level",) * array.has_levels, *_PLACE)


class ForecastFile(ABC):
    """A file of forecasts that is being written."""

    def __init__(self, layout: FileLayout) -> None:
        self.layout = layout
        self._arrays: dict[str, Any] = {}

    def write(self, starts: Int64Array, column: int, fields_BVHW: Tensor) -> None:
        """Write forecasts of one lead time. starts: their numbers among the times; column: number of the lead time. Of
        ensembles `fields` have the members of a start one after the other."""
        values_BVHW: Float32Array = fields_BVHW.float().cpu().numpy()
        members = self.layout.members
        for array in self.layout.arrays:
            levels_BLHW = np.full((len(values_BVHW), len(array.places), *self.layout.grid.shape), _MISSING)
            for level, place in enumerate(array.places):
                if place is not None:
                    levels_BLHW[:, level] = values_BVHW[:, place]
            # What is not in the file is one long: the members of one forecast, the levels of an array without any.
            chosen = (0 if members == 1 else slice(None), slice(None) if array.has_levels else 0)
            for start, fields_MLHW in zip(starts.tolist(), np.split(levels_BLHW, len(starts)), strict=True):
                self._arrays[array.name][start, column] = fields_MLHW[chosen]

    @abstractmethod
    def close(self) -> None:
        """Write what is not written yet."""


class _ZarrFile(ForecastFile):
    """A zarr store of format 2, which every version of zarr reads; a chunk is one forecast of one array."""

    def __init__(self, path: Path, layout: FileLayout, about: dict[str, str], *, new: bool) -> None:
        """new: whether the store is made; otherwise another rank made it."""
        super().__init__(layout)
        require_package("zarr", f"{path} needs")
        import zarr  # noqa: PLC0415  (needs the package)

        group = zarr.open_group(path, mode="w" if new else "r+", zarr_format=2)
        if new:
            group.attrs.update(about)
            for axis in layout.coordinates():
                # Without a fill value: of its own accord it would be 0, and xarray take the longitude 0 for missing.
                made = group.create_array(axis.name, data=axis.values, fill_value=None)
                made.attrs.update({"_ARRAY_DIMENSIONS": [axis.name], **axis.attributes})
            sizes = {axis.name: len(axis.values) for axis in layout.coordinates()}
            for array in layout.arrays:
                dims = layout.dimensions(array)
                shape = tuple(sizes[dim] for dim in dims)
                made = group.create_array(
                    array.name, shape=shape, chunks=(1, 1, *shape[2:]), dtype="float32", fill_value=float("nan")
                )
                made.attrs.update({"_ARRAY_DIMENSIONS": list(dims), **_describe_array(array)})
            # In one file: a reader then lists no folders.
            zarr.consolidate_metadata(group.store, zarr_format=2)
        self._arrays = {array.name: group[array.name] for array in layout.arrays}

    def close(self) -> None:
        """See `ForecastFile`: every chunk is written as it comes."""


class _NetcdfFile(ForecastFile):
    """A netCDF 4 file; a chunk is one forecast of one array, compressed."""

    def __init__(self, path: Path, layout: FileLayout, about: dict[str, str]) -> None:
        super().__init__(layout)
        require_package("netCDF4", f"{path} needs")
        import netCDF4  # noqa: PLC0415  (needs the package)

        self._file = netCDF4.Dataset(str(path), "w")
        self._file.setncatts(about)
        for axis in layout.coordinates():
            self._file.createDimension(axis.name, len(axis.values))
            made = self._file.createVariable(axis.name, axis.values.dtype, (axis.name,))
            made.setncatts(axis.attributes)
            made[:] = axis.values
        for array in layout.arrays:
            dims = layout.dimensions(array)
            sizes = tuple(len(self._file.dimensions[dim]) for dim in dims)
            self._arrays[array.name] = self._file.createVariable(
                array.name, "f4", dims, zlib=True, complevel=1, chunksizes=(1, 1, *sizes[2:]), fill_value=_MISSING
            )
            self._arrays[array.name].setncatts(_describe_array(array))

    def close(self) -> None:
        """See `ForecastFile`."""
        self._file.close()


def _describe_array(array: _FileArray) -> dict[str, str]:
    """Return the attributes of an array. Without a unit it has none: CF would take that for a pure number."""
    return {"long_name": array.name.replace("_", " "), **({"units": array.unit} if array.unit else {})}


def require_forecast_path(path: Path, ranks: int) -> None:
    """Raise ConfigError where no file of forecasts can be written at `path` by that many ranks."""
    if path.suffix not in (".nc", ".zarr"):
        raise ConfigError(f"--out {path}: forecasts are written as netCDF or zarr; name FILE.nc or FILE.zarr")
    if path.exists():
        raise ConfigError(f"--out {path} is already there; remove it or name another file")
    if path.suffix == ".nc" and ranks > 1:
        raise ConfigError(f"--out {path}: {ranks} ranks cannot write one netCDF file; name FILE.zarr, or use one rank")


@contextmanager
def open_forecast_file(
    path: Path, layout: FileLayout, model: str, rank: int = 0, ranks: int = 1
) -> Iterator[ForecastFile]:
    """Open a file for forecasts, which is at `path` when the block ends; nothing stays where the block fails.

    model: where forecasts come from, in words. rank, ranks: of the process group, all of which call this and write forecasts
    of their own. Raises ConfigError for a path that is taken or of another kind.
    """
    require_forecast_path(path, ranks)
    about = {"Conventions": "CF-1.8", "title": "Weather forecasts", "source": f"phalanx {phalanx.__version__}, {model}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank:
        # The first rank makes the store and says where.
        made: list[Any] = [None]
        dist.broadcast_object_list(made, src=0)
        yield _ZarrFile(made[0], layout, about, new=False)
        dist.barrier()
        return
    # Beside its place, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=path.parent) as folder:
        partial = Path(folder) / path.name
        kind = (
            _NetcdfFile(partial, layout, about) if path.suffix == ".nc" else _ZarrFile(partial, layout, about, new=True)
        )
        if ranks > 1:
            dist.broadcast_object_list([partial], src=0)
        yield kind
        if ranks > 1:
            dist.barrier()
        kind.close()
        os.replace(partial, path)
