"""The JSON texts of a checkpoint: what manifest.json and state.json may say, and refusing what is impossible.

Nothing here opens a file. A manifest that passes describes each tensor completely and exactly once, and claims no more bytes
than its files are said to hold, so that nothing a reader allocates can be larger than what is on disk. A state comes back
exactly as it went in, and is read without trusting who wrote it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from phalanx.errors import CheckpointError

FORMAT: Final = "phalanx-checkpoint"
VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
FOLDER_NAME = re.compile(r"step-([0-9]{8,18})")
MAX_MANIFEST_BYTES = 1 << 30
MAX_HEADER_BYTES = 1 << 24
MAX_NAME_LENGTH = 1024

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Every dtype a checkpoint can hold, by the name the manifest uses."""


def step_name(step: int) -> str:
    """Return the name of the folder that holds the checkpoint of `step`."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step whose checkpoint a folder called `name` holds; None for any other name."""
    match = FOLDER_NAME.fullmatch(name)
    # More than eight digits are fine for steps that need them; "step-000000120" is not the name of step 120.
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def _check_file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name) or name.startswith("."):
        raise ValueError("a file is named with letters, digits, '.', '_' and '-' only, and stays in its own folder")
    return name


def _check_dtype_name(name: str) -> str:
    if name not in DTYPES:
        raise ValueError("not a dtype that a checkpoint holds")
    return name


