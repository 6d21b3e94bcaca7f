"""Text as people have it: folders and files, one document after the other, in an order that never changes."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, cast

from phalanx.errors import ConfigError, DataError

PYTHON_STDLIB = "python-stdlib"
"""Input that stands for the source text of the running interpreter's standard library."""
KINDS = (".txt", ".jsonl", ".parquet", ".py")
COMPRESSIONS = (".gz", ".zst")


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
    """Every file of text behind `inputs` (files, folders, `python-stdlib`), each folder in sorted order.

    Raises DataError for an input that does not exist, has an unknown ending, or is a folder without text.
    """
    files: list[InputFile] = []
    for given in inputs:
        found = _standard_library() if given == PYTHON_STDLIB else _below(Path(given))
        if not found:
            raise DataError(f"{given}: no text files found; known endings: {_known_endings()}")
        files += found
    return files


def read_documents(file: InputFile, text_field: str) -> Iterator[str]:
    """The documents of one file that are not empty: the whole of a .txt, each line of a .jsonl, each row of a .parquet.

    text_field: the field or column that holds the text. Raises DataError naming file and line.
    """
    reader: Callable[[InputFile, str], Iterator[str]] = {
        ".txt": _read_text,
        ".py": _read_python,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }[file.kind]
    return (text for text in reader(file, text_field) if text)


def _below(path: Path) -> list[InputFile]:
    if path.is_file():
        file = _classify(path, path.name)
        if file is None:
            near = get_close_matches(path.suffix, [*KINDS, *COMPRESSIONS], 1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise DataError(
                f"{path}: unknown ending {path.suffix or '(none)'}; known endings: {_known_endings()}{hint}"
            )
        return [file]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give files, folders, or {PYTHON_STDLIB}")
    found = (_classify(p, p.relative_to(path).as_posix()) for p in sorted(path.rglob("*")) if p.is_file())
    return [file for file in found if file is not None]


def _standard_library() -> list[InputFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not {"site-packages", "dist-packages", "__pycache__"} & set(relative.parts):
            files.append(InputFile(path, f"{PYTHON_STDLIB}/{relative.as_posix()}", ".py", "", path.stat().st_size))
    return files


def _classify(path: Path, name: str) -> InputFile | None:
    suffixes = path.suffixes
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes else ""
    return InputFile(path, name, kind, compression, path.stat().st_size) if kind in KINDS else None


def _known_endings() -> str:
    return f"{', '.join(KINDS)}, each also with {' or '.join(COMPRESSIONS)}"


def _open(file: InputFile) -> IO[bytes]:
    if file.compression == ".gz":
        return cast(IO[bytes], gzip.open(file.path))
    if file.compression == ".zst":
        # Buffered, since zstandard's own reader knows no lines.
        return io.BufferedReader(_extra("zstandard", file).open(file.path, "rb"))
    return file.path.open("rb")


def _read_text(file: InputFile, _text_field: str) -> Iterator[str]:
    try:
        with _open(file) as stream:
            yield stream.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error
    except (OSError, EOFError) as error:
        raise DataError(f"{file.path}: cannot be read: {error}") from error


def _read_python(file: InputFile, _text_field: str) -> Iterator[str]:
    """Python source in the encoding it declares (PEP 263); a file that does not hold to it is left out."""
    with _open(file) as stream:
        content = stream.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        yield content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return


def _read_jsonl(file: InputFile, text_field: str) -> Iterator[str]:
    with _open(file) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _text_of(line, text_field, f"{file.path}, line {number}")
        except (OSError, EOFError) as error:
            raise DataError(f"{file.path}: cannot be read: {error}") from error


def _text_of(line: bytes, text_field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is expected, found {type(row).__name__}")
    text = row.get(text_field)
    if not isinstance(text, str):
        kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in list(row.items())[:8])
        raise DataError(
            f"{where}: field {text_field!r} holds no text; found: {kinds}; name the field with --text-field"
        )
    # JSON can spell half a character, which no encoding can write.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_parquet(file: InputFile, text_field: str) -> Iterator[str]:
    parquet = _extra("pyarrow.parquet", file)
    with _open(file) as stream:
        table = parquet.ParquetFile(stream if not file.compression else io.BytesIO(stream.read()))
        if text_field not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise DataError(f"{file.path}: no column {text_field!r}; found: {names}; name it with --text-field")
        for batch in table.iter_batches(columns=[text_field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)


def _extra(module: str, file: InputFile) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{file.path} needs the package {package}; install the extra: pip install 'phalanx-train[data]'"
        ) from error


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
