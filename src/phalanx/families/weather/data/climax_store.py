"""Fields in ClimaX's shards: <folder>/<split>/<year>_<shard>.npz with one array [frames, 1, H, W] a variable.

The shards do not say their times. Shard k of a year goes on where shard k - 1 ended, the first begins with the year, and
the hours between frames follow from the frames in a year: a year of 8736, 8760 or 8784 hours, at whose end the published
script drops up to two days. Shards of CMIP are named by first and last minute in place of the year; their step must be
given. The normalisation and climatology files that lie beside the shards are not read: the script takes the means of
pressure-level variables from the last year alone, and the climatology from the years it is scored on.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cftime  # type: ignore[import-untyped]
import numpy as np

from phalanx.data.prepared_folder import check_still_whole
from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.coordinates import (
    EPOCH,
    HOUR,
    Float32Array,
    TimeAxis,
    canonical_calendar,
    orient_grid,
)
from phalanx.families.weather.data.field_store import BlockCache, FieldStore, Naming, Segment, hash_of

_NAME = re.compile(r"(\d{4}|\d{12})(?:-\d{12})?_(\d+)\.npz")
"""The year, or for CMIP the minute of the first frame, then the shard."""
_SPLITS = ("train", "val", "test")
_HOURS_IN_YEAR = (8640, 8784)
"""Hours of a year of 360 days, and of a leap year."""
_LOST_HOURS = 72
"""Most hours missing between two years: two days that the script drops, and the frames next to them."""
_DAMAGED = (zipfile.BadZipFile, ValueError, OSError, KeyError, EOFError)


def is_climax(folder: Path) -> bool:
    """Return whether `folder` holds ClimaX shards."""
    return (folder / "lat.npy").is_file() and (folder / "lon.npy").is_file()


class ClimaxStore(FieldStore):
    """Fields in ClimaX shards, of all splits together; the run says which years are for what."""

    def __init__(
        self, folder: Path, source: FieldSource, variables: Sequence[str], statics: Sequence[str], cache: BlockCache
    ) -> None:
        """Open the shards.

        Raises DataError for a shard that is missing, truncated or lacks a variable, and for years that do not fit
        `step_hours`.
        """
        self.path = folder
        self.variables = tuple(variables)
        self.statics = tuple(statics)
        self._naming = Naming(source.names)
        self._cache = cache
        self._maps: dict[tuple[Path, str], Any] = {}
        latitudes, longitudes = (_read_coordinates(folder / name) for name in ("lat.npy", "lon.npy"))
        self.grid, self._orientation = orient_grid(latitudes, longitudes, f"{folder}/lat.npy and lon.npy")
        self._files = _in_order(folder)
        # Times follow from the lengths of all shards before, so each is looked at as the store is opened.
        lengths = []
        for _, _, path in self._files:
            frames: dict[str, int] = {}
            for name in (*self.variables, *self.statics):
                array = self._array(Segment(path, 0, 0), name)
                if array.ndim != 4 or array.shape[1:] != (1, *self.grid.shape):
                    raise DataError(
                        f"{path}: {name} has the shape {array.shape}; "
                        f"(frames, 1, {', '.join(map(str, self.grid.shape))}) expected, as lat.npy and lon.npy say"
                    )
                frames[name] = len(array)
            first = self.variables[0]
            for name in self.variables:
                if frames[name] != frames[first] or frames[name] == 0:
                    raise DataError(f"{path}: {name} has {frames[name]} frames, {first} has {frames[first]}")
            lengths.append(frames[first])
        ends = np.cumsum(lengths)
        self.segments = tuple(
            Segment(path, int(end) - length, int(end))
            for (_, _, path), length, end in zip(self._files, lengths, ends, strict=True)
        )
        self._starts = np.array([segment.first for segment in self.segments], dtype=np.int64)
        self.times = self._time_axis(source, lengths)
        self.fingerprint = hash_of(
            [(path.name, path.stat().st_size) for _, _, path in self._files],
            self._naming.describe((*variables, *statics)),
            self.times.calendar,
            self.times.seconds.tobytes(),
            latitudes.tobytes(),
            longitudes.tobytes(),
        )

    def fill(self, out: Float32Array, frames: Int64Array, variables: Sequence[int]) -> None:
        """Write the fields of these frames to `out`, [n, len(variables), H, W]."""
        shards = np.searchsorted(self._starts, frames, side="right") - 1
        for row, (frame, shard) in enumerate(zip(frames.tolist(), shards.tolist(), strict=True)):
            segment = self.segments[shard]
            for column, variable in enumerate(variables):
                field = self._array(segment, self.variables[variable])[frame - segment.first, 0]
                out[row, column] = self._converted(self.variables[variable], field)

    def read_static(self) -> Float32Array:
        """Read the fields without time, [S, H, W]: the first frame of each, as shards repeat them in every frame."""
        fields = [self._converted(name, self._array(self.segments[0], name)[0, 0]) for name in self.statics]
        return self.stack_static(fields)

    def allows_gap(self, frame: int) -> bool:
        """Return whether a year ends with `frame` and the next begins so soon that only the dropped days can be missing."""
        hours = int(self.times.seconds[frame + 1] - self.times.seconds[frame]) / HOUR
        last = any(segment.end == frame + 1 for segment in self.segments)
        return last and hours <= _LOST_HOURS

    def _array(self, segment: Segment, name: str) -> Any:
        """Return the array of a variable: mapped where the shard is not compressed, else read whole and kept for a while."""
        stored = self._naming.stored_name(name)
        path = segment.path
        # Maps are kept: to look an array up, its archive is opened and its directory read.
        if (path, stored) in self._maps:
            mapped = self._maps[path, stored]
            check_still_whole(path, mapped.offset + mapped.nbytes)
            return mapped
        try:
            with zipfile.ZipFile(path) as archive:
                if f"{stored}.npy" not in archive.namelist():
                    known = ", ".join(sorted(item.removesuffix(".npy") for item in archive.namelist()))
                    raise DataError(f"{path} has no variable {stored}; it has {known}")
                info = archive.getinfo(f"{stored}.npy")
                # Uncompressed members lie in the file as they are, so single frames can be read through a map.
                if info.compress_type == zipfile.ZIP_STORED:
                    self._maps[path, stored] = _map_member(path, archive, info)
                    return self._maps[path, stored]

            def read_whole() -> Float32Array:
                with np.load(path, allow_pickle=False) as arrays:
                    return np.asarray(arrays[stored], dtype=np.float32)

            return self._cache.get((id(self), path, stored), read_whole)
        except _DAMAGED as error:
            raise DataError(f"{path}: {stored} cannot be read ({error}); the file is truncated or damaged") from error

    def _converted(self, name: str, field: Float32Array) -> Float32Array:
        # A copy: numbers are converted in place, and maps cannot be written to.
        return self._orientation.apply(self._naming.convert(name, np.array(field, dtype=np.float32)))

    def _time_axis(self, source: FieldSource, lengths: Sequence[int]) -> TimeAxis:
        """Return the times of all frames, which follow from the names and lengths of the shards."""
        calendar = canonical_calendar(source.calendar or "standard")
        frames: dict[str, int] = {}
        for (begin, _, _), length in zip(self._files, lengths, strict=True):
            frames[begin] = frames.get(begin, 0) + length
        parts: list[Int64Array] = []
        for begin, count in frames.items():
            # The hours with which so many frames make a year. Shards of CMIP, named by their first minute, are no years.
            fitting = [
                hours
                for hours in ((1, 2, 3, 6, 12, 24) if len(begin) == 4 else ())
                if _HOURS_IN_YEAR[0] <= count * hours <= _HOURS_IN_YEAR[1]
            ]
            if source.step_hours is None and not fitting:
                raise DataError(
                    f"{self.path}: {count} frames in {begin} are no whole year of hours; set step_hours of the source"
                )
            step = source.step_hours or fitting[0]
            # The name begins with the year, or with the minute YYYYMMDDhhmm.
            fields = [int(begin[:4]), *(int(begin[at : at + 2]) for at in range(4, len(begin), 2))]
            date = cftime.datetime(*(fields if len(fields) > 1 else (fields[0], 1, 1)), calendar=calendar)
            times = int(cftime.date2num(date, EPOCH, calendar)) + np.arange(count, dtype=np.int64) * step * HOUR
            # A wrong step would let a year run into the next, with frames out of order.
            if parts and parts[-1][-1] >= times[0]:
                raise DataError(
                    f"{self.path}: the frames before {begin}, {step} hours apart, reach into what begins there; "
                    f"set step_hours of the source"
                )
            parts.append(times)
        return TimeAxis(calendar, np.concatenate(parts))


def _in_order(folder: Path) -> list[tuple[str, int, Path]]:
    """Return (begin, shard, path) of all shards in order. Raises DataError where one is missing or there twice."""
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(path for split in _SPLITS for path in (folder / split).glob("*.npz")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        key = (match[1], int(match[2]))
        if key in found:
            raise DataError(f"{found[key]} and {path} overlap in time: both are shard {key[1]} of {key[0]}")
        found[key] = path
    if not found:
        raise DataError(f"{folder}: no <year>_<shard>.npz in any of {', '.join(_SPLITS)}")
    most = 1 + max(shard for _, shard in found)
    for begin in sorted({begin for begin, _ in found}):
        there = [shard for other, shard in found if other == begin]
        # Years are cut into equal numbers of shards; the last stretch of a CMIP model may be shorter.
        expected = most if len(begin) == 4 else 1 + max(there)
        missing = sorted(set(range(expected)) - set(there))
        if missing:
            path = found[begin, there[0]]
            lost = path.with_name(re.sub(r"_\d+\.npz$", f"_{missing[0]}.npz", path.name))
            raise DataError(
                f"{lost} is missing: {expected} shards expected, and the times of shards follow from those before them"
            )
    return [(begin, shard, path) for (begin, shard), path in sorted(found.items())]


def _read_coordinates(path: Path) -> Any:
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.float64)
    except _DAMAGED as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _map_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    """Map an uncompressed member of a zip file into memory."""
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(member)
        header = member.tell()
    # Objects are pickles, which run code as they are read.
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    with path.open("rb") as file:
        # The local header repeats the lengths of name and extra field, which may differ from the directory's.
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    start = info.header_offset + 30 + name + extra + header
    return np.memmap(path, dtype, "r", start, shape, order="F" if fortran else "C")
