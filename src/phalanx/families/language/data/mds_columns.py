"""The column of an MDS sample that holds token ids: which one it is, where it lies, and how its bytes become ids.

bytes               ids of a type that the file does not name
ndarray:TYPE:SHAPE  ids
ndarray:TYPE        header byte 4 * dims + w, each dim in 2**w bytes, ids
ndarray             byte for the type, then as ndarray:TYPE
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.language.data.token_source import Int64Array

_USUAL_NAMES = ("tokens", "input_ids")
_ID_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
"""Integer types by the byte that stands for them."""
_SHAPE_WIDTHS = ((1, 0, 2**8), (2, 2**8, 2**16), (4, 2**16, 2**32))
"""Bytes of the dim of a list, and the lengths they are used for: no wider than needed, so a size fits one at most."""
_READABLE = "bytes or ndarray[:TYPE[:SHAPE]] with an integer TYPE"


@dataclass(frozen=True)
class _Encoding:
    """How the ids of one column are written."""

    dtype: np.dtype[np.integer] | None
    """None where each array names its own."""
    tokens: int | None = None
    """Ids of every array, None where they vary."""
    shaped: bool = False
    """Whether each array begins with its shape."""

    @classmethod
    def parse(cls, text: str, bytes_dtype: str) -> Self:
        """Parse the name of an encoding. Raises ValueError saying why tokens cannot be read from it."""
        kind, *details = text.split(":")
        if kind == "pkl":
            raise ValueError("pickled columns are not read, for unpickling runs code from the file")
        if text == "bytes":
            return cls(_id_type(bytes_dtype))
        if kind != "ndarray" or len(details) > 2:
            raise ValueError(f"tokens are read from {_READABLE}")
        dtype = _id_type(details[0]) if details else None
        if len(details) < 2:
            return cls(dtype, shaped=True)
        dims = details[1].split(",")
        if not all(dim.isdecimal() and int(dim) > 0 for dim in dims):
            raise ValueError(f"tokens are read from {_READABLE}")
        return cls(dtype, tokens=math.prod(map(int, dims)))

    def decode(self, field: npt.NDArray[np.uint8]) -> npt.NDArray[np.integer]:
        """Return ids of an array written as `field`, all dims in one. Raises ValueError for a malformed one."""
        at = 0
        dtype = self.dtype
        if dtype is None:
            dtype, at = _type_of(field), 1
        if self.shaped:
            if at >= len(field):
                raise ValueError("array without a shape")
            # The header byte holds both: dims in its upper six bits, the logarithm of their width in its lower two.
            dims, width = int(field[at]) >> 2, 1 << (int(field[at]) & 3)
            shape_end = at + 1 + dims * width
            if shape_end > len(field):
                raise ValueError("array without a whole shape")
            shape = np.frombuffer(field, f"<u{width}", dims, at + 1).tolist()
            at, expected = shape_end, math.prod(shape)
            if (len(field) - at) != expected * dtype.itemsize:
                raise ValueError(f"array of shape {shape} and {dtype.name} in {len(field) - at} bytes")
        elif (len(field) - at) % dtype.itemsize:
            raise ValueError(f"{len(field)} bytes are no whole number of {dtype.name} ids")
        return np.frombuffer(field, dtype, offset=at) if at < len(field) else np.empty(0, dtype)

    def lengths(self, sizes: Int64Array, first: npt.NDArray[np.uint8]) -> Int64Array:
        """Return ids in lists of `sizes` bytes each (n,), all of the type of the `first`; -1 where no list has that size."""
        dtype = self.dtype or _type_of(first)
        rest = sizes - (self.dtype is None)
        if not self.shaped:
            return np.where(rest % dtype.itemsize == 0, rest // dtype.itemsize, -1)
        lengths = np.full_like(rest, -1)
        # The header says how wide its dims are, but only the size is known here: at most one width fits it.
        for width, least, limit in _SHAPE_WIDTHS:
            length, left_over = np.divmod(rest - 1 - width, dtype.itemsize)
            fits = (left_over == 0) & (least <= length) & (length < limit)
            lengths[fits] = length[fits]
        return lengths


@dataclass(frozen=True)
class TokenColumn:
    """Where the token column lies among the columns of a sample."""

    index: int
    sizes: tuple[int | None, ...]
    """Bytes of every column in order, None where each sample says."""
    encoding: _Encoding

    @classmethod
    def find(
        cls, names: list[str], encodings: list[str], sizes: list[int | None], where: Path, bytes_dtype: str
    ) -> Self:
        """Find the column named tokens or input_ids, else the only array. Raises DataError naming `where` and the
        columns."""
        if not len(names) == len(encodings) == len(sizes):
            raise DataError(f"{where}: {len(names)} column names, {len(encodings)} encodings, {len(sizes)} sizes")
        # Many data sets hold other arrays beside the tokens, such as masks: a usual name decides.
        usual = [names.index(name) for name in _USUAL_NAMES if name in names]
        arrays = [i for i, encoding in enumerate(encodings) if encoding.partition(":")[0] == "ndarray"]
        if not usual and len(arrays) != 1:
            columns = ", ".join(f"{n} ({e})" for n, e in zip(names, encodings, strict=True))
            raise DataError(
                f"{where}: which column holds tokens? found {columns}; wanted one named tokens or input_ids, or a "
                "single ndarray (raw text is tokenized with: phalanx data prepare)"
            )
        index = usual[0] if usual else arrays[0]
        try:
            encoding = _Encoding.parse(encodings[index], bytes_dtype)
        except ValueError as error:
            raise DataError(f"{where}: column {names[index]} has the encoding {encodings[index]}: {error}") from None
        size = sizes[index] or None
        if encoding.tokens is not None and encoding.dtype and size != encoding.tokens * encoding.dtype.itemsize:
            raise DataError(f"{where}: column {names[index]} has the encoding {encodings[index]} but the size {size}")
        return cls(index, tuple(size or None for size in sizes), encoding)

    @property
    def smallest_sample(self) -> int:
        """Return bytes of a sample whose columns without a fixed size are empty."""
        return self._head + sum(size or 0 for size in self.sizes)

    def decode(self, sample: npt.NDArray[np.uint8]) -> npt.NDArray[np.integer]:
        """Return token ids of a `sample` given as its bytes. Raises ValueError for a malformed one."""
        return self.encoding.decode(self._field(sample))

    def lengths(self, content: npt.NDArray[np.uint8], offsets: Int64Array) -> Int64Array:
        """Return the number of tokens of each sample (n,) of a shard whose samples lie between `offsets` (n + 1,).
        Raises ValueError.

        Takes them from the offsets alone unless other columns vary in size too; then from the head of each sample.
        """
        # The cheapest source that suffices: a fixed size, the table of offsets, or the head of every sample.
        own = self.sizes[self.index]
        if own is not None:
            sizes = np.full(len(offsets) - 1, own, dtype=np.int64)
        elif self._head == 4:
            sizes = np.diff(offsets) - self.smallest_sample
        else:
            at = offsets[:-1] + 4 * self.sizes[: self.index].count(None)
            sizes = content[at[:, None] + np.arange(4)].view("<u4")[:, 0].astype(np.int64)
        start, end = offsets[:2].tolist()
        lengths = self.encoding.lengths(sizes, self._field(content[start:end]))
        wrong = np.flatnonzero(lengths < 0)
        if wrong.size:
            raise ValueError(f"sample {wrong[0]}: {sizes[wrong[0]]} bytes of tokens are no list of ids of one type")
        return lengths

    @property
    def _head(self) -> int:
        """Return bytes of a sample that say how long its columns are."""
        return 4 * self.sizes.count(None)

    def _field(self, sample: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the bytes of the token column in those of a sample. Raises ValueError where sizes do not add up."""
        written = iter(np.frombuffer(sample, "<u4", self._head // 4).tolist())
        sizes = [next(written) if size is None else size for size in self.sizes]
        if self._head + sum(sizes) != len(sample):
            raise ValueError(f"columns of {sizes} bytes in {len(sample) - self._head}")
        start = self._head + sum(sizes[: self.index])
        return sample[start : start + sizes[self.index]]


def _id_type(name: str) -> np.dtype[np.integer]:
    if name not in _ID_TYPES.values():
        raise ValueError(f"tokens are read from {_READABLE}")
    dtype: np.dtype[np.integer] = np.dtype(name).newbyteorder("<")
    return dtype


def _type_of(field: npt.NDArray[np.uint8]) -> np.dtype[np.integer]:
    """Return the type that an array's first byte names."""
    code = int(field[0]) if len(field) else 0
    if code not in _ID_TYPES:
        raise ValueError(f"array of the unknown or non-integer type {code}")
    return _id_type(_ID_TYPES[code])
