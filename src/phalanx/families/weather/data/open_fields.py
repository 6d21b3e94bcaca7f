"""All fields of a run, opened and checked once: readers of splits, statistics to normalise by, and the climatology.

The format of a store is told apart by what lies at the path, never by a setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.errors import ConfigError, DataError
from phalanx.families.weather.config import FieldData, FieldSource
from phalanx.families.weather.data import require_package
from phalanx.families.weather.data.climax_store import ClimaxStore, is_climax
from phalanx.families.weather.data.coordinates import Grid, require_same_grid
from phalanx.families.weather.data.field_samples import (
    FieldReader,
    SplitName,
    SplitSource,
    find_windows,
    period_frames,
    split_frames,
)
from phalanx.families.weather.data.field_statistics import (
    Climatology,
    FieldStatistics,
    VariableStatistics,
    climate_by_month,
    mean_by_day,
    read_statistics,
    static_statistics,
)
from phalanx.families.weather.data.field_store import BlockCache, FieldStore, PartialStore, hash_of
from phalanx.families.weather.data.field_survey import (
    Moments,
    SourceSummary,
    Survey,
    merge_moments,
    require_alike,
    require_one_quantity,
    require_whole_axis,
    survey_store,
)
from phalanx.families.weather.data.prepared_store import PreparedStore, is_prepared
from phalanx.remote_files import is_kept_elsewhere, is_remote, local_path

_NETCDF = (".nc", ".nc4", ".netcdf", ".cdf")
_ZARR = ("zarr.json", ".zgroup", ".zmetadata")
_PATTERN = "*?["
_SURVEY_BYTES = 4 * 2**30
"""Most bytes of fields that every rank looks through as it opens them; more must be prepared first."""


class FieldSet:
    """The opened sources of a run."""

    def __init__(self, data: FieldData) -> None:
        """Open every source and check it, against the others and against given statistics.

        Raises DataError naming file, variable and time for whatever is wrong with the data.
        """
        self.data = data
        # Each variable once: what is predicted is mostly read too.
        self.variables = list(dict.fromkeys([*data.inputs, *data.target_variables]))
        # One cache for all sources: the run file bounds the memory of all together.
        cache = BlockCache(data.cache_mb * 2**20)
        self.stores = [open_store(source, self.variables, data.static, cache) for source in data.sources]
        for store, source in zip(self.stores, data.sources, strict=True):
            first = self.stores[self.sources_on(source.grid)[0]]
            require_same_grid(first.path, first.grid, store.path, store.grid)
            require_whole_axis(store, skip_gaps=data.gaps == "skip", tolerance_hours=data.time_tolerance_hours)
            for name, field_HW in zip(store.statics, store.read_static(), strict=True):
                unknown = int((~np.isfinite(field_HW)).sum())
                if unknown:
                    raise DataError(
                        f"{store.path}: static field {name} has {unknown} points without a value; fill them"
                    )
        self.surveys = [_read_survey(store, source) for store, source in zip(self.stores, data.sources, strict=True)]
        self._train = [split_frames(data, store, "train") for store in self.stores]
        if data.check_units:
            for store, survey in zip(self.stores, self.surveys, strict=True):
                if not store.units_compared:
                    require_one_quantity(store, survey)
            summaries = [self._summarise(index) for index in range(len(self.stores))]
            for summary in summaries[1:]:
                require_alike(self.variables, summaries[0], summary)
        self.statistics = self._find_statistics()

    @property
    def grids(self) -> dict[str | None, Grid]:
        """Return the grids of the sources by the names that the run file gives them, in the order of the sources."""
        names = dict.fromkeys(source.grid for source in self.data.sources)
        return {name: self.stores[self.sources_on(name)[0]].grid for name in names}

    @property
    def grid(self) -> Grid:
        """Return the grid of all sources. Raises ConfigError where they have several."""
        return self.grids[self._only_grid()]

    def _only_grid(self) -> str | None:
        """Return the name of the grid of all sources. Raises ConfigError where they have several."""
        names = list(self.grids)
        if len(names) > 1:
            named = " and ".join(name or "the model's own" for name in names[:2])
            raise ConfigError(
                f"data.sources lie on several grids, among them {named}; name sources of one, as in "
                f'data.sources=["{self.data.sources[0].path}"]'
            )
        return names[0]

    def sources_on(self, grid: str | None) -> list[int]:
        """Return the numbers of the sources on the grid that the run file names so."""
        return [number for number, source in enumerate(self.data.sources) if source.grid == grid]

    def reader(self, split: SplitName, *, seed: int, leads: Sequence[int] | None = None) -> FieldReader:
        """Return a reader of a split of sources on one grid. leads: hours, where others than those of the run are wanted.

        Raises ConfigError where the run has no such split or several grids, DataError where the split holds no sample.
        """
        return self._reader_on(self._only_grid(), split, seed, leads)

    def readers(self, split: SplitName, *, seed: int) -> dict[str | None, FieldReader]:
        """Return a reader of a split for each grid, by the name that the run file gives it. Raises as `reader` does."""
        return {name: self._reader_on(name, split, seed, None) for name in self.grids}

    def _reader_on(self, grid: str | None, split: SplitName, seed: int, leads: Sequence[int] | None) -> FieldReader:
        """Return a reader of the sources on one grid.

        leads: of the training split by default those of the steps of roll-outs that are trained through, if any are.
        """
        # Ascending, as the columns of windows are.
        hours = self.data.leads if leads is None else sorted(set(leads))
        through = self.data.rollout_steps if split == "train" and leads is None else None
        if through is not None and self.data.rollout_hours is not None:
            hours = [self.data.rollout_hours * number for number in range(1, through.last + 1)]
        # What the statistics follow from, rather than they themselves: counts and extremes are exact on every machine, while
        # sums differ in their last bits.
        contents = [
            hash_of(store.fingerprint, survey.valid.tobytes(), survey.low.tobytes(), survey.high.tobytes())
            for store, survey in zip(self.stores, self.surveys, strict=True)
        ]
        key = hash_of(contents, [frames.tobytes() for frames in self._train])
        if self.data.statistics is not None:
            key = hash_of(self.statistics.model_dump_json())
        return FieldReader(
            [
                SplitSource(
                    store,
                    find_windows(self.data, store, survey, split, hours, every_lead=through is not None),
                    source.weight,
                    contents[number],
                    number,
                )
                for number, (store, survey, source) in enumerate(
                    zip(self.stores, self.surveys, self.data.sources, strict=True)
                )
                if source.grid == grid
            ],
            self.data,
            statistics=self.statistics,
            statistics_key=key,
            leads=hours,
            seed=seed,
            through=through,
        )

    def verify(self) -> None:
        """Read every prepared source of this machine and compare checksums.

        Raises DataError naming the file, expected and found.
        """
        for store in self.stores:
            files = store.inner if isinstance(store, PartialStore) else store
            if isinstance(files, PreparedStore) and not is_kept_elsewhere(files.path):
                files.verify()

    def climatology(self, source: int = 0, asked: Int64Array | None = None) -> Climatology:
        """Return the mean of a source's output variables by day of the year and time of day, over `data.climatology`.

        asked: frames of the source whose days of the year are wanted; None for the whole year.
        """
        store = self.stores[source]
        frames = self._train[source]
        if self.data.climatology is not None:
            frames = period_frames(self.data.climatology, store, "data.climatology")
        columns = [self.variables.index(name) for name in self.data.target_variables]
        # A frame that was never written would pull its day's mean to the fill value.
        whole = frames[~self.surveys[source].blank[frames][:, columns].any(axis=1)]
        data = self.data
        found = mean_by_day(
            store, columns, whole, days=data.climatology_days, weights=data.climatology_weights, asked=asked
        )
        if not data.dry_thresholds:
            return found
        return replace(found, precipitation=climate_by_month(store, data.target_variables, whole, data.dry_thresholds))

    def _find_statistics(self) -> FieldStatistics:
        """Return the statistics that the run file names, or those of the training split."""
        names = [*self.variables, *self.data.static]
        if self.data.statistics is not None:
            given = read_statistics(Path(self.data.statistics), names)
            if self.data.check_units:
                moments = Moments(given.frames, given.mean_of(self.variables), given.std_of(self.variables))
                known = SourceSummary([self.data.statistics] * len(self.variables), moments, None, frozenset())
                for index in range(len(self.stores)):
                    require_alike(self.variables, known, self._summarise(index))
            return given
        # Over the training split alone: nothing of the held-out times may reach the model.
        # Each value counts once, whichever source and frame it is in.
        each = [survey.moments(frames) for survey, frames in zip(self.surveys, self._train, strict=True)]
        points = [survey.points(frames) for survey, frames in zip(self.surveys, self._train, strict=True)]
        moments, frames = merge_moments(each, points), sum(map(len, self._train))
        found = {}
        for index, name in enumerate(self.variables):
            mean, std = float(moments.mean[index]), float(moments.std[index])
            if not np.isfinite(mean) or std <= 0 or not np.isfinite(std):
                what = "has no value" if not np.isfinite(mean) else f"is {mean:g} everywhere"
                raise DataError(
                    f"{self.stores[0].path}: {name} {what} in the training split; nothing can be learnt from it"
                )
            found[name] = VariableStatistics(mean=mean, std=std)
        found |= static_statistics(self.data.static, self.stores[0].read_static())
        axis, train = self.stores[0].times, self._train[0]
        period = f"{axis.text(int(train[0]))} to {axis.text(int(train[-1]))}"
        return FieldStatistics(period=period, frames=frames, variables=found)

    def _summarise(self, source: int) -> SourceSummary:
        """Return the statistics of the training frames of a source, for comparison with those of others."""
        store, frames = self.stores[source], self._train[source]
        names = [str(store.path)] * len(self.variables)
        survey, first = self.surveys[source], self.stores[0].grid.latitudes
        profile = survey.whole_profile()
        if len(first) != len(store.grid.latitudes):
            # Compared row by row with that of the first source.
            profile = np.stack([np.interp(first, store.grid.latitudes, row) for row in profile])
        days = frozenset(store.times.days_of_year[frames].tolist())
        return SourceSummary(names, survey.moments(frames), profile, days)


def _read_survey(store: FieldStore, source: FieldSource) -> Survey:
    """Return the survey of a prepared store, or look through one that is small enough. Raises DataError for others."""
    if isinstance(store, PartialStore):
        return _read_survey(store.inner, source).spread(store.columns, len(store.variables))
    if isinstance(store, PreparedStore):
        return store.read_survey()
    # Every rank opens its data: what takes minutes to look through must be prepared once instead.
    size = len(store.times) * store.frame_bytes
    if size > _SURVEY_BYTES:
        raise DataError(
            f"{source.path}: {len(store.times)} frames of {len(store.variables)} variables are {size / 2**30:.0f} GiB, too "
            f"much to look through at the start of a run; run phalanx data prepare-fields once and name its folder"
        )
    return survey_store(store)


def open_store(source: FieldSource, variables: Sequence[str], statics: Sequence[str], cache: BlockCache) -> FieldStore:
    """Open the fields at `source.path`: a prepared folder, ClimaX shards, a netCDF file, a zarr store, or several of
    these two.

    Of a source that has some of `variables` only, the others are without a value. Raises DataError where nothing readable is
    there, or something is wrong with what is.
    """
    if source.variables is not None and set(variables) - set(source.variables):
        known = [name for name in variables if name in source.variables]
        return PartialStore(open_store(source, known, statics, cache), variables)
    if is_zarr_address(source.path):
        require_package("xarray", f"{source.path} needs")
        from phalanx.families.weather.data.xarray_store import XarrayStore  # noqa: PLC0415  (needs xarray)

        # The path is for messages: it has one slash less than the address, which is what is opened.
        return XarrayStore(Path(source.path), [Path(source.path)], source, variables, statics, cache)
    path = local_path(source.path)
    if is_prepared(path):
        return PreparedStore(path, source, variables, statics)
    if is_climax(path):
        return ClimaxStore(path, source, variables, statics, cache)
    files = field_files(path)
    # Only files need it: prepared fields and ClimaX shards are read without.
    require_package("xarray", f"{path} needs")
    from phalanx.families.weather.data.xarray_store import XarrayStore  # noqa: PLC0415  (needs xarray)

    return XarrayStore(path, files, source, variables, statics, cache)


def is_zarr_address(address: str) -> bool:
    """Return whether `address` names a zarr store that is not on this machine: by its ending, as nothing else tells."""
    return is_remote(address) and address.rstrip("/").endswith(".zarr")


def require_fields(address: str) -> None:
    """Raise DataError where nothing at `address` looks like fields. Opens nothing but the manifest of a remote folder."""
    if is_zarr_address(address):
        return
    path = local_path(address)
    if not is_prepared(path) and not is_climax(path):
        field_files(path)


def field_files(path: Path) -> list[Path]:
    """Find the netCDF files and zarr stores at `path`: itself, those in the folder, or those a pattern names."""
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
        # A few names, by which a wrong folder is recognised.
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
