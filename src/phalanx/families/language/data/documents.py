"""Text as people have it: folders and files, one document after the other, in an order that never changes.

No more of a file is held than one document may have, however little of it is on disk: a few kilobytes can unpack to
terabytes.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, cast

from phalanx.errors import ConfigError, DataError

PYTHON_STDLIB = "python-stdlib"
"""Input that stands for the source text of the running interpreter's standard library."""
KINDS = (".txt", ".jsonl", ".parquet", ".arrow", ".py")
COMPRESSIONS = (".gz", ".zst")
_KNOWN_ENDINGS = f"{', '.join(KINDS)}, each also with {' or '.join(COMPRESSIONS)}"
MAX_DOCUMENT_BYTES = 2**24
"""Most bytes of a document, and of a line that holds one, unless more is asked for. Tokenizing one takes 170 times that."""
_PACKED_PARQUET_BYTES = 2**30
"""Most bytes of a compressed .parquet file once unpacked: it is read at random places, so all of it is held."""
_BATCH_BYTES = 2**28
"""Of rows of a .parquet file that are unpacked at a time."""
_BATCH_ROWS = 1024
_ZSTANDARD_BYTES = 2**10
"""Compressed bytes that are unpacked at a time: blocks of 4 bytes stand for up to 128 KiB each, so 32 MiB at most."""
_ARROW_FILE = b"ARROW1"
"""What an Arrow file with a footer begins with; a stream does not."""
_BYTE_ORDER_MARK = "\ufeff"
"""Some editors begin a file with it; it is no part of the text."""


@dataclass(frozen=True)
class InputFile:
    """One file of text."""

    path: Path
    name: str
    """How it was found: the input it belongs to and its place below."""
    kind: str
    """One of KINDS."""
    compression: str
    """One of COMPRESSIONS, or empty."""
    size: int
    """Bytes on disk."""


def find_files(inputs: Sequence[str]) -> list[InputFile]:
    """Find every file of text behind `inputs` (files, folders, `python-stdlib`), each folder in sorted order.

    Raises DataError for an input that does not exist, has an unknown ending, or is a folder without text.
    """
    files: list[InputFile] = []
    for given in inputs:
        path = Path(given)
        # Sorted within each folder: the order of documents, and so of samples, never changes.
        if given == PYTHON_STDLIB:
            found = _list_standard_library()
        elif path.is_dir():
            below = (_classify_file(p, p.relative_to(path).as_posix()) for p in sorted(path.rglob("*")) if p.is_file())
            found = [file for file in below if file is not None]
        elif path.is_file():
            file = _classify_file(path, path.name)
            if file is None:
                raise DataError(_explain_ending(path))
            found = [file]
        else:
            raise DataError(f"{path} does not exist; give files, folders, or {PYTHON_STDLIB}")
        if not found:
            raise DataError(f"{given}: no text files found; known endings: {_KNOWN_ENDINGS}")
        files += found
    return files


def _list_standard_library() -> list[InputFile]:
    """Return the sources of this Python's standard library, without packages that were installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not {"site-packages", "dist-packages", "__pycache__"} & set(relative.parts):
            files.append(InputFile(path, f"{PYTHON_STDLIB}/{relative.as_posix()}", ".py", "", path.stat().st_size))
    return files


def _explain_ending(path: Path) -> str:
    """Say that the ending of `path` is not known, and the known one nearest to it."""
    ending = "".join(path.suffixes[-2:] if path.suffix in COMPRESSIONS else path.suffixes[-1:])
    near = get_close_matches(ending, [kind + packed for kind in KINDS for packed in ("", *COMPRESSIONS)], 1, 0.5)
    hint = f"; nearest: {near[0]}" if near else ""
    return f"{path}: unknown ending {ending or '(none)'}; known endings: {_KNOWN_ENDINGS}{hint}"


def count_other_files(inputs: Sequence[str]) -> int:
    """Return how many files of the folders in `inputs` `find_files` passes over for their endings."""
    folders = [Path(given) for given in inputs if given != PYTHON_STDLIB and Path(given).is_dir()]
    paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum(_classify_file(path, path.name) is None for path in paths)


def read_texts(file: InputFile, text_field: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[str]:
    """Yield the text of every document of one file: the whole of a .txt, each line of a .jsonl, each row of a
    .parquet or .arrow.

    An empty text stands for one without: an empty file, null, Python source in no known encoding. text_field: the field or
    column that holds the text. max_bytes: of a document. Raises DataError naming file and line.
    """
    reader: Callable[[InputFile, str, int], Iterator[str]] = {
        ".txt": _read_text,
        ".py": _read_python,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
    }[file.kind]
    return reader(file, text_field, max_bytes)


def _classify_file(path: Path, name: str) -> InputFile | None:
    suffixes = path.suffixes
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes else ""
    return InputFile(path, name, kind, compression, path.stat().st_size) if kind in KINDS else None


def sample_hash(file: InputFile) -> str:
    """Return a hash of a file's bytes: of all up to 1 MiB, of 16 stretches of 64 KiB spread evenly over a larger file.

    Raises DataError when the file cannot be read.
    """
    digest = hashlib.sha256()
    with _explain_damage(file), file.path.open("rb") as stream:
        for number in range(16):
            stream.seek(number * max(0, file.size - 2**16) // 15)
            digest.update(stream.read(2**16))
    return digest.hexdigest()


@contextmanager
def _explain_damage(file: InputFile) -> Iterator[None]:
    """Turn whatever goes wrong with the file itself into a DataError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{file.path}: {error.strerror}; make it readable, or leave it out") from error
        what = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{file.path}: cannot be read: {what}; it is damaged or cut short: get it again, or leave it out"
        ) from error


