"""A store of netCDF files or zarr stores, which may part the fields by time, by variable or both.

Everything that can be wrong with the files' coordinates is found on opening: missing variables, unequal grids, files that
overlap in time, variables whose times differ. Values are read later, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.data.coordinates import Float32Array, TimeAxis, require_same_grid
from phalanx.families.weather.data.field_store import BlockCache, FieldStore, Naming, Segment, hash_of
from phalanx.families.weather.data.xarray_file import FieldFile, Slot, open_file
from phalanx.families.weather.data_config import FieldSource

_SHOWN = 20


@dataclass(frozen=True)
class _Piece:
    """The frames of one variable in one file."""

    file: FieldFile
    slot: Slot
    first: int
    """Frame of the store that the piece begins with."""
    frames: int
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
        axes = [_join_times(name, parts) for name, parts in zip(variables, pieces, strict=True)]
        # Frame t of all variables must be one time, so the first variable's times stand for all.
        self.times = axes[0]
        for name, axis in zip(variables, axes, strict=True):
            _require_same_times(variables[0], self.times, name, axis, opened)
        self._pieces = pieces
        self._starts = [np.array([piece.first for piece in parts], dtype=np.int64) for parts in pieces]
        self.segments = tuple(Segment(p.file.path, p.first, p.first + p.frames) for p in pieces[0])
        static_files = opened if source.static_path is None else [open_file(Path(source.static_path), source)]
        self._static = [self._static_slot(name, static_files) for name in statics]
        self.fingerprint = hash_of(
            [(file.name, _stored_bytes(file)) for file in files],
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
        return np.stack(fields) if fields else np.empty((0, *self.grid.shape), dtype=np.float32)

    def locate(self, variable: int, frame: int) -> tuple[Path, int]:
        """Find the file that holds a frame of a variable, and the time index in that file."""
        number = int(np.searchsorted(self._starts[variable], frame, side="right")) - 1
        piece = self._pieces[variable][number]
        return piece.file.path, frame - piece.first

    def _read_block(self, variable: int, piece: _Piece, first: int) -> Float32Array:
        """Read the frames of a piece, [n, H, W], that are best read together with frame `first` of it."""
        end = min(first + piece.block, piece.frames)
        return self._naming.convert(self.variables[variable], piece.file.read(piece.slot, first, end))

    def _pieces_of(self, name: str, files: Sequence[FieldFile]) -> list[_Piece]:
        """Return the parts of a variable in the order of their times."""
        stored = self._naming.stored_name(name)
        found = [(file, slot) for file in files if (slot := file.find(stored)) is not None and file.in_time(slot)]
        if not found:
            if any(file.find(stored) for file in files):
                raise DataError(f"{self.path}: {name} does not depend on time; name it under data.static")
            raise DataError(
                f"{_name_files(self.path, files)} has no variable {self._naming.display_name(name)}; "
                f"{_list_known(stored, files)}"
            )
        # By time and not by name: names sort months or years in many orders.
        found.sort(key=lambda item: int(item[0].times.seconds[0]) if item[0].times else 0)
        pieces: list[_Piece] = []
        for file, slot in found:
            assert file.times is not None
            # Of overlapping files it would be unclear which holds the frame that is meant.
            before = pieces[-1].file.times if pieces else None
            if before is not None and before.seconds[-1] >= file.times.seconds[0]:
                raise DataError(
                    f"{pieces[-1].file.path} and {file.path} overlap in time: {name} goes to "
                    f"{before.text(len(before) - 1)} in the first and begins at {file.times.text(0)} in the second; "
                    f"leave one of them out"
                )
            first = pieces[-1].first + pieces[-1].frames if pieces else 0
            pieces.append(_Piece(file, slot, first, len(file.times), file.block_frames(slot)))
        return pieces

    def _static_slot(self, name: str, files: Sequence[FieldFile]) -> tuple[FieldFile, Slot]:
        stored = self._naming.stored_name(name)
        for file in files:
            slot = file.find(stored)
            if slot is None:
                continue
            if file.in_time(slot):
                raise DataError(f"{file.path}: {name} depends on time; name it under data.inputs, not data.static")
            require_same_grid(self.path, self.grid, file.path, file.grid)
            return file, slot
        where = _name_files(files[0].path if len(files) == 1 else self.path, files)
        raise DataError(f"{where} has no static field {self._naming.display_name(name)}; {_list_known(stored, files)}")


def _join_times(name: str, pieces: Sequence[_Piece]) -> TimeAxis:
    """Return the times of a variable over all its files."""
    axes = [piece.file.times for piece in pieces if piece.file.times is not None]
    for piece, axis in zip(pieces, axes, strict=True):
        if axis.calendar != axes[0].calendar:
            raise DataError(
                f"{piece.file.path}: calendar {axis.calendar}, but {pieces[0].file.path} has {axes[0].calendar}; "
                f"{name} needs one calendar, make two sources of them"
            )
    return TimeAxis(axes[0].calendar, np.concatenate([axis.seconds for axis in axes]))


def _require_same_times(
    first_name: str, first: TimeAxis, name: str, axis: TimeAxis, files: Sequence[FieldFile]
) -> None:
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
    holders = [file.path for file in files if file.times is not None and time in file.times.seconds]
    where = f"{holders[0]}: " if holders else ""
    raise DataError(
        f"{where}no variable {lacking} at {text}, where {having} has a frame; all variables of a source need the same times"
    )


def _name_files(path: Path, files: Sequence[FieldFile]) -> str:
    return str(path) if len(files) == 1 else f"{path} ({len(files)} files)"


def _list_known(stored: str, files: Sequence[FieldFile]) -> str:
    names = sorted({name for file in files for name in file.names()})
    near = get_close_matches(stored, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{hint}it has {shown or 'none on a grid'}; other names go under names of the source"


def _stored_bytes(path: Path) -> int:
    """Return bytes of a file, or of all files of a store."""
    if path.is_file():
        return path.stat().st_size
    return sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
