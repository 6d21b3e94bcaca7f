"""From text to token shards: in parallel, and restartable after any interruption.

Text is cut into pieces of a few megabytes in a fixed order; workers tokenize pieces; finished pieces are kept in a work
folder until all are there and are then joined, in order, into shards. The result depends on the inputs and options alone:
not on the number of workers, nor on how often the work was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from phalanx.data.prepared_folder import Progress, file_record, prepare_once, worker_processes
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
    SPLITS,
    Manifest,
    PassedOver,
    ShardWriter,
    TokenizerRecord,
    read_token_manifest,
)
from phalanx.families.language.data.tokenizer import (
    check_trainable,
    encode_texts,
    end_of_document,
    load_tokenizer,
    parse_tokenizer,
    sample_documents,
    text_share,
    train_tokenizer,
    vocabulary_size,
)
from phalanx.files import replace_file, write_atomically
from phalanx.hardware.host import available_cores
from phalanx.launch.parent import interrupts_deferred

PIECE_BYTES = 2**22
"""Text of a piece, about: enough to keep a worker busy for seconds, little enough to lose."""
_AGAIN = "run the same command with fewer --workers"
_PLAIN_SIZE = 4
"""Text bytes a compressed byte stands for, roughly; only for choosing what the tokenizer is trained on."""


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


def prepare_text(
    inputs: Sequence[str],
    out: Path,
    options: Options,
    *,
    workers: int | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Tokenize `inputs` into the folder `out`, or return at once where `out` holds just that already.

    workers: processes; None takes all cores. max_document_bytes: a longer document is refused before more of it is read.
    progress: is told bytes of input, or pieces. Stopped in any way, the same call goes on with the pieces that are done.

    Raises:
        ConfigError: options that do not fit each other or the tokenizer.
        DataError: unusable text; `out` holds other data or files, is in use by another process or cannot be written,
            for want of room or otherwise; a worker was killed.
    """
    if options.tokenizer is None:
        check_trainable(options.vocab_size, options.end_token)
        given = None
    else:
        given = load_tokenizer(Path(options.tokenizer))
        end_of_document(given, options.end_token)
    files = find_files(inputs)
    # The plan hashes all that the result depends on, as far as can be told without reading all of the text.
    chosen = asdict(options)
    chosen["tokenizer"] = None if given is None else hashlib.sha256(given.to_str().encode()).hexdigest()
    described = [(file.name, file.size, sample_hash(file)) for file in files]
    plan = hashlib.sha256(json.dumps([chosen, PIECE_BYTES, described]).encode()).hexdigest()

    def build(work: Path) -> tuple[Manifest, list[Path]]:
        job = _Job(list(inputs), files, options, plan, work, progress, max_document_bytes)
        return job.run(given, workers or available_cores())

    return prepare_once(
        out,
        plan,
        read=read_token_manifest,
        build=build,
        results=("tokenizer.json", *(f"{split}-*" for split in SPLITS)),
        option="--out",
        otherwise="holds data prepared from other text or options",
        again="run the same command again",
    )


@dataclass(frozen=True)
class _Job:
    """One preparation, in a work folder that nobody else writes to."""

    inputs: list[str]
    files: list[InputFile]
    options: Options
    plan: str
    work: Path
    progress: Progress
    max_document_bytes: int

    def run(self, given: Tokenizer | None, workers: int) -> tuple[Manifest, list[Path]]:
        """Make what is missing; return the manifest and the files that it lists. given: None trains a tokenizer."""
        kept = self.work / "tokenizer.json"
        if not kept.exists():
            if given is None:
                total = sum(file.size * (_PLAIN_SIZE if file.compression else 1) for file in self.files)
                texts = self._texts("training the tokenizer")
                # On documents of the training split alone, so that held-out text stays unseen.
                training = (text for text in texts if text and text_share(text) >= self.options.validation_fraction)
                made = train_in_process(list(sample_documents(training, total)), self.options.vocab_size)
            else:
                made = given.to_str()
            # Kept, so that a resumed preparation encodes the rest with the very same merges.
            write_atomically(kept, made)
        tokenizer = parse_tokenizer(kept.read_bytes(), kept)
        pieces, without_text = self._tokenize(tokenizer, workers)
        passed_over = PassedOver(documents=without_text, files=count_other_files(self.inputs))
        return self._join(pieces, tokenizer, passed_over)

    def _texts(self, what: str) -> Iterator[str]:
        """Yield the text of every document, the empty text for one without. what: what progress is told is being done."""
        total, done = sum(file.size for file in self.files), 0
        for file in self.files:
            yield from read_texts(file, self.options.text_field, self.max_document_bytes)
            done += file.size
            self.progress(what, done, total)

    def _tokenize(self, tokenizer: Tokenizer, workers: int) -> tuple[list[Path], int]:
        """Make every piece that is missing; return all of them, in order, and the number of documents without text."""
        pieces: list[Path] = []
        without_text = 0

        def documents() -> Iterator[str]:
            nonlocal without_text
            for text in self._texts("tokenizing"):
                without_text += not text
                if text:
                    yield text

        def missing() -> Iterator[tuple[list[str], Path]]:
            # Cut in the same places each time, so that pieces of an interrupted call can be kept by their numbers.
            for number, texts in enumerate(_cut_pieces(documents())):
                pieces.append(self.work / f"piece-{number:06d}.npz")
                if not pieces[-1].exists():
                    yield texts, pieces[-1]

        end = end_of_document(tokenizer, self.options.end_token)
        kept = self.work / "tokenizer.json"
        settings = Settings(kept, self.options.tokenizer or str(kept), end, self.options.validation_fraction)
        tokenize_pieces(missing(), settings, workers)
        # Known only after the whole text was read, as files may hold nothing but empty documents.
        if not pieces:
            raise DataError("the inputs hold no text at all: every document is empty")
        return pieces, without_text

    def _join(self, pieces: list[Path], tokenizer: Tokenizer, passed_over: PassedOver) -> tuple[Manifest, list[Path]]:
        """Write the pieces, in order, as shards of each split; return their manifest and all files that it lists."""
        size = vocabulary_size(tokenizer)
        # Half the bytes wherever all ids fit.
        dtype: Literal["uint16", "uint32"] = "uint16" if size <= 2**16 else "uint32"
        # Shards of a call that was stopped while it joined may be half written: they are written again.
        whole = self.work / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        writers = {split: ShardWriter(whole, split, np.dtype(dtype), self.options.shard_tokens) for split in SPLITS}
        for number, path in enumerate(pieces, 1):
            piece = Piece.load(path)
            for index, end in enumerate(np.cumsum(piece.lengths).tolist()):
                tokens = piece.tokens[end - int(piece.lengths[index]) : end]
                writer = writers["validation" if piece.held_out[index] else "train"]
                writer.add(tokens, int(piece.text_bytes[index]))
            self.progress("writing shards", number, len(pieces))
        splits = {split: writer.close() for split, writer in writers.items()}
        # Few documents, or all of them alike, may fall into one split by chance.
        if not splits["train"].tokens:
            raise DataError(
                "every document fell into the validation split; lower --validation-fraction (0 holds out none)"
            )
        shutil.copyfile(self.work / "tokenizer.json", whole / "tokenizer.json")
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
        return manifest, list(whole.iterdir())


