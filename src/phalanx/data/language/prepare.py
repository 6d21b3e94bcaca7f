"""From text to token shards: in parallel, and restartable after any interruption.

Text is cut into pieces of a few megabytes in a fixed order; workers tokenize pieces; finished pieces are kept in a work
folder until all are there and are then joined, in order, into shards. The result depends on the inputs and options alone:
not on the number of workers, nor on how often the work was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from phalanx.data.language.documents import InputFile, available_cores, find_files, read_documents
from phalanx.data.language.manifest import (
    MANIFEST,
    SPLITS,
    Manifest,
    Split,
    TokenizerRecord,
    file_record,
    read_manifest,
)
from phalanx.data.language.tokenizer import (
    end_of_document,
    load_tokenizer,
    text_share,
    train_tokenizer,
    vocabulary_size,
)
from phalanx.data.language.writer import ShardWriter
from phalanx.errors import DataError
from phalanx.files import write_atomically

PIECE_BYTES = 2**22
"""Text of a piece, about: enough to keep a worker busy for seconds, little enough to lose."""
_PLAIN_SIZE = 4
"""Text bytes a compressed byte stands for, roughly; only for choosing what the tokenizer is trained on."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is (bytes of input, or pieces)."""


@dataclass(frozen=True)
class Options:
    """What the result depends on besides the text."""

    tokenizer: str | None = None
    """Path of a tokenizer; None trains one."""
    vocab_size: int = 32768
    """Entries of a tokenizer trained here."""
    end_token: str | None = None
    """Token that ends documents; None looks for a usual one."""
    text_field: str = "text"
    """Field of .jsonl and column of .parquet files that holds the text."""
    validation_fraction: float = 0.005
    """Share of documents held out, chosen by the hash of their text."""
    shard_tokens: int = 2**27
    """Tokens of a shard, about."""


@dataclass(frozen=True)
class Piece:
    """Tokenized documents: what a worker leaves behind."""

    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]
    """Tokens of each document, the end-of-document token included."""
    text_bytes: npt.NDArray[np.int64]
    """UTF-8 bytes of each document."""
    held_out: npt.NDArray[np.bool_]
    """Whether each document belongs to the validation split."""

    def save(self, path: Path) -> None:
        """Write atomically."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            np.savez(file, tokens=self.tokens, lengths=self.lengths, text_bytes=self.text_bytes, held_out=self.held_out)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Piece:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(stored["tokens"], stored["lengths"], stored["text_bytes"], stored["held_out"])


def prepare(
    inputs: Sequence[str],
    out: Path,
    options: Options,
    *,
    workers: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Tokenize `inputs` into `out`; returns at once when `out` holds just that already.

    workers: processes; None takes all cores. Raises DataError for unusable text, or when `out` holds other data.
    """
    files = find_files(inputs)
    plan = _plan(files, options)
    if (out / MANIFEST).exists():
        manifest = read_manifest(out)
        if manifest.plan != plan:
            raise DataError(f"{out} holds data prepared from other text or options; delete it or choose another --out")
        return manifest
    work = out / ".work"
    _claim(work, plan)
    tokenizer = _tokenizer(files, options, work / "tokenizer.json", progress)
    count = _tokenize(files, options, tokenizer, work, workers or available_cores(), progress)
    manifest = _join(list(inputs), options, plan, tokenizer, work, out, count, progress)
    shutil.rmtree(work)
    return manifest


def _plan(files: list[InputFile], options: Options) -> str:
    """A hash of all that the result depends on, as far as can be told without reading the text."""
    description: list[object] = [asdict(options), PIECE_BYTES, [(file.name, file.size) for file in files]]
    if options.tokenizer is not None:
        description.append(hashlib.sha256(load_tokenizer(Path(options.tokenizer)).to_str().encode()).hexdigest())
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _claim(work: Path, plan: str) -> None:
    """Keep a work folder of the same plan; clear one of another."""
    marker = work / "plan"
    if marker.exists() and marker.read_text() == plan:
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_atomically(marker, plan)


def _tokenizer(files: list[InputFile], options: Options, kept: Path, progress: Progress) -> Tokenizer:
    if not kept.exists():
        if options.tokenizer is not None:
            tokenizer = load_tokenizer(Path(options.tokenizer))
        else:
            total = sum(file.size * (_PLAIN_SIZE if file.compression else 1) for file in files)
            texts = (text for text, _ in _all_documents(files, options.text_field, "training the tokenizer", progress))
            tokenizer = train_tokenizer(texts, total, options.vocab_size)
        end_of_document(tokenizer, options.end_token)
        write_atomically(kept, tokenizer.to_str())
    return Tokenizer.from_file(str(kept))


