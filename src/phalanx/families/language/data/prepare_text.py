"""From text to token shards: in parallel, and restartable after any interruption.

Text is cut into pieces of a few megabytes in a fixed order; workers tokenize pieces; finished pieces are kept in a work
folder until all are there and are then joined, in order, into shards. The result depends on the inputs and options alone:
not on the number of workers, nor on how often the work was interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from phalanx.data.prepared_folder import file_record
from phalanx.errors import DataError
from phalanx.families.language.data.documents import (
    MAX_DOCUMENT_BYTES,
    InputFile,
    count_other_files,
    find_files,
    read_texts,
    sample_hash,
)
from phalanx.families.language.data.token_shards import (
    MANIFEST,
    SPLITS,
    Manifest,
    PassedOver,
    ShardWriter,
    Split,
    SplitRecord,
    TokenizerRecord,
    read_token_manifest,
)
from phalanx.families.language.data.tokenize_pieces import Piece, Settings, tokenize_pieces
from phalanx.families.language.data.tokenizer import (
    check_trainable,
    end_of_document,
    load_tokenizer,
    parse_tokenizer,
    text_share,
    train_tokenizer,
    vocabulary_size,
)
from phalanx.files import clear_halves, write_atomically
from phalanx.hardware.host import available_cores
from phalanx.locks import FolderLock

PIECE_BYTES = 2**22
"""Text of a piece, about: enough to keep a worker busy for seconds, little enough to lose."""
_PLAIN_SIZE = 4
"""Text bytes a compressed byte stands for, roughly; only for choosing what the tokenizer is trained on."""

_LOCK = ".prepare.lock"
_WORK = ".work"

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


def prepare(
    inputs: Sequence[str],
    out: Path,
    options: Options,
    *,
    workers: int | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Tokenize `inputs` into `out`; returns at once when `out` holds just that already.

    workers: processes; None takes all cores. max_document_bytes: a longer document is refused before more of it is read.
    Stopped in any way, the same call goes on with the pieces that are done.

    Raises:
        ConfigError: options that do not fit each other or the tokenizer.
        DataError: unusable text; `out` holds other data or files, is in use by another process or cannot be written,
            for want of room or otherwise; a worker was killed.
    """
    given = _given_tokenizer(options)
    files = find_files(inputs)
    plan = _plan(files, options, given)
    try:
        finished = _finished(out, plan)
        if finished is not None:
            return finished
        if out.exists() and not out.is_dir():
            raise DataError(f"{out} is a file; choose another --out")
        with FolderLock(out / _LOCK, DataError, "--out"):
            # Another process may have done it all before we got the lock.
            return _finished(out, plan) or _Job(
                list(inputs), files, options, plan, out, progress, max_document_bytes
            ).run(given, workers)
    except OSError as error:
        raise _cannot_write(out, error) from error


def _given_tokenizer(options: Options) -> Tokenizer | None:
    """The tokenizer that the options name, None where one is to be trained; wrong options are refused."""
    if options.tokenizer is None:
        check_trainable(options.vocab_size, options.end_token)
        return None
    given = load_tokenizer(Path(options.tokenizer))
    end_of_document(given, options.end_token)
    return given


def _plan(files: list[InputFile], options: Options, given: Tokenizer | None) -> str:
    """A hash of all that the result depends on, as far as can be told without reading all of the text."""
    chosen = asdict(options)
    chosen["tokenizer"] = None if given is None else hashlib.sha256(given.to_str().encode()).hexdigest()
    described = [(file.name, file.size, sample_hash(file)) for file in files]
    return hashlib.sha256(json.dumps([chosen, PIECE_BYTES, described]).encode()).hexdigest()


def _finished(out: Path, plan: str) -> Manifest | None:
    """The manifest of `out` if that is done, None if there is none. Raises DataError for that of another plan."""
    if not (out / MANIFEST).exists():
        return None
    manifest = read_token_manifest(out)
    if manifest.plan != plan:
        raise DataError(f"{out} holds data prepared from other text or options; delete it or choose another --out")
    shutil.rmtree(out / _WORK, ignore_errors=True)
    return manifest


def _cannot_write(out: Path, error: OSError) -> DataError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return DataError(
        f"{error.filename or out}: {error.strerror or error}; {'make room' if full else 'put that right'} and run the "
        f"same command again, which goes on with what is done, or choose another --out"
    )


