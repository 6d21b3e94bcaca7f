"""The prepared form of fields: a folder of memory-mapped shards in which one frame of all variables lies in one piece.

    manifest.json        what is in the folder, with checksums
    fields.safetensors   times, grid, static fields and the survey of every frame
    frames-00000.bin     little-endian float32 [frames, variables, H, W], south to north, eastward

The survey makes statistics of any period available at once, so one prepared folder serves every choice of splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file

from phalanx.data.prepared_folder import (
    MANIFEST,
    FileRecord,
    FolderManifest,
    Part,
    check_content,
    check_size,
    check_still_whole,
    read_checked,
)
from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldName, FieldSource
from phalanx.families.weather.data.coordinates import Float32Array, Grid, TimeAxis
from phalanx.families.weather.data.field_store import FieldStore, Naming, Segment, hash_of
from phalanx.families.weather.data.field_survey import Survey
from phalanx.remote_files import is_file, local_copy, remote_file

FIELDS = "fields.safetensors"
_AGAIN = "prepare the fields again"
_Count = Annotated[int, Field(ge=1)]


class ShardRecord(Part):
    """One shard."""

    frames: _Count
    file: FileRecord


class FieldsManifest(FolderManifest):
    """Everything a reader needs to know about a folder of prepared fields."""

    format: Literal["phalanx-fields"]
    version: Literal[1] = 1
    variables: list[str]
    """Variables in their order within a frame."""
    statics: list[str]
    calendar: str
    frames: _Count
    first: str
    """Time of the first frame."""
    last: str
    """Time of the last frame."""
    step_hours: float
    """Usual time between frames, hours."""
    whole: bool
    """Whether the time axis was checked for holes; only those that its format always has can then be left."""
    rows: _Count
    columns: _Count
    source: str
    """Path of what was prepared, as given."""
    converted: list[FieldName] = Field(default=[])
    """Rules by which variables got their names and units when they were prepared."""
    units: dict[str, str] = Field(default={})
    """Units by variable, of those whose files say them."""
    arrays: FileRecord
    shards: list[ShardRecord]


def is_prepared(path: Path) -> bool:
    """Return whether a folder of prepared fields lies at `path`."""
    return (path / MANIFEST).is_file() and is_file(path / FIELDS)


class PreparedStore(FieldStore):
    """Fields in a prepared folder."""

    units_compared = True

    def __init__(self, folder: Path, source: FieldSource, variables: Sequence[str], statics: Sequence[str]) -> None:
        """Open the folder. Raises DataError for a missing variable, and for a missing, truncated or lengthened file."""
        self.path = folder
        self.variables = tuple(variables)
        self.statics = tuple(statics)
        self.manifest = read_checked(folder / MANIFEST, FieldsManifest, missing=_AGAIN, malformed=_AGAIN)
        self.gaps_refused = self.manifest.whole
        self._naming = Naming(_still_to_apply(source.names, self.manifest, folder))
        self._columns = [self._column(name, self.manifest.variables, "variable") for name in variables]
        static_columns = [self._column(name, self.manifest.statics, "static field") for name in statics]
        path = local_copy(check_size(folder, self.manifest.arrays))
        # Times, grid and survey decide which frames are read, and are small: their checksum is compared at once.
        check_content(path.parent, self.manifest.arrays)
        try:
            arrays: dict[str, Any] = load_file(path)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: cannot be read ({error}); prepare the fields again") from error
        expected = {"times", "latitudes", "longitudes", "static", *(field.name for field in fields(Survey))}
        # Written by an older version, or by other tools.
        if not expected <= set(arrays):
            raise DataError(f"{path}: no {', '.join(sorted(expected - set(arrays)))}; prepare the fields again")
        self.grid = Grid(arrays["latitudes"], arrays["longitudes"])
        self.times = TimeAxis(self.manifest.calendar, arrays["times"])
        # Copies: conversion is in place, and the same column may serve under two names.
        self._static = self.stack_static(
            [
                self._naming.convert(name, arrays["static"][column].copy())
                for name, column in zip(statics, static_columns, strict=True)
            ]
        )
        self._survey = Survey(**{field.name: arrays[field.name] for field in fields(Survey)})
        ends = np.cumsum([shard.frames for shard in self.manifest.shards])
        self.segments = tuple(
            Segment(check_size(folder, shard.file), int(end) - shard.frames, int(end))
            for shard, end in zip(self.manifest.shards, ends, strict=True)
        )
        self._starts = np.array([segment.first for segment in self.segments], dtype=np.int64)
        # Mapped: ranks of a machine share the pages that they read. None where they are remote.
        self._shards: list[Any] = []
        for segment in self.segments:
            shape = (segment.end - segment.first, len(self.manifest.variables), *self.grid.shape)
            if remote_file(segment.path) is not None:
                self._shards.append(None)
                continue
            size = segment.path.stat().st_size
            if size != 4 * int(np.prod(shape)):
                raise DataError(f"{segment.path}: {size} bytes do not hold {shape} float32 values")
            self._shards.append(np.memmap(segment.path, np.dtype("<f4"), "r", 0, shape))
        self._remote_files = [remote_file(segment.path) for segment in self.segments]
        self.fingerprint = hash_of(
            [self.manifest.arrays.sha256, *(shard.file.sha256 for shard in self.manifest.shards)],
            self._naming.describe((*variables, *statics)),
        )

    def unit_of(self, variable: int) -> str:
        """See `FieldStore`."""
        name = self.manifest.variables[self._columns[variable]]
        return "" if self._naming.converts(self.variables[variable]) else self.manifest.units.get(name, "")

    def fill(self, out: Float32Array, frames: Int64Array, variables: Sequence[int]) -> None:
        """Write the fields of these frames to `out`, [n, len(variables), H, W]."""
        columns = [self._columns[variable] for variable in variables]
        # Neighbouring variables of a frame lie in one piece, and are copied at once.
        together = columns == list(range(columns[0], columns[0] + len(columns)))
        shards = np.searchsorted(self._starts, frames, side="right") - 1
        places = list(zip(shards.tolist(), (frames - self._starts[shards]).tolist(), strict=True))
        files, shape = self._remote_files, (len(self.manifest.variables), *self.grid.shape)
        remote = None
        if files and files[0] is not None:
            size = 4 * int(np.prod(shape))
            # All that is not kept on this machine is asked for at once.
            wanted = [(file, place * size, (place + 1) * size) for shard, place in places if (file := files[shard])]
            remote = [np.frombuffer(content, "<f4").reshape(shape) for content in files[0].folder.read_ranges(wanted)]
        for row, (shard, place) in enumerate(places):
            if remote is None:
                # A map that is read beyond a shortened file ends the process without a word.
                check_still_whole(self.segments[shard].path, self._shards[shard].nbytes)
            stored = remote[row] if remote is not None else self._shards[shard][place]
            if together:
                out[row] = stored[columns[0] : columns[-1] + 1]
                continue
            for position, column in enumerate(columns):
                out[row, position] = stored[column]
        for position, variable in enumerate(variables):
            self._naming.convert(self.variables[variable], out[:, position])

    def read_static(self) -> Float32Array:
        """Read the fields without time, [S, H, W]."""
        return self._static

    def read_survey(self) -> Survey:
        """Return the survey made when the folder was prepared, of this store's variables, in the units of the run."""
        rules = [self._naming.rule(name) for name in self.variables]
        scale, offset = (
            np.array(values) for values in zip(*((rule.scale, rule.offset) for rule in rules), strict=True)
        )
        return self._survey.select(self._columns, scale, offset)

    def verify(self) -> None:
        """Read everything and compare checksums. Raises DataError naming the file, expected and found."""
        check_content(self.path, self.manifest.arrays)
        for shard in self.manifest.shards:
            check_content(self.path, shard.file)

    def _column(self, name: str, there: Sequence[str], kind: str) -> int:
        stored = self._naming.stored_name(name)
        if stored not in there:
            raise DataError(
                f"{self.path} has no {kind} {self._naming.display_name(name)}; it has {', '.join(there) or 'none'}; "
                f"prepare the fields again with it"
            )
        return list(there).index(stored)


def _still_to_apply(names: Sequence[FieldName], manifest: FieldsManifest, folder: Path) -> list[FieldName]:
    """Return the rules that preparing has not applied; a run file may still have those of the files that were prepared.

    Raises DataError for a rule that would have made other numbers of what was prepared.
    """
    # Applied twice, a scale would change the numbers again.
    applied = {rule.name: rule for rule in manifest.converted}
    left = [rule for rule in names if rule != applied.get(rule.name)]
    for rule in left:
        before = applied.get(rule.name)
        if before is not None and rule.stored_as == before.stored_as:
            raise DataError(
                f"{folder}: {rule.name} was prepared from {before.stored_as} with scale {before.scale:g} and offset "
                f"{before.offset:g}, but names says scale {rule.scale:g} and offset {rule.offset:g}; take {rule.name} "
                "out of names, or prepare the fields again"
            )
    return left