def _open_unpacked(file: InputFile) -> IO[bytes]:
    if file.compression == ".gz":
        return cast(IO[bytes], gzip.open(file.path))
    if file.compression == ".zst":
        package = _import_extra("zstandard", file)
        return io.BufferedReader(_ZstandardFile(file.path.open("rb"), package))
    return cast(IO[bytes], file.path.open("rb"))


class _ZstandardFile(io.RawIOBase):
    """Frames one after the other, as `cat a.zst b.zst` makes them; the package's own reader hides a truncated end."""

    def __init__(self, stored: IO[bytes], package: Any) -> None:
        self._stored = stored
        self._package = package
        self._frame: Any = None
        self._rest = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        """Return True: io.BufferedReader asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; 0 at the end. Raises EOFError where the last frame is cut, OSError where one is damaged."""
        while not self._plain:
            compressed = self._rest or self._stored.read(_ZSTANDARD_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle")
                return 0
            if self._frame is None:
                # Files made with --long have windows of up to 2 GiB, which fill as text is read.
                self._frame = self._package.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                self._plain = memoryview(self._frame.decompress(compressed))
            except self._package.ZstdError as error:
                raise OSError(str(error)) from error
            # A file may hold several frames: what follows one begins the next.
            self._rest = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._plain))
        buffer[:size] = self._plain[:size]
        self._plain = self._plain[size:]
        return size

    def close(self) -> None:
        """Close the file underneath."""
        self._stored.close()
        super().close()


def _read_text(file: InputFile, _text_field: str, max_bytes: int) -> Iterator[str]:
    with _explain_damage(file), _open_unpacked(file) as stream:
        yield _read_whole(file, stream, max_bytes).decode().removeprefix(_BYTE_ORDER_MARK)


def _read_python(file: InputFile, _text_field: str, max_bytes: int) -> Iterator[str]:
    """Yield Python source decoded as it declares (PEP 263), or the empty text where that fails."""
    with _explain_damage(file), _open_unpacked(file) as stream:
        content = _read_whole(file, stream, max_bytes)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    # Test suites of Python hold files that are wrong on purpose.
    except (SyntaxError, UnicodeError, LookupError):
        text = ""
    yield _whole_characters(text)


def _read_whole(file: InputFile, stream: IO[bytes], max_bytes: int) -> bytes:
    # One byte more than allowed tells a document that is too long from one that just fits.
    content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_long(f"{file.path}: a document", max_bytes)
    return content


def _too_long(what: str, max_bytes: int) -> DataError:
    return DataError(
        f"{what} of more than {max_bytes:,} bytes; split it, write .jsonl with a document a line, or allow more with "
        "--max-document-bytes"
    )