@dataclass(frozen=True)
class _Job:
    """One preparation, in an `out` that is locked."""

    inputs: list[str]
    files: list[InputFile]
    options: Options
    plan: str
    out: Path
    progress: Progress
    max_document_bytes: int

    def run(self, given: Tokenizer | None, workers: int | None) -> Manifest:
        """Do what is not done yet. given: the tokenizer; None trains one."""
        self._claim()
        tokenizer = self._tokenizer(given)
        pieces, without_text = self._tokenize(tokenizer, workers or available_cores())
        passed_over = PassedOver(documents=without_text, files=count_other_files(self.inputs))
        manifest = self._join(pieces, tokenizer, passed_over)
        shutil.rmtree(self._work, ignore_errors=True)
        return manifest

    @property
    def _work(self) -> Path:
        """Where everything lies until it is whole."""
        return self.out / _WORK

    def _claim(self) -> None:
        """Keep what was done under the same plan; clear what was done under another."""
        work, marker = self._work, self._work / "plan"
        if marker.exists() and marker.read_text() == self.plan:
            clear_halves(work)
            return
        others = [] if work.exists() else sorted(p.name for p in self.out.iterdir() if not p.name.startswith("."))
        if others:
            shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            raise DataError(f"{self.out} holds other files ({shown}); choose another --out, or an empty folder")
        if work.exists():
            shutil.rmtree(work)
        work.mkdir()
        write_atomically(marker, self.plan)

    def _tokenizer(self, given: Tokenizer | None) -> Tokenizer:
        kept = self._work / "tokenizer.json"
        if not kept.exists():
            made = given or train_tokenizer(*self._tokenizer_sample(), self.options.vocab_size)
            write_atomically(kept, made.to_str())
        return parse_tokenizer(kept.read_bytes(), kept)

    def _tokenizer_sample(self) -> tuple[Iterator[str], int]:
        """The documents of the training split, so that held-out text stays unseen, and the bytes of all text, about."""
        total = sum(file.size * (_PLAIN_SIZE if file.compression else 1) for file in self.files)
        texts = self._texts("training the tokenizer")
        return (text for text in texts if text and text_share(text) >= self.options.validation_fraction), total

    def _texts(self, what: str) -> Iterator[str]:
        """Yield the text of every document, empty for those without."""
        total, done = sum(file.size for file in self.files), 0
        for file in self.files:
            yield from read_texts(file, self.options.text_field, self.max_document_bytes)
            done += file.size
            self.progress(what, done, total)

    def _tokenize(self, tokenizer: Tokenizer, workers: int) -> tuple[list[Path], int]:
        """Make every piece that is not there yet; return all of them, in order, and the number of documents without text."""
        pieces: list[Path] = []
        without_text = 0

        def documents() -> Iterator[str]:
            nonlocal without_text
            for text in self._texts("tokenizing"):
                without_text += not text
                if text:
                    yield text

        def missing() -> Iterator[tuple[list[str], Path]]:
            for number, texts in enumerate(_cut(documents())):
                pieces.append(self._work / f"piece-{number:06d}.npz")
                if not pieces[-1].exists():
                    yield texts, pieces[-1]

        end = end_of_document(tokenizer, self.options.end_token)
        kept = self._work / "tokenizer.json"
        settings = Settings(kept, self.options.tokenizer or str(kept), end, self.options.validation_fraction)
        try:
            tokenize_pieces(missing(), settings, workers)
        finally:
            # Where one worker fails the others are ended in the midst of theirs: what they hold of a full disk goes too.
            clear_halves(self._work)
        if not pieces:
            raise DataError("the inputs hold no text at all: every document is empty")
        return pieces, without_text

    def _join(self, pieces: list[Path], tokenizer: Tokenizer, passed_over: PassedOver) -> Manifest:
        """Write the pieces, in order, as shards of each split; the manifest comes last."""
        size = vocabulary_size(tokenizer)
        dtype: Literal["uint16", "uint32"] = "uint16" if size <= 2**16 else "uint32"
        whole = self._work / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        splits = self._write_shards(pieces, whole, np.dtype(dtype))
        if not splits["train"].tokens:
            raise DataError(
                "every document fell into the validation split; lower --validation-fraction (0 holds out none)"
            )
        shutil.copyfile(self._work / "tokenizer.json", whole / "tokenizer.json")
        manifest = Manifest(
            dtype=dtype,
            tokenizer=TokenizerRecord(
                file=file_record(whole / "tokenizer.json"),
                vocab_size=size,
                end_of_document=end_of_document(tokenizer, self.options.end_token),
            ),
            validation_fraction=self.options.validation_fraction,
            inputs=self.inputs,
            plan=self.plan,
            passed_over=passed_over,
            splits=splits,
        )
        for file in whole.iterdir():
            file.replace(self.out / file.name)
        manifest.write(self.out)
        return manifest

    def _write_shards(
        self, pieces: list[Path], folder: Path, dtype: np.dtype[np.unsignedinteger]
    ) -> dict[Split, SplitRecord]:
        writers = {split: ShardWriter(folder, split, dtype, self.options.shard_tokens) for split in SPLITS}
        for number, path in enumerate(pieces, 1):
            piece = Piece.load(path)
            ends = np.cumsum(piece.lengths)
            for index, end in enumerate(ends.tolist()):
                split: Split = "validation" if piece.held_out[index] else "train"
                tokens = piece.tokens[end - int(piece.lengths[index]) : end]
                writers[split].add(tokens, int(piece.text_bytes[index]))
            self.progress("writing shards", number, len(pieces))
        return {split: writer.close() for split, writer in writers.items()}


def _cut(documents: Iterator[str]) -> Iterator[list[str]]:
    """Documents in order, in lists cut where they have grown large enough."""
    piece: list[str] = []
    size = 0
    for text in documents:
        piece.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
