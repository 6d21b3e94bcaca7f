"""A store of netCDF files or zarr stores, which may part the fields by time, by variable or both.

Everything that can be wrong with the files' coordinates is found on opening, which reads coordinates alone: missing
variables, unequal grids, files that overlap in time, variables whose times differ. Values are read later, block by block,
and come decoded (packed integers, fill values) through xarray.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data import require_package
from phalanx.families.weather.data.coordinates import (
    Float32Array,
    Float64Array,
    Grid,
    Orientation,
    TimeAxis,
    decode_times,
    orient_grid,
    require_same_grid,
)
from phalanx.families.weather.data.field_store import BlockCache, FieldStore, Naming, Segment, hash_of
from phalanx.families.weather.model.grid_features import level_name, split_level
from phalanx.remote_files import is_remote

_SHOWN = 20


@dataclass(frozen=True)
class _Piece:
    """The frames of one variable in one file."""

    file: FieldFile
    slot: Slot
    times: TimeAxis
    first: int
    """Frame of the store that the piece begins with."""
    block: int
    """Frames that are best read together."""


class XarrayStore(FieldStore):
    """Fields in netCDF files or zarr stores."""

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        source: FieldSource,
        variables: Sequence[str],
        statics: Sequence[str],
        cache: BlockCache,
    ) -> None:
        """Open `files` and look up the variables. Raises DataError for whatever is wrong with them, see the module."""
        self.path = path
        self.variables = tuple(variables)
        self.statics = tuple(statics)
        self._naming = Naming(source.names)
        self._cache = cache
        opened = [open_file(file, source) for file in files]
        self.grid = opened[0].grid
        for file in opened[1:]:
            require_same_grid(opened[0].path, self.grid, file.path, file.grid)
        # Variables may lie in files of their own, so each has its own list of files in time.
        pieces = [self._pieces_of(name, opened) for name in variables]
        axes = []
        for name, parts in zip(variables, pieces, strict=True):
            calendar = parts[0].times.calendar
            for piece in parts:
                if piece.times.calendar != calendar:
                    raise DataError(
                        f"{piece.file.path}: calendar {piece.times.calendar}, but {parts[0].file.path} has {calendar}; "
                        f"{name} needs one calendar, make two sources of them"
                    )
            axes.append(TimeAxis(calendar, np.concatenate([piece.times.seconds for piece in parts])))
        # Frame t of all variables must be one time, so the first variable's times stand for all.
        self.times = axes[0]
        for name, axis in zip(variables, axes, strict=True):
            _require_same_times(variables[0], self.times, name, axis, opened)
        self._pieces = pieces
        self._starts = [np.array([piece.first for piece in parts], dtype=np.int64) for parts in pieces]
        self.segments = tuple(Segment(p.file.path, p.first, p.first + len(p.times)) for p in pieces[0])
        static_files = opened if source.static_path is None else [open_file(Path(source.static_path), source)]
        self._static = [self._static_slot(name, static_files) for name in statics]
        # By lengths: to read all content would take as long as to survey it. A zarr store is a folder of many files.
        contents = [
            (file.name, sum(part.stat().st_size for part in (file, *file.rglob("*")) if part.is_file()))
            for file in (() if is_remote(source.path) else files)
        ]
        self.fingerprint = hash_of(
            source.path if is_remote(source.path) else contents,
            self._naming.describe((*variables, *statics)),
            self.times.calendar,
            self.times.seconds.tobytes(),
            self.grid.latitudes.tobytes(),
            self.grid.longitudes.tobytes(),
        )

    def fill(self, out: Float32Array, frames: Int64Array, variables: Sequence[int]) -> None:
        """Write the fields of these frames to `out`, [n, len(variables), H, W]."""
        for column, variable in enumerate(variables):
            found = np.searchsorted(self._starts[variable], frames, side="right") - 1
            for row, (frame, number) in enumerate(zip(frames.tolist(), found.tolist(), strict=True)):
                piece = self._pieces[variable][number]
                index = frame - piece.first
                # Frames that are compressed together are decompressed together, and kept for their neighbours.
                first = index - index % piece.block
                block = self._cache.get(
                    (id(self), variable, number, first), partial(self._read_block, variable, piece, first)
                )
                out[row, column] = block[index - first]

    def read_static(self) -> Float32Array:
        """Read the fields without time, [S, H, W]."""
        fields = [
            self._naming.convert(name, file.read_static(slot))
            for name, (file, slot) in zip(self.statics, self._static, strict=True)
        ]
        return self.stack_static(fields)

    def unit_of(self, variable: int) -> str:
        """See `FieldStore`: of the first file, with whose numbers those of the others were compared."""
        piece = self._pieces[variable][0]
        if self._naming.converts(self.variables[variable]):
            return ""
        return str(piece.file.dataset[piece.slot.array].attrs.get("units", ""))

    def locate(self, variable: int, frame: int) -> tuple[Path, int]:
        """Find the file that holds a frame of a variable, and the time index in that file."""
        number = int(np.searchsorted(self._starts[variable], frame, side="right")) - 1
        piece = self._pieces[variable][number]
        return piece.file.path, frame - piece.first

    def _read_block(self, variable: int, piece: _Piece, first: int) -> Float32Array:
        """Read the frames of a piece, [n, H, W], that are best read together with frame `first` of it."""
        end = min(first + piece.block, len(piece.times))
        return self._naming.convert(self.variables[variable], piece.file.read(piece.slot, first, end))

    def _pieces_of(self, name: str, files: Sequence[FieldFile]) -> list[_Piece]:
        """Return the parts of a variable in the order of their times."""
        stored = self._naming.stored_name(name)
        found = [
            (file.times, file, slot)
            for file in files
            if file.times is not None and (slot := file.find(stored)) is not None and file.depends_on_time(slot)
        ]
        if not found:
            if any(file.find(stored) for file in files):
                raise DataError(f"{self.path}: {name} does not depend on time; name it under data.static")
            raise DataError(
                f"{_name_files(self.path, files)} has no variable {self._naming.display_name(name)}; "
                f"{_list_known(stored, files)}"
            )
        # By time and not by name: names sort months or years in many orders.
        found.sort(key=lambda item: int(item[0].seconds[0]))
        pieces: list[_Piece] = []
        for times, file, slot in found:
            # Of overlapping files it would be unclear which holds the frame that is meant.
            before = pieces[-1].times if pieces else None
            if before is not None and before.seconds[-1] >= times.seconds[0]:
                raise DataError(
                    f"{pieces[-1].file.path} and {file.path} overlap in time: {name} goes to "
                    f"{before.text(len(before) - 1)} in the first and begins at {times.text(0)} in the second; "
                    f"leave one of them out"
                )
            first = pieces[-1].first + len(pieces[-1].times) if pieces else 0
            pieces.append(_Piece(file, slot, times, first, file.block_frames(slot)))
        return pieces

    def _static_slot(self, name: str, files: Sequence[FieldFile]) -> tuple[FieldFile, Slot]:
        """Find the first file with a static field. Raises DataError where none has it, or where it depends on time."""
        stored = self._naming.stored_name(name)
        for file in files:
            slot = file.find(stored)
            if slot is None:
                continue
            if file.depends_on_time(slot):
                raise DataError(f"{file.path}: {name} depends on time; name it under data.inputs, not data.static")
            require_same_grid(self.path, self.grid, file.path, file.grid)
            return file, slot
        where = _name_files(files[0].path if len(files) == 1 else self.path, files)
        raise DataError(f"{where} has no static field {self._naming.display_name(name)}; {_list_known(stored, files)}")


def _require_same_times(
    first_name: str, first: TimeAxis, name: str, axis: TimeAxis, files: Sequence[FieldFile]
) -> None:
    """Raise DataError, naming the first time that one of two variables lacks, where their times differ."""
    if axis.calendar == first.calendar and np.array_equal(axis.seconds, first.seconds):
        return
    only_first = np.setdiff1d(first.seconds, axis.seconds)
    lacking, having, time = (
        (name, first_name, int(only_first[0]))
        if only_first.size
        else (first_name, name, int(np.setdiff1d(axis.seconds, first.seconds)[0]))
    )
    index = int(first.nearest(np.array([time]))[0]) if only_first.size else int(axis.nearest(np.array([time]))[0])
    text = (first if only_first.size else axis).text(index)
    # The file that has the time of the other variable is the one to look into.
    holders = [file.path for file in files if file.times is not None and time in file.times.seconds]
    where = f"{holders[0]}: " if holders else ""
    raise DataError(
        f"{where}no variable {lacking} at {text}, where {having} has a frame; all variables of a source need the same times"
    )


def _name_files(path: Path, files: Sequence[FieldFile]) -> str:
    return str(path) if len(files) == 1 else f"{path} ({len(files)} files)"


def _list_known(stored: str, files: Sequence[FieldFile]) -> str:
    """Return the names that files have, the one most like `stored` first, for messages."""
    names = sorted({name for file in files for name in file.names()})
    # A misspelt name is the likeliest mistake.
    near = get_close_matches(stored, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{hint}it has {shown or 'none on a grid'}; other names go under names of the source"


_LATITUDES = ("lat", "latitude", "nav_lat")
_LONGITUDES = ("lon", "longitude", "nav_lon")
_LEVELS = ("level", "pressure_level", "plev", "isobaricInhPa", "lev", "pressure")
_TIMES = ("time", "valid_time")
_PLAIN_BLOCK_BYTES = 2**18
"""Bytes read at once where nothing is compressed: a call through xarray takes about as long as reading this many."""
_COORDINATES = 2**24
"""Most values along a dimension: 1,900 years of hours. They are all read as a file is opened."""
_POINTS = 2**28
"""Most points of a field: 1 GiB in memory."""
_READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, IndexError)
"""Errors that HDF5, zarr and their filters raise for damaged files."""


@dataclass(frozen=True)
class Slot:
    """Place of a variable in a file."""

    array: str
    level: int | None
    """Index along the level dimension; None where it has none."""


@dataclass(frozen=True)
class FieldFile:
    """An open netCDF file or zarr store."""

    path: Path
    dataset: Any
    grid: Grid
    orientation: Orientation
    lat_dim: str
    lon_dim: str
    time_dim: str | None
    times: TimeAxis | None
    """Times of its frames; None where nothing in the file depends on time."""

    def find(self, name: str) -> Slot | None:
        """Find the variable `name`: under that name, or as its level of an array with a level dimension."""
        if name in self.dataset.data_vars:
            return Slot(name, None)
        named = split_level(name)
        if named is None or named[0] not in self.dataset.data_vars:
            return None
        array, level = named
        levels = self._levels(self.dataset[array])
        if levels is None:
            return None
        # Levels are stored as floats, at times in single precision.
        found = np.flatnonzero(np.abs(levels - level) < 1e-3)
        return Slot(array, int(found[0])) if found.size else None

    def depends_on_time(self, slot: Slot) -> bool:
        """Return whether a variable depends on time."""
        return self.time_dim is not None and self.time_dim in self.dataset[slot.array].dims

    def names(self) -> Iterator[str]:
        """Yield the names by which all arrays with a place on the grid are found, level by level."""
        for name, array in self.dataset.data_vars.items():
            if not {self.lat_dim, self.lon_dim} <= set(array.dims):
                continue
            levels = self._levels(array)
            yield from [str(name)] if levels is None else [level_name(str(name), level) for level in levels.tolist()]

    def _levels(self, array: Any) -> Float64Array | None:
        """Return the pressure levels of an array in hPa; None where it has no such dimension."""
        dim = next((dim for dim in array.dims if dim in _LEVELS and dim in self.dataset.coords), None)
        if dim is None:
            return None
        levels = np.asarray(self.dataset[dim].values, dtype=np.float64)
        return levels / 100 if str(self.dataset[dim].attrs.get("units", "")).lower() == "pa" else levels

    def block_frames(self, slot: Slot) -> int:
        """Return how many frames are best read together: those compressed together, else a quarter of a MiB."""
        array = self.dataset[slot.array]
        chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
        if chunks and self.time_dim in array.dims:
            return int(chunks[array.dims.index(self.time_dim)])
        rows, columns = self.grid.shape
        return max(1, _PLAIN_BLOCK_BYTES // (4 * rows * columns))

    def read(self, slot: Slot, first: int, end: int) -> Float32Array:
        """Read frames first..end-1 of a variable, [n, H, W] in the orientation of the grid."""
        return self._read_values(slot, {self.time_dim: slice(first, end)}, f"time indices {first} to {end - 1}")

    def read_static(self, slot: Slot) -> Float32Array:
        """Read a field without time, [H, W]."""
        return self._read_values(slot, {}, "no time")

    def _read_values(self, slot: Slot, index: dict[Any, Any], what: str) -> Float32Array:
        """Read a part of an array in the orientation of the grid. what: names the part in messages."""
        array = self.dataset[slot.array]
        if slot.level is not None:
            index = {**index, next(dim for dim in array.dims if dim in _LEVELS): slot.level}
        wanted = [dim for dim in (self.time_dim if what != "no time" else None, self.lat_dim, self.lon_dim) if dim]
        part = array.isel(index)
        # A level or height of length 1 is written by many tools and says nothing.
        part = part.isel({dim: 0 for dim in part.dims if dim not in wanted and part.sizes[dim] == 1})
        # An ensemble or a second level dimension: which of them is meant is not guessed.
        if set(part.dims) != set(wanted):
            raise DataError(
                f"{self.path}: {slot.array} has the dimensions {', '.join(map(str, array.dims))}; of these only "
                f"{', '.join(wanted)} and a pressure level can be read, others must have length 1"
            )
        try:
            values = part.transpose(*wanted).values
        except _READ_ERRORS as error:
            raise DataError(
                f"{self.path}: {slot.array}, {what}: cannot be read ({error}); the file is damaged or truncated"
            ) from error
        # A copy that may be written to: numbers are converted in place.
        return self.orientation.apply(np.array(values, dtype=np.float32))


def open_file(path: Path, source: FieldSource) -> FieldFile:
    """Open a netCDF file or a zarr store.

    Raises DataError, naming the file, for one that cannot be opened or has no latitude-longitude grid, and for times that
    are out of order; ConfigError where the package that reads such files is missing.
    """
    remote = is_remote(source.path)
    place = source.path if remote else str(path)
    engine, package = ("zarr", "zarr") if remote or path.is_dir() else ("netcdf4", "netCDF4")
    require_package(package, f"{path} needs")
    try:
        # Before xarray reads them all: a damaged header may declare any length.
        for name, length in _declared_lengths(place, engine).items():
            if length > _COORDINATES:
                raise DataError(
                    f"{path}: {length:,} values along {name} are more than the {_COORDINATES:,} that can be read; the file "
                    f"is damaged, or must be parted"
                )
        with warnings.catch_warnings():
            # Stores without consolidated metadata open more slowly, and well.
            warnings.filterwarnings("ignore", message="Failed to open Zarr store with consolidated metadata")
            # Times are decoded by ours, which refuse what xarray would guess; blocks are cached by the store.
            dataset = xarray.open_dataset(place, engine=engine, decode_times=False, cache=False)
    except _READ_ERRORS as error:
        raise DataError(f"{path}: cannot be opened ({error}); it is damaged, truncated or no {engine} store") from error
    names = [str(name) for name in dataset.dims]
    lat_dim = _find_dimension(dataset, names, _LATITUDES, "latitude", path)
    lon_dim = _find_dimension(dataset, names, _LONGITUDES, "longitude", path)
    rows, columns = dataset.sizes[lat_dim], dataset.sizes[lon_dim]
    # Asked before any field is read, which would need that much memory.
    if rows * columns > _POINTS:
        raise DataError(
            f"{path}: a grid of {rows:,} x {columns:,} points is more than the {_POINTS:,} that can be read; regrid the file"
        )
    grid, orientation = orient_grid(
        np.asarray(dataset[lat_dim].values, dtype=np.float64),
        np.asarray(dataset[lon_dim].values, dtype=np.float64),
        str(path),
    )
    time_dim = _time_dimension(dataset, names, source, path)
    times = None
    if time_dim is not None:
        coordinate = dataset[time_dim]
        # What the run file says goes before the file, whose attributes may be wrong or missing.
        units = source.time_units or coordinate.attrs.get("units")
        if units is None:
            raise DataError(
                f"{path}: the numbers of {time_dim} do not say what they count; give the source time_units, as in "
                f'"hours since 1996-01-05 00:00"'
            )
        calendar = source.calendar or coordinate.attrs.get("calendar", "standard")
        times = decode_times(np.asarray(coordinate.values), str(units), str(calendar), f"{path}: {time_dim}")
    return FieldFile(path, dataset, grid, orientation, lat_dim, lon_dim, time_dim, times)


def _declared_lengths(place: str, engine: str) -> dict[str, int]:
    """Return the length of each dimension that has coordinates, without reading any. place: path or address."""
    if engine == "zarr":
        import zarr  # noqa: PLC0415  (needs zarr)

        arrays = dict(zarr.open_group(place, mode="r").arrays())
        return {name: int(array.shape[0]) for name, array in arrays.items() if len(array.shape) == 1}
    import netCDF4  # noqa: PLC0415  (needs netCDF4)

    with netCDF4.Dataset(place) as file:
        return {name: len(dimension) for name, dimension in file.dimensions.items() if name in file.variables}


def _find_dimension(dataset: Any, names: list[str], usual: tuple[str, ...], kind: str, path: Path) -> str:
    """Return the dimension that is called, or by CF convention declares itself, latitude or longitude."""
    for name in names:
        known = name.lower() in usual or (name in dataset.coords and dataset[name].attrs.get("standard_name") == kind)
        if known and name in dataset.coords:
            return name
    raise DataError(
        f"{path}: no dimension with {kind} coordinates among {', '.join(names) or 'none'}; regrid the file to a "
        f"latitude-longitude grid"
    )


def _time_dimension(dataset: Any, names: list[str], source: FieldSource, path: Path) -> str | None:
    """Return the dimension that the run file names, has a usual name or counts from a date; None where there is none."""
    if source.time_dim is not None:
        if source.time_dim not in names or source.time_dim not in dataset.coords:
            raise DataError(f"{path}: no dimension {source.time_dim!r} with times; it has {', '.join(names)}")
        return source.time_dim
    usual = [name for name in names if name in _TIMES and name in dataset.coords]
    if usual:
        return usual[0]
    for name in names:
        if name in dataset.coords and " since " in str(dataset[name].attrs.get("units", "")):
            return name
    return None
