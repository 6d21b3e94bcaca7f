"""A small prepared data folder, made without the preparing code: byte-like tokens with some structure to learn."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phalanx.data.prepared_folder import file_record
from phalanx.families.language.data.token_shards import (
    Manifest,
    ShardRecord,
    SplitRecord,
    TokenizerRecord,
)
from phalanx.families.language.data.token_source import SegmentedStream, TokenFile

END = 256
VOCABULARY = 257


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges: one token a byte, and one that ends documents."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<|endoftext|>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def documents(seed: int, tokens: int) -> list[np.ndarray]:
    """Documents of about 200 tokens in which the next token mostly follows from the one before."""
    generator = np.random.default_rng(seed)
    made, left = [], tokens
    while left > 1:
        length = min(left - 1, int(generator.integers(50, 350)))
        steps = np.where(generator.random(length) < 0.85, 3, generator.integers(0, 250, length))
        body = np.cumsum(steps) % 250
        made.append(np.append(body, END))
        left -= length + 1
    return made


def write_split(folder: Path, split: str, seed: int, tokens: int, shards: int) -> SplitRecord:
    """Write one split as `shards` shards."""
    records = []
    for number in range(shards):
        parts = documents(seed + number, tokens // shards)
        data, starts = folder / f"{split}-{number:05d}.bin", folder / f"{split}-{number:05d}.documents"
        np.concatenate(parts).astype("<u2").tofile(data)
        np.cumsum([0, *(len(part) for part in parts[:-1])]).astype("<i8").tofile(starts)
        total = sum(len(part) for part in parts)
        records.append(
            ShardRecord(
                tokens=total,
                documents=len(parts),
                text_bytes=total - len(parts),
                data=file_record(data),
                starts=file_record(starts),
            )
        )
    return SplitRecord(
        tokens=sum(r.tokens for r in records),
        documents=sum(r.documents for r in records),
        text_bytes=sum(r.text_bytes for r in records),
        shards=records,
    )


def write_token_folder(folder: Path, *, train_tokens: int = 60_000, validation_tokens: int = 3_000) -> Path:
    """Write a whole folder; returns it."""
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer.json")
    manifest = Manifest(
        dtype="uint16",
        tokenizer=TokenizerRecord(
            file=file_record(folder / "tokenizer.json"), vocab_size=VOCABULARY, end_of_document=END
        ),
        validation_fraction=0.05,
        inputs=["made for tests"],
        splits={
            "train": write_split(folder, "train", 1, train_tokens, 2),
            "validation": write_split(folder, "validation", 99, validation_tokens, 1),
        },
    )
    manifest.write(folder)
    return folder


RUN_FILE = """
model: {{n_layers: 2, d_model: 32, n_heads: 4, n_kv_heads: 2, d_ff: 64, vocab_size: 264, max_positions: 32, tied_head: true}}
data: {{sources: ["{data}"], sequence_length: 32}}
layout: {{global_batch: 8, microbatch: 4, precision: fp32}}
optimizer: {{lr: 3e-3, warmup_steps: 5}}
training: {{steps: 40, tensorboard: false}}
checkpoint: {{every: 5}}
evaluation: {{samples: 16}}
"""


def write_run_file(path: Path, data: Path) -> Path:
    """A run file of 40 steps of a tiny model on `data`."""
    path.write_text(RUN_FILE.format(data=data))
    return path


def in_files(arrays: list[np.ndarray]) -> SegmentedStream:
    """The arrays as one stream, each in a file of its own that is gone from its folder once it is open."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, array in enumerate(arrays):
            path = Path(folder, str(number))
            array.tofile(path)
            files.append(TokenFile(path, array.dtype))
        return SegmentedStream(files)
