"""Pieces: a few megabytes of text, tokenized by a worker process and left in a file of its own.

Knows documents and a tokenizer; knows nothing of where text comes from, nor of what becomes of the pieces.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from phalanx.errors import DataError
from phalanx.families.language.data.tokenizer import encode_texts, parse_tokenizer, text_share
from phalanx.files import replace_file


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


def tokenize_pieces(jobs: Iterator[tuple[list[str], Path]], settings: Settings, workers: int) -> None:
    """Have `workers` processes tokenize the documents of each job into the piece file it names.

    However this ends, no worker outlives it, nor this process; pieces that are done stay. Raises what `jobs` raises,
    OSError where a piece cannot be written, and DataError when a worker is killed.
    """
    # The workers' end of the leash reports when ours is closed, be it by us or by our death.
    held, leash = multiprocessing.Pipe(duplex=False)
    # Workers are forked from a server process, whose setting they inherit.
    with _interrupts_ignored():
        forkserver.ensure_running()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), _start_worker, (settings, held))
    running: set[Future[None]] = set()
    try:
        for texts, path in jobs:
            running.add(pool.submit(_tokenize_piece, texts, path))
            # Pieces waiting for a worker hold text: no more of them than keeps all workers busy.
            if len(running) >= 2 * workers:
                running = _await_one(running)
        while running:
            running = _await_one(running)
        pool.shutdown()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, mostly for lack of memory; what is done is kept: "
            "run the same command with fewer --workers"
        ) from error
    finally:
        # Ends workers in the midst of a piece: its file is only put in place when it is whole.
        leash.close()
        pool.shutdown(cancel_futures=True)
        held.close()


def _await_one(running: set[Future[None]]) -> set[Future[None]]:
    """Await one of the running tasks; return those that still run. Raises what a worker raised."""
    done, still = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return still


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that are started meanwhile ignore Ctrl-C from their first moment on: the parent alone decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_worker: tuple[Tokenizer, Settings] | None = None
"""What a worker process keeps from piece to piece."""


def _start_worker(settings: Settings, leash: Connection) -> None:
    # A worker process serves many pieces and parses the tokenizer once.
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(leash,), daemon=True).start()
    # One process a core is parallel enough.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = parse_tokenizer(settings.tokenizer.read_bytes(), settings.tokenizer_name)
    # A tokenizer.json may ask for cuts and padding, and text may spell out special tokens: documents are neither cut nor
    # ended by what they say.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    _worker = (tokenizer, settings)


def _end_with_parent(leash: Connection) -> None:
    # Returns when the parent's end is closed, which the system does even where the parent is killed.
    leash.poll(None)
    os._exit(1)


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