def _all_documents(
    files: list[InputFile], text_field: str, what: str, progress: Progress
) -> Iterator[tuple[str, InputFile]]:
    total, done = sum(file.size for file in files), 0
    for file in files:
        for text in read_documents(file, text_field):
            yield text, file
        done += file.size
        progress(what, done, total)


def _pieces(files: list[InputFile], options: Options, progress: Progress) -> Iterator[list[str]]:
    """Documents in order, cut where a piece has grown large enough."""
    piece: list[str] = []
    size = 0
    for text, _ in _all_documents(files, options.text_field, "tokenizing", progress):
        piece.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _tokenize(
    files: list[InputFile], options: Options, tokenizer: Tokenizer, work: Path, workers: int, progress: Progress
) -> int:
    """Make every piece that is not there yet; returns how many there are."""
    end = end_of_document(tokenizer, options.end_token)
    count = 0
    # Pieces waiting for a worker hold text: no more of them than keeps all workers busy.
    room = threading.Semaphore(2 * workers)
    stopped = threading.Event()

    def missing() -> Iterator[tuple[list[str], Path]]:
        nonlocal count
        for number, texts in enumerate(_pieces(files, options, progress)):
            count = number + 1
            path = _piece_path(work, number)
            if not path.exists():
                room.acquire()
                if stopped.is_set():
                    return
                yield texts, path

    context = multiprocessing.get_context("forkserver")
    setup = (str(work / "tokenizer.json"), end, options.validation_fraction)
    with context.Pool(workers, _start_worker, setup) as pool:
        try:
            for _ in pool.imap_unordered(_tokenize_piece, missing()):
                room.release()
        finally:
            # The pool reads the pieces in a thread of its own, which must not wait for room when work stops early.
            stopped.set()
            room.release()
    if count == 0:
        raise DataError("the inputs hold no text at all: every document is empty")
    return count


def _piece_path(work: Path, number: int) -> Path:
    return work / f"piece-{number:06d}.npz"


_worker: tuple[Tokenizer, int, float] | None = None
"""What a worker process needs for every piece: tokenizer, end-of-document id, validation fraction."""


def _start_worker(tokenizer: str, end: int, validation_fraction: float) -> None:
    global _worker
    # One process a core is parallel enough.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded = Tokenizer.from_file(tokenizer)
    # A tokenizer.json may ask for cuts and padding, and text may spell out special tokens: documents are neither cut nor
    # ended by what they say.
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True
    _worker = (loaded, end, validation_fraction)


def _tokenize_piece(job: tuple[list[str], Path]) -> None:
    assert _worker is not None
    (texts, path), (tokenizer, end, fraction) = job, _worker
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    Piece(
        tokens=np.concatenate([np.array([*e.ids, end], dtype=np.uint32) for e in encoded]),
        lengths=np.array([len(e.ids) + 1 for e in encoded], dtype=np.int64),
        text_bytes=np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], dtype=np.int64),
        held_out=np.array([text_share(text) < fraction for text in texts], dtype=np.bool_),
    ).save(path)


def _join(
    inputs: list[str],
    options: Options,
    plan: str,
    tokenizer: Tokenizer,
    work: Path,
    out: Path,
    count: int,
    progress: Progress,
) -> Manifest:
    """Write the pieces, in order, as shards of each split; the manifest comes last."""
    size = vocabulary_size(tokenizer)
    dtype: Literal["uint16", "uint32"] = "uint16" if size <= 2**16 else "uint32"
    writers = {split: ShardWriter(out, split, np.dtype(dtype), options.shard_tokens) for split in SPLITS}
    for number in range(count):
        piece = Piece.load(_piece_path(work, number))
        ends = np.cumsum(piece.lengths)
        for index, end in enumerate(ends.tolist()):
            split: Split = "validation" if piece.held_out[index] else "train"
            tokens = piece.tokens[end - int(piece.lengths[index]) : end]
            writers[split].add(tokens, int(piece.text_bytes[index]))
        progress("writing shards", number + 1, count)
    splits = {split: writer.close() for split, writer in writers.items()}
    shutil.copyfile(work / "tokenizer.json", out / "tokenizer.json")
    manifest = Manifest(
        dtype=dtype,
        tokenizer=TokenizerRecord(
            file=file_record(out / "tokenizer.json"),
            vocab_size=size,
            end_of_document=end_of_document(tokenizer, options.end_token),
        ),
        validation_fraction=options.validation_fraction,
        inputs=inputs,
        plan=plan,
        splits=splits,
    )
    manifest.write(out)
    return manifest