def _cut_pieces(documents: Iterator[str]) -> Iterator[list[str]]:
    """Group documents, in order, into lists of about `PIECE_BYTES` of text each."""
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
        with replace_file(path) as file:
            np.savez(file, tokens=self.tokens, lengths=self.lengths, text_bytes=self.text_bytes, held_out=self.held_out)

    @classmethod
    def load(cls, path: Path) -> Piece:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(stored["tokens"], stored["lengths"], stored["text_bytes"], stored["held_out"])


@dataclass(frozen=True)
class Settings:
    """What a worker needs for every piece."""

    tokenizer: Path
    """A tokenizer.json."""
    tokenizer_name: str
    """What messages call it."""
    end_of_document: int
    """Id that ends every document."""
    validation_fraction: float
    """Share of documents that belong to the validation split."""


def train_in_process(documents: Sequence[str], vocab_size: int) -> str:
    """Return the tokenizer.json that training on all of `documents` gives. Raises DataError where the process is killed.

    Merges are found in a single call, which heeds no Ctrl-C: in a process of its own it can be ended at any time.
    """
    with worker_processes(1, again=_AGAIN) as pool:
        with interrupts_deferred():
            trained = pool.submit(_train_and_write, documents, vocab_size)
        return trained.result()


def _train_and_write(documents: Sequence[str], vocab_size: int) -> str:
    text: str = train_tokenizer(documents, 0, vocab_size).to_str()
    return text


def tokenize_pieces(jobs: Iterator[tuple[list[str], Path]], settings: Settings, workers: int) -> None:
    """Have `workers` processes tokenize the documents of each job into the piece file it names.

    However this ends, no worker outlives it, nor this process; pieces that are done stay. Raises what `jobs` raises,
    OSError where a piece cannot be written, and DataError when a worker is killed.
    """
    running: set[Future[None]] = set()
    with worker_processes(workers, start=partial(_load_worker, settings), again=_AGAIN) as pool:
        for texts, path in jobs:
            # This may start a worker, whom a pool that is interrupted meanwhile would not wait for at its end.
            with interrupts_deferred():
                running.add(pool.submit(_tokenize_piece, texts, path))
            # Pieces waiting for a worker hold text: no more of them than keeps all workers busy.
            if len(running) >= 2 * workers:
                running = _await_one(running)
        while running:
            running = _await_one(running)


def _await_one(running: set[Future[None]]) -> set[Future[None]]:
    """Await one of the running tasks; return those that still run. Raises what a worker raised."""
    done, still = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return still


_worker: tuple[Tokenizer, Settings] | None = None
"""What a worker process keeps from piece to piece."""


def _load_worker(settings: Settings) -> None:
    # A worker process serves many pieces and parses the tokenizer once.
    global _worker
    # One process a core is parallel enough.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = parse_tokenizer(settings.tokenizer.read_bytes(), settings.tokenizer_name)
    # A tokenizer.json may ask for cuts and padding, and text may spell out special tokens: documents are neither cut nor
    # ended by what they say.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    _worker = (tokenizer, settings)


def _tokenize_piece(texts: list[str], path: Path) -> None:
    assert _worker is not None
    tokenizer, settings = _worker
    encoded = encode_texts(tokenizer, texts, settings.tokenizer_name)
    end, fraction = settings.end_of_document, settings.validation_fraction
    Piece(
        tokens=np.concatenate([np.array([*e.ids, end], dtype=np.uint32) for e in encoded]),
        lengths=np.array([len(e.ids) + 1 for e in encoded], dtype=np.int64),
        text_bytes=np.array([len(text.encode()) for text in texts], dtype=np.int64),
        # By the text alone: the same document is held out wherever it stands, and duplicates stay on one side.
        held_out=np.array([text_share(text) < fraction for text in texts], dtype=np.bool_),
    ).save(path)
