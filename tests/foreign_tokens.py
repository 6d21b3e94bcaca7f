"""Small writers of the token formats of other programs, after the published layouts of the files."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]
MEGATRON_FLAT = [token for sequence in SEQUENCES for token in sequence]


def write_megatron(
    prefix: Path, sequences: list[list[int]] = SEQUENCES, documents: list[int] | None = None, dtype: str = "uint16"
) -> Path:
    """Write a pair; `documents` is the first sequence of each document and the end, by default one a sequence."""
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    itemsize = np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(documents))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    at = 0
    for sequence in sequences:
        index += struct.pack("<q", at)
        at += len(sequence) * itemsize
    index += b"".join(struct.pack("<q", document) for document in documents)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    return prefix


Sample = dict[str, bytes]
TYPE_BYTES = {"uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65, "float32": 34}


def encode(ids: list[int], encoding: str, dtype: str = "int64") -> bytes:
    """A list of ids in a column of this encoding; `dtype` is the type where the encoding names none."""
    kind, *details = encoding.split(":")
    body = np.array(ids, details[0] if details else dtype).tobytes()
    if kind == "bytes" or len(details) == 2:
        return body
    power = 0 if len(ids) < 2**8 else 1 if len(ids) < 2**16 else 2
    shape = struct.pack("<B", 1 << 2 | power) + len(ids).to_bytes(1 << power, "little")
    return (b"" if details else bytes([TYPE_BYTES[dtype]])) + shape + body


def write_mds(
    folder: Path,
    shards: list[list[Sample]],
    columns: dict[str, tuple[str, int | None]],
    hashes: tuple[str, ...] = (),
) -> Path:
    """Write shards of samples, each a column's bytes by its name; `columns` maps a name to (encoding, fixed size)."""
    folder.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": list(hashes),
        "size_limit": 1 << 26,
        "version": 2,
    }
    index: dict[str, Any] = {"version": 2, "shards": []}
    for number, samples in enumerate(shards):
        config = json.dumps(common, sort_keys=True).encode()
        bodies = []
        for sample in samples:
            head = b"".join(struct.pack("<I", len(sample[n])) for n, (_, size) in columns.items() if not size)
            bodies.append(head + b"".join(sample[name] for name in columns))
        at = 4 + 4 * (len(samples) + 1) + len(config)
        offsets = [at]
        for body in bodies:
            at += len(body)
            offsets.append(at)
        content = (
            struct.pack("<I", len(samples)) + struct.pack(f"<{len(offsets)}I", *offsets) + config + b"".join(bodies)
        )
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(content)
        raw = {
            "basename": name,
            "bytes": len(content),
            "hashes": {algorithm: hashlib.new(algorithm, content).hexdigest() for algorithm in hashes},
        }
        index["shards"].append({**common, "raw_data": raw, "samples": len(samples), "zip_data": None})
    (folder / "index.json").write_text(json.dumps(index))
    return folder


LISTS = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11, 12]], [[13, 14, 15, 16], [17, 18, 19, 20], [21, 22, 23, 24]]]
MDS_FLAT = list(range(1, 25))


def write_tokens(
    folder: Path,
    encoding: str = "ndarray:uint16",
    lists: list[list[list[int]]] = LISTS,
    *,
    size: int | None = None,
    dtype: str = "int64",
    hashes: tuple[str, ...] = (),
) -> Path:
    """Write a folder whose only column is tokens."""
    shards = [[{"tokens": encode(ids, encoding, dtype)} for ids in shard] for shard in lists]
    return write_mds(folder, shards, {"tokens": (encoding, size)}, hashes)
