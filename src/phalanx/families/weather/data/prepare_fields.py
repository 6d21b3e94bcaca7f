"""Turning any store into the prepared form: one pass over the files, in order, with everything checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from phalanx.data.prepared_folder import file_record
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.coordinates import HOUR
from phalanx.families.weather.data.field_store import BlockCache, FieldStore
from phalanx.families.weather.data.field_survey import Survey, Surveyor, require_one_quantity, require_whole_axis
from phalanx.families.weather.data.open_fields import open_store
from phalanx.families.weather.data.prepared_store import FIELDS, FieldsManifest, ShardRecord
from phalanx.files import whole_folder

_SHARD_BYTES = 256 * 2**20


def prepare_fields(
    source: FieldSource,
    out: Path,
    *,
    variables: Sequence[str],
    statics: Sequence[str] = (),
    skip_gaps: bool = False,
    time_tolerance_hours: float = 0.0,
    check_units: bool = True,
    cache_mb: int = 1024,
    shard_bytes: int = _SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FieldsManifest:
    """Write the variables and static fields of `source` as prepared fields into the new folder `out`.

    skip_gaps: whether holes in the time axis are kept rather than refused. shard_bytes: size of a shard, and about the
    memory needed besides cache_mb. progress: called with frames done and frames in all.

    Raises DataError for anything wrong with the source, and where `out` is already there. `out` appears when it is whole.
    """
    if out.exists():
        raise DataError(f"{out} is already there; remove it or name another folder")
    store = open_store(source, variables, statics, BlockCache(cache_mb * 2**20))
    require_whole_axis(store, skip_gaps=skip_gaps, tolerance_hours=time_tolerance_hours)
    with whole_folder(out) as folder:
        # Surveyed in the same pass: files are read once.
        shards, survey = _write_shards(store, folder, max(1, shard_bytes // store.frame_bytes), progress)
        if check_units:
            require_one_quantity(store, survey)
        arrays = {
            **{field.name: getattr(survey, field.name) for field in fields(Survey)},
            "times": store.times.seconds,
            "latitudes": store.grid.latitudes,
            "longitudes": store.grid.longitudes,
            "static": store.read_static(),
        }
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / FIELDS)
        manifest = FieldsManifest(
            format="phalanx-fields",
            variables=list(store.variables),
            statics=list(store.statics),
            calendar=store.times.calendar,
            frames=len(store.times),
            first=store.times.text(0),
            last=store.times.text(len(store.times) - 1),
            step_hours=store.times.step / HOUR,
            whole=not skip_gaps,
            rows=store.grid.shape[0],
            columns=store.grid.shape[1],
            source=source.path,
            converted=[rule for rule in source.names if rule.name in (*variables, *statics)],
            units={name: unit for place, name in enumerate(store.variables) if (unit := store.unit_of(place))},
            arrays=file_record(folder / FIELDS),
            shards=shards,
        )
        # Last: a folder with a manifest is complete.
        manifest.write(folder)
    return manifest


def _write_shards(
    store: FieldStore, folder: Path, shard_frames: int, progress: Callable[[int, int], None]
) -> tuple[list[ShardRecord], Survey]:
    """Write all frames of a store into shards of `shard_frames` each; return these, and the survey made on the way."""
    surveyor, shards = Surveyor(store), []
    for number, first in enumerate(range(0, len(store.times), shard_frames)):
        frames = np.arange(first, min(first + shard_frames, len(store.times)), dtype=np.int64)
        block_TVHW = np.empty((len(frames), len(store.variables), *store.grid.shape), dtype="<f4")
        # Variable by variable: so each compressed piece of a file is read once.
        for variable in range(len(store.variables)):
            block_TVHW[:, variable] = store.read(frames, [variable])[:, 0]
            surveyor.add(first, variable, block_TVHW[:, variable])
        path = folder / f"frames-{number:05}.bin"
        # Written as they come: one shard is all that memory holds.
        path.write_bytes(block_TVHW.data)
        shards.append(ShardRecord(frames=len(frames), file=file_record(path)))
        progress(int(frames[-1]) + 1, len(store.times))
    return shards, surveyor.finish()