def _read_jsonl(file: InputFile, text_field: str, max_bytes: int) -> Iterator[str]:
    """Yield the text of each line. Raises DataError naming the line that is too long, no JSON object, or without text."""
    with _explain_damage(file), _open_unpacked(file) as stream:
        number = 0
        # Bounded: a file without line ends must not be held as one line.
        while line := stream.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes:
                raise _too_long(f"{file.path}, line {number}: a line", max_bytes)
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK.encode())
            if not line.strip():
                continue
            where = f"{file.path}, line {number}"
            try:
                row = json.loads(line.rstrip())
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}, character {error.pos + 1}: not JSON: {error.msg}; mend the line, or take it out"
                ) from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where}: not JSON that can be read: {error}; mend the line, or take it out"
                ) from error
            if not isinstance(row, dict):
                example = f'{{{json.dumps(text_field)}: "..."}}'
                raise DataError(f"{where}: found {type(row).__name__}; every line must be an object, as in {example}")
            text = row.get(text_field)
            if text is None and text_field in row:
                text = ""
            if not isinstance(text, str):
                kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in list(row.items())[:8])
                raise DataError(
                    f"{where}: field {text_field!r} holds no text; found: {kinds or 'nothing'}; name the field with "
                    "--text-field"
                )
            yield _whole_characters(text)


def _whole_characters(text: str) -> str:
    """Replace halves of characters, which JSON and some encodings can spell and no encoding can write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_parquet(file: InputFile, text_field: str, max_bytes: int) -> Iterator[str]:
    """Yield the texts of a column, some rows at a time, so that no batch unpacks to more than fits in memory."""
    parquet = _import_extra("pyarrow.parquet", file)
    # pyarrow's own errors are ValueErrors or OSErrors where a file is damaged.
    with _explain_damage(file), _open_unpacked(file) as stream:
        unpacked = stream
        if file.compression:
            # Read at random places, which a compressed stream has not: all of it is held.
            content = stream.read(_PACKED_PARQUET_BYTES + 1)
            if len(content) > _PACKED_PARQUET_BYTES:
                raise DataError(
                    f"{file.path}: unpacks to more than {_PACKED_PARQUET_BYTES:,} bytes, and all of a .parquet file is "
                    f"held that is compressed as a whole; unpack it first"
                )
            unpacked = io.BytesIO(content)
        table = parquet.ParquetFile(unpacked)
        _require_column(file, table.schema_arrow, text_field)
        # Values are compressed: how much they unpack to is looked up before any is unpacked. One value of a dictionary may
        # stand in every row, so that a row may be as long as all that its row group stores.
        most = 1
        for number in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(number)
            for place in range(group.num_columns):
                column = group.column(place)
                if column.path_in_schema != text_field:
                    continue
                if column.total_uncompressed_size > max_bytes * max(1, column.num_values) + 2**20:
                    raise _too_long(f"{file.path}, row group {number}: a document", max_bytes)
                most = max(most, column.total_uncompressed_size)
        rows = int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // most)))
        batches = table.iter_batches(batch_size=rows, columns=[text_field])
        yield from _texts_of_batches(file, batches, text_field, max_bytes)


def _read_arrow(file: InputFile, text_field: str, max_bytes: int) -> Iterator[str]:
    """Yield texts of an Arrow file: the stream that Hugging Face datasets write, or the format with a footer."""
    ipc = _import_extra("pyarrow.ipc", file)
    with _explain_damage(file), _open_unpacked(file) as stream:
        head = stream.peek(len(_ARROW_FILE))[: len(_ARROW_FILE)]  # type: ignore[attr-defined]
        if head == _ARROW_FILE:
            # The body of a file is a stream, behind its mark padded to eight bytes.
            stream.read(8)
        reader = ipc.open_stream(stream)
        _require_column(file, reader.schema, text_field)
        yield from _texts_of_batches(file, reader, text_field, max_bytes)


def _require_column(file: InputFile, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"{file.path}: no column {text_field!r}; found: {', '.join(schema.names)}; name it with --text-field"
        )


def _texts_of_batches(file: InputFile, batches: Iterable[Any], text_field: str, max_bytes: int) -> Iterator[str]:
    """Yield the texts of record batches; an empty one for null. Raises DataError for other types and long documents."""
    row = 0
    for batch in batches:
        for value in batch.column(batch.schema.get_field_index(text_field)):
            row += 1
            text = value.as_py()
            if text is None:
                yield ""
            elif not isinstance(text, str):
                kind = batch.schema.field(text_field).type
                raise DataError(
                    f"{file.path}: column {text_field!r} holds {kind}, not text; name one with --text-field"
                )
            # A character has at most 4 bytes, so most texts need not be encoded to be measured.
            elif len(text) * 4 > max_bytes and len(text.encode()) > max_bytes:
                raise _too_long(f"{file.path}, row {row}: a document", max_bytes)
            else:
                yield text


def _import_extra(module: str, file: InputFile) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{file.path} needs the package {package}; install the extra: pip install 'phalanx-train[data]'"
        ) from error
