"""Stores of fields that a run can read: one interface, whatever the format on disk.

A store holds some variables on one grid along one time axis. It is read by frame, in any order, and holds no position;
frame t of all variables belongs to one time. Frames are float32 in the orientation of `grid`, NaN where there is no value.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.data.sample_order import Int64Array
from phalanx.families.weather.config import FieldName
from phalanx.families.weather.data.coordinates import Float32Array, Grid, TimeAxis


@dataclass(frozen=True)
class Segment:
    """The stretch of frames that lies in one file."""

    path: Path
    first: int
    """First frame."""
    end: int
    """One after the last frame."""


class FieldStore(ABC):
    """Fields on one grid along one time axis."""

    path: Path
    """Path of the store, for messages."""
    variables: tuple[str, ...]
    """Names in the run, in the order `read` gives them."""
    statics: tuple[str, ...]
    """Names of the fields without time."""
    grid: Grid
    times: TimeAxis
    segments: tuple[Segment, ...]
    """Which file holds which frames (of the first variable, where variables lie in files of their own), in order."""
    fingerprint: str
    """Changes whenever files are added, removed, or change in length or times."""
    lacking: frozenset[int] = frozenset()
    """Places of variables of the run that the source does not have: they are NaN in every frame."""
    gaps_refused: bool = False
    """Whether holes in the time axis were refused as the store was made."""
    units_compared: bool = False
    """Whether its files were compared with one another, for units and orientation, as the store was made."""

    @abstractmethod
    def fill(self, out: Float32Array, frames: Int64Array, variables: Sequence[int]) -> None:
        """Write the fields of these frames to `out`, [n, len(variables), H, W].

        Raises DataError naming file, variable and time index.
        """

    def read(self, frames: Int64Array, variables: Sequence[int]) -> Float32Array:
        """Read the fields [n, len(variables), H, W] of these frames; see `fill`."""
        out = np.empty((len(frames), len(variables), *self.grid.shape), dtype=np.float32)
        self.fill(out, frames, variables)
        return out

    @abstractmethod
    def read_static(self) -> Float32Array:
        """Read the fields without time, [S, H, W]."""

    def unit_of(self, variable: int) -> str:
        """Return the unit of a variable; empty where the data do not say, or its numbers were converted."""
        return ""

    def locate(self, variable: int, frame: int) -> tuple[Path, int]:
        """Find the file that holds a frame of a variable, and the time index in that file; by default by `segments`."""
        segment = next(segment for segment in self.segments if segment.first <= frame < segment.end)
        return segment.path, frame - segment.first

    def allows_gap(self, frame: int) -> bool:
        """Return whether the format always has a hole in the time axis behind `frame`."""
        return False

    def place(self, variable: int, frame: int) -> str:
        """Return file, variable and time of a frame, in words for messages."""
        path, index = self.locate(variable, frame)
        return f"{path}: {self.variables[variable]}, time index {index} ({self.times.text(frame)})"

    @property
    def frame_bytes(self) -> int:
        """Return the bytes of one frame of all variables in memory."""
        rows, columns = self.grid.shape
        return 4 * len(self.variables) * rows * columns

    def stack_static(self, fields_HW: Sequence[Float32Array]) -> Float32Array:
        """Return static fields as one array [S, H, W], which has the shape of the grid also where there are none."""
        return np.stack(fields_HW) if fields_HW else np.empty((0, *self.grid.shape), dtype=np.float32)


class PartialStore(FieldStore):
    """A store with some of a run's variables, as one that has all of them: the others have no value anywhere."""

    def __init__(self, inner: FieldStore, variables: Sequence[str]) -> None:
        """Join a store and the variables of the run, in the order that they are to have."""
        self.inner = inner
        self.path, self.statics, self.grid, self.times = inner.path, inner.statics, inner.grid, inner.times
        self.segments = inner.segments
        self.gaps_refused, self.units_compared = inner.gaps_refused, inner.units_compared
        self.variables = tuple(variables)
        self.columns = [self.variables.index(name) for name in inner.variables]
        """Places of the inner store's variables."""
        self.lacking = frozenset(range(len(self.variables))) - set(self.columns)
        self.fingerprint = hash_of(inner.fingerprint, self.columns)

    def fill(self, out: Float32Array, frames: Int64Array, variables: Sequence[int]) -> None:
        """See `FieldStore`."""
        known = [place for place, variable in enumerate(variables) if variable not in self.lacking]
        out[...] = np.nan
        if known:
            out[:, known] = self.inner.read(frames, [self.columns.index(variables[place]) for place in known])

    def read_static(self) -> Float32Array:
        """See `FieldStore`."""
        return self.inner.read_static()

    def unit_of(self, variable: int) -> str:
        """See `FieldStore`."""
        return "" if variable in self.lacking else self.inner.unit_of(self.columns.index(variable))

    def locate(self, variable: int, frame: int) -> tuple[Path, int]:
        """See `FieldStore`."""
        return self.inner.locate(0 if variable in self.lacking else self.columns.index(variable), frame)

    def allows_gap(self, frame: int) -> bool:
        """See `FieldStore`."""
        return self.inner.allows_gap(frame)


class Naming:
    """Rules of one source: what variables are called in its files, and how their numbers become those of the run."""

    def __init__(self, names: Sequence[FieldName]) -> None:
        self._rules = {rule.name: rule for rule in names}

    def rule(self, name: str) -> FieldName:
        """Return the rule of a variable; one that changes nothing where the source names none."""
        return self._rules.get(name) or FieldName(name=name, stored_as=name)

    def stored_name(self, name: str) -> str:
        """Return the name in the files."""
        return self.rule(name).stored_as

    def convert(self, name: str, fields: Float32Array) -> Float32Array:
        """Turn stored numbers of a variable into those of the run, in place, and return them."""
        # Most variables need neither, and a pass over the fields costs time.
        if self.converts(name):
            fields *= np.float32(self.rule(name).scale)
            fields += np.float32(self.rule(name).offset)
        return fields

    def converts(self, name: str) -> bool:
        """Return whether the numbers of a variable are not those in the files."""
        return (self.rule(name).scale, self.rule(name).offset) != (1.0, 0.0)

    def display_name(self, name: str) -> str:
        """Return the name in the files, and in the run where that differs."""
        stored = self.stored_name(name)
        return name if name == stored else f"{stored} (for {name})"

    def describe(self, names: Sequence[str]) -> list[tuple[str, str, float, float]]:
        """Return all rules for some variables, for fingerprints."""
        rules = [self.rule(name) for name in names]
        return [(rule.name, rule.stored_as, rule.scale, rule.offset) for rule in rules]


class BlockCache:
    """Keeps the pieces of compressed files that were read last. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        """capacity: most bytes that are kept; a single piece larger than that is still handed out, but not kept."""
        self.capacity = capacity
        self._bytes = 0
        self._blocks: OrderedDict[Hashable, Float32Array] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, load: Callable[[], Float32Array]) -> Float32Array:
        """Return the piece known as `key`, from memory or by `load`."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                return block
        # Loaded outside the lock, so that threads decompress side by side; two may load the same piece once.
        block = load()
        with self._lock:
            if key not in self._blocks and block.nbytes <= self.capacity:
                self._blocks[key] = block
                self._bytes += block.nbytes
                # Least recently used first: neighbours of a frame are read soon after it.
                while self._bytes > self.capacity:
                    self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return block


def hash_of(*parts: object) -> str:
    """Return a checksum of the text and bytes of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        # Lengths are hashed too: ('ab', 'c') must differ from ('a', 'bc').
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