def check_tensor_name(name: str) -> str:
    """Return `name`. Raises ValueError for names that could not be told apart in a message or in a data file's keys."""
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable() or "@" in name:
        raise ValueError(f"a tensor's name is 1 to {MAX_NAME_LENGTH} printable characters without '@'")
    return name


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Dims = Annotated[list[Count], Field(max_length=32)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
"""CRC-32 as eight hexadecimal digits."""
FileName = Annotated[str, AfterValidator(_check_file_name)]
TensorName = Annotated[str, AfterValidator(check_tensor_name)]


class Record(BaseModel):
    """Part of a manifest: nothing missing, nothing unknown, no value converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Chunk(Record):
    """A box of a tensor, stored in one piece: `sizes` elements a dim, the first at `offsets`."""

    offsets: Dims
    sizes: Dims
    file: FileName
    key: str = Field(max_length=2 * MAX_NAME_LENGTH)
    crc32: Checksum


class TensorRecord(Record):
    """A tensor of global `shape`, and the chunks that make it up."""

    name: TensorName
    dtype: Annotated[str, AfterValidator(_check_dtype_name)]
    shape: Dims
    chunks: list[Chunk]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        return DTYPES[self.dtype]


class FileRecord(Record):
    """A data file: its length, and the length and checksum of what precedes the tensors (safetensors' header)."""

    name: FileName
    bytes: Count
    header_bytes: Annotated[int, Field(ge=8, le=MAX_HEADER_BYTES)]
    header_crc32: Checksum


class StateRecord(Record):
    """Length and checksum of state.json."""

    bytes: Annotated[int, Field(ge=0, le=MAX_STATE_BYTES)]
    crc32: Checksum


class Manifest(Record):
    """The table of contents of one checkpoint."""

    format: Literal["phalanx-checkpoint"]
    version: Literal[1]
    step: Count
    world_size: Annotated[int, Field(ge=1)]
    """Ranks that wrote the checkpoint; any number may read it."""
    state: StateRecord
    files: list[FileRecord]
    tensors: list[TensorRecord]


def compute_checksum(data: bytes | memoryview) -> str:
    """Return the CRC-32 of `data`, as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def count_bytes(sizes: Iterable[int], dtype: torch.dtype) -> int:
    """Return the bytes of a box of `sizes` elements a dim."""
    return math.prod(sizes) * dtype.itemsize


@dataclass(frozen=True)
class TensorShape:
    """Name, dtype and global shape of a tensor."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class RankReport:
    """What one rank wrote: its files, and the manifest's entries of the chunks in them."""

    files: list[FileRecord]
    chunks: dict[str, list[str]]
    """Entries of each tensor's chunks as JSON text. Every rank renders its own, so that rank 0, whose training continues
    meanwhile, has little to do for each chunk."""


_TRAILER = re.compile(rb'"crc32": "([0-9a-f]{8})"\n\}\n\Z')


def render_manifest(
    step: int, state: StateRecord, tensors: Sequence[TensorShape], reports: Sequence[RankReport]
) -> bytes:
    """Return the text of manifest.json: a line for each file and tensor, then the checksum of all that precedes it.

    tensors: every tensor of the checkpoint. reports: one for each rank, in rank order.
    """
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "world_size": len(reports),
        "state": state.model_dump(),
    }
    files = [json.dumps(file.model_dump()) for report in reports for file in report.files]
    chunks: dict[str, list[str]] = {tensor.name: [] for tensor in tensors}
    for report in reports:
        for name, entries in report.chunks.items():
            chunks[name] += entries
    # Chunks come as text that each rank rendered: nothing is parsed and rendered again on rank 0.
    lines = [
        json.dumps(asdict(tensor))[:-1] + f', "chunks": [{", ".join(chunks[tensor.name])}]}}' for tensor in tensors
    ]
    body = "{\n" + "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items())
    body += '"files": [\n' + ",\n".join(files) + '\n],\n"tensors": [\n' + ",\n".join(lines) + "\n],\n"
    return body.encode() + f'"crc32": "{compute_checksum(body.encode())}"\n}}\n'.encode()


def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest that `text` holds. Raises ValueError with one line saying what is wrong with it."""
    # The checksum stands last, so that it covers all else and a file that was cut short has none.
    trailer = _TRAILER.search(text[-64:])
    if trailer is None:
        raise ValueError("does not end with its checksum: truncated, or not a manifest")
    expected = trailer[1].decode()
    found = compute_checksum(memoryview(text)[: len(text) - len(trailer[0])])
    if found != expected:
        raise ValueError(f"checksum expected {expected}, found {found}")
    fields = parse_json(text, max_nested=max_nested_of_table(text))
    # Before the fields are checked one by one: of another version they would all look wrong.
    if isinstance(fields, dict) and fields.get("format") == FORMAT and fields.get("version") != VERSION:
        raise ValueError(f"format version {fields.get('version')!r} is unknown; this program reads version {VERSION}")
    # Checked above, over the text itself; the schema knows nothing of it.
    if isinstance(fields, dict):
        fields.pop("crc32", None)
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"{where}={str(problem['input'])[:80]!r}: {problem['msg']}") from None
    for tensor in manifest.tensors:
        _check_chunks(tensor)
    _check_files(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    """Refuse names given twice, and files whose length is not that of their header and chunks together."""
    # A name given twice would let two entries claim the same bytes, or the second hide the first.
    _refuse_repeats("file", (file.name for file in manifest.files))
    _refuse_repeats("tensor", (tensor.name for tensor in manifest.tensors))
    chunk_bytes: dict[str, int] = defaultdict(int)
    keys: set[tuple[str, str]] = set()
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            if (chunk.file, chunk.key) in keys:
                raise ValueError(f"tensor {tensor.name!r}: key {chunk.key!r} of {chunk.file} is used twice")
            keys.add((chunk.file, chunk.key))
            chunk_bytes[chunk.file] += count_bytes(chunk.sizes, tensor.torch_dtype)
    for file in manifest.files:
        claimed = file.header_bytes + chunk_bytes.pop(file.name, 0)
        if claimed != file.bytes:
            raise ValueError(f"{file.name} is {file.bytes} bytes, but header and chunks make {claimed}")
    if chunk_bytes:
        raise ValueError(f"chunks lie in {min(chunk_bytes)}, which is not listed under files")


def _refuse_repeats(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name[:80]!r} appears twice")
        seen.add(name)


MAX_COMPARED_PAIRS = 1_000_000
"""Pairs of chunks compared to name two that overlap."""
PRIME = 2**127 - 1
"""Order of the field that `_holds_each_element_once` computes in, a Mersenne prime."""


def _check_chunks(tensor: TensorRecord) -> None:
    """Refuse chunks that do not make up the tensor exactly: together as many elements as it has, inside it, none twice."""
    covered = 0
    for chunk in tensor.chunks:
        if len(chunk.offsets) != len(tensor.shape) or len(chunk.sizes) != len(tensor.shape):
            raise ValueError(
                f"tensor {tensor.name!r} has {len(tensor.shape)} dims, its chunk at {chunk.offsets} does not"
            )
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if 0 in chunk.sizes or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"tensor {tensor.name!r}: chunk {chunk.sizes} at {chunk.offsets} is not in {tensor.shape}")
        covered += math.prod(chunk.sizes)
    if covered != math.prod(tensor.shape):
        raise ValueError(f"tensor {tensor.name!r}: chunks hold {covered} of {math.prod(tensor.shape)} elements")
    # PyTorch counts the strides of a tensor without elements as if each of its dims had one.
    if count_bytes((max(size, 1) for size in tensor.shape), tensor.torch_dtype) >= 1 << 63:
        raise ValueError(f"tensor {tensor.name!r}: a tensor of shape {tensor.shape} is larger than any memory")
    _refuse_overlap(tensor)


def _refuse_overlap(tensor: TensorRecord) -> None:
    """Refuse chunks of which two overlap, naming two where they are soon found.

    Sweeps along the dim in which the chunks begin at the most places, comparing each chunk only with those still open.
    """
    if len(tensor.chunks) < 2 or _holds_each_element_once(tensor):
        return
    dims = range(len(tensor.shape))
    # There the fewest chunks are open at once, and the fewest pairs are compared.
    sweep = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in tensor.chunks}))
    open_chunks: list[tuple[int, int]] = []
    ordered = sorted(tensor.chunks, key=lambda chunk: chunk.offsets[sweep])
    compared = 0
    # Sorted by where they end, so that those that the sweep has passed stand in front.
    for index, chunk in enumerate(ordered):
        while open_chunks and open_chunks[0][0] <= chunk.offsets[sweep]:
            open_chunks.pop(0)
        for _, other in open_chunks:
            if _boxes_overlap(chunk, ordered[other]):
                raise ValueError(
                    f"tensor {tensor.name!r}: chunks at {ordered[other].offsets} and {chunk.offsets} overlap"
                )
        compared += len(open_chunks)
        # A hostile manifest can make every chunk meet every other; that two overlap is known without naming them.
        if compared > MAX_COMPARED_PAIRS:
            break
        insort(open_chunks, (chunk.offsets[sweep] + chunk.sizes[sweep], index))
    raise ValueError(f"tensor {tensor.name!r}: two of its {len(tensor.chunks):,} chunks overlap")


def _holds_each_element_once(tensor: TensorRecord) -> bool:
    """Return whether chunks that lie in the tensor, and hold as many elements as it has, hold each element once.

    The element at (i, j, ...) stands for the monomial x^i y^j ...; the monomials of a box add up to a product of differences
    of two powers. The sum over the chunks and the sum over the tensor are the same polynomial only if each element is held
    once. Both are evaluated at a random point of a prime field, where different polynomials agree with a probability under
    1e-18 (Schwartz and Zippel). The time grows with the number of chunks, not with its square.
    """
    # From the system's generator: a manifest made to pass at known points must not pass.
    points = [secrets.randbelow(PRIME - 2) + 2 for _ in tensor.shape]
    powers: dict[tuple[int, int], int] = {}

    def power_of(dim: int, exponent: int) -> int:
        if (dim, exponent) not in powers:
            powers[dim, exponent] = pow(points[dim], exponent, PRIME)
        return powers[dim, exponent]

    def sum_box(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            product = product * (power_of(dim, start) - power_of(dim, start + size)) % PRIME
        return product

    held = sum(sum_box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks)
    return (held - sum_box([0] * len(tensor.shape), tensor.shape)) % PRIME == 0


def _boxes_overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


MAX_STATE_BYTES = 1 << 24
MAX_NESTED = 200_000
"""Objects and lists in a state, or in any short text. They are what makes JSON slow to read: many fit in few bytes."""
MAX_DEPTH = 64


def render_state(state: dict[str, Any]) -> bytes:
    """Return the text of state.json. Raises CheckpointError naming the first value that JSON would lose or change."""
    if not isinstance(state, dict):
        raise CheckpointError(f"state is a {type(state).__name__}; a dict is expected")
    _check_value(state, "state", 0)
    text = json.dumps(state, indent=1, allow_nan=False).encode() + b"\n"
    # What a reader would refuse must not be written: the run would find out only when it resumes.
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"state is {len(text)} bytes of JSON, more than {MAX_STATE_BYTES}; save large data as tensors"
        )
    # A reader counts before it parses, so that a small text cannot build millions of objects.
    if (nested := count_nested(text)) > MAX_NESTED:
        raise CheckpointError(f"state has {nested:,} objects and lists, more than {MAX_NESTED:,}; save tensors")
    return text


def _check_value(value: Any, where: str, depth: int) -> None:
    """Refuse what is not a JSON value; `where` names it as the user would write it."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where}: nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, dict):
        for key, entry in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where}: key {key!r} is a {type(key).__name__}; JSON keys are strings")
            _check_value(entry, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_value(entry, f"{where}[{index}]", depth + 1)
    elif type(value) is float and not math.isfinite(value):
        raise CheckpointError(f"{where}={value} is not a finite number; JSON has no word for it")
    # By exact type: json.dumps writes subclasses, such as NumPy's float64, which come back as plain numbers.
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(f"{where} is a {type(value).__name__}; use dict, list, str, int, float, bool or None")


def parse_json(text: bytes, *, max_nested: int) -> Any:
    """Return the JSON value that `text` holds. Raises ValueError for anything else, also for a repeated key and for NaN.

    max_nested: objects and lists it may have; counted in the text, so that nothing is built of a text with more.
    """
    nested = count_nested(text)
    if nested > max_nested:
        raise ValueError(f"{nested:,} objects and lists, more than the {max_nested:,} it may have")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def count_nested(text: bytes) -> int:
    """Return the most objects and lists that JSON `text` can hold: brackets within strings count as well."""
    return text.count(b"{") + text.count(b"[")


def max_nested_of_table(text: bytes | bytearray) -> int:
    """Return the objects and lists that a manifest or header of this length may have.

    Each of its lines says far more than brackets, so a text of little else is not a table of contents.
    """
    return max(MAX_NESTED, len(text) // 8)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of two equal keys, other readers the first: such a text has no one meaning.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {repeated[:80]!r} appears twice")
    return unique


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
