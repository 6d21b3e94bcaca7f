"""Named arrays in one file in the safetensors format, read as memory maps: opening costs the header alone.

Knows nothing of structures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from phalanx.errors import DataError
from phalanx.files import replace_file

Arrays = dict[str, npt.NDArray[Any]]

_DTYPES = {
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "<u1",
    "U16": "<u2",
    "U32": "<u4",
    "F32": "<f4",
    "F64": "<f8",
}
"""Number formats as the header names them."""
_LARGEST_HEADER = 2**24


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays atomically; a crash leaves the old file, the new one or none."""
    with replace_file(path) as file:
        file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def map_arrays(path: Path) -> Arrays:
    """Return the arrays of a file, read-only and unread until used. Raises DataError for a malformed or truncated file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _LARGEST_HEADER):
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        content = np.memmap(path, np.uint8, mode="r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
        header.pop("__metadata__", None)
        arrays: Arrays = {}
        for name, entry in header.items():
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
            first, last = (int(n) for n in entry["data_offsets"])
            # What the header says is checked before it is used: it may come from anywhere.
            if not 0 <= first <= last <= len(content) or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"an array should lie at bytes {first} to {last} of {len(content)}")
            # A plain array: the memory map's own class makes every small operation on it slower.
            arrays[name] = np.asarray(content[first:last]).view(np.ndarray).view(dtype).reshape(shape)
        return arrays
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: it is no file of arrays ({error}); it is truncated or altered") from None


def smallest_integers(values: npt.NDArray[np.int64], *, signed: bool) -> npt.NDArray[Any]:
    """Return the same values in the narrowest integers that hold them."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for name in ("int8", "int16", "int32", "int64") if signed else ("uint8", "uint16", "uint32"):
        # Atoms are numbered within their structure: mostly a byte is enough, an eighth of what is counted in.
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return values.astype(name)
    raise AssertionError((low, high))


Int64Array = npt.NDArray[np.int64]


def ragged_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return the ranges starts[i] .. starts[i] + lengths[i] - 1, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    # One addition for all ranges: a loop over structures would take longer than reading them.
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def ragged_offsets(lengths: Int64Array) -> Int64Array:
    """Return where each of several runs of these lengths begins, and where the last one ends [n+1]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))
