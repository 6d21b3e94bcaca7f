"""How fast batches are read on one core, how much of that is document numbers, and what resuming far on costs.

    python benchmarks/data_loading.py --out benchmarks/results/data_loading/cpu

makes a prepared folder of `--tokens` random tokens and the same tokens as a Megatron pair and as MDS shards, reads them
once so that they lie in the page cache, and then reads shuffled batches from each in one thread without reading ahead.
Writes OUT.json (every repeat, versions, machine) and OUT.log (the table); `--json` prints the JSON instead of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.data.prepared_folder import file_record
from phalanx.families.language.data.open_tokens import open_source
from phalanx.families.language.data.token_batches import SampleReader, TokenBatchStream
from phalanx.families.language.data.token_shards import Manifest, ShardRecord, SplitRecord, TokenizerRecord

VOCABULARY, END = 50257, 50256
DOCUMENT_TOKENS = 700
"""Mean length of a document, about: web pages are of that order."""
SHARD_TOKENS = 2**25
MDS_SAMPLE, MDS_SHARD_SAMPLES = 2048, 8192
FAR = 10**9
"""Samples already read when a run is resumed."""

Tokens = npt.NDArray[np.uint16]


@dataclass
class Speed:
    """One way of reading, measured several times."""

    source: str
    documents: bool
    batch: int
    tokens_per_second: list[float]


def make_documents(tokens: int) -> list[Tokens]:
    """Documents of random ids and random length, each with its end."""
    random = np.random.default_rng(0)
    lengths = random.integers(DOCUMENT_TOKENS // 10, 2 * DOCUMENT_TOKENS, size=2 * tokens // DOCUMENT_TOKENS)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    ids = random.integers(0, END, size=int(lengths.sum()), dtype=np.uint16)
    ends = np.cumsum(lengths)
    ids[ends - 1] = END
    return np.split(ids, ends[:-1])


def write_prepared(folder: Path, documents: list[Tokens]) -> Path:
    """Shards and a manifest such as `phalanx data prepare` leaves."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    ends = np.cumsum([len(document) for document in documents])
    cuts = np.searchsorted(ends, np.arange(SHARD_TOKENS, ends[-1], SHARD_TOKENS), side="right")
    shards = []
    for number, (first, last) in enumerate(pairwise([0, *cuts.tolist(), len(documents)])):
        part = documents[first:last]
        data, starts = folder / f"train-{number:05d}.bin", folder / f"train-{number:05d}.documents"
        tokens = np.concatenate(part).astype("<u2")
        tokens.tofile(data)
        np.cumsum([0, *(len(document) for document in part[:-1])]).astype("<i8").tofile(starts)
        shards.append(
            ShardRecord(
                tokens=len(tokens),
                documents=len(part),
                text_bytes=0,
                data=file_record(data),
                starts=file_record(starts),
            )
        )
    train = SplitRecord(tokens=int(ends[-1]), documents=len(documents), text_bytes=0, shards=shards)
    tokenizer = TokenizerRecord(file=file_record(folder / "tokenizer.json"), vocab_size=VOCABULARY, end_of_document=END)
    manifest = Manifest(
        dtype="uint16", tokenizer=tokenizer, validation_fraction=0.0, inputs=[], splits={"train": train}
    )
    manifest.write(folder)
    return folder


def write_megatron(prefix: Path, documents: list[Tokens]) -> Path:
    """A .bin/.idx pair of uint16 ids, one sequence a document."""
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    pointers = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1)
    np.concatenate(documents).astype("<u2").tofile(f"{prefix}.bin")
    indices = np.arange(len(lengths) + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.astype("<i8").tobytes() + indices.tobytes())
    return prefix


def write_mds(folder: Path, documents: list[Tokens]) -> Path:
    """Shards of samples of equal length, their ids int32 arrays, as LLM Foundry writes them."""
    folder.mkdir()
    stream = np.concatenate(documents)
    rows = stream[: len(stream) // MDS_SAMPLE * MDS_SAMPLE].reshape(-1, MDS_SAMPLE).astype("<i4")
    columns: dict[str, Any] = {
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:int32:{MDS_SAMPLE}"],
        "column_sizes": [4 * MDS_SAMPLE],
    }
    config = json.dumps(columns).encode()
    shards = []
    for number, first in enumerate(range(0, len(rows), MDS_SHARD_SAMPLES)):
        part = rows[first : first + MDS_SHARD_SAMPLES]
        start = 4 * (len(part) + 2) + len(config)
        offsets = (start + 4 * MDS_SAMPLE * np.arange(len(part) + 1)).astype("<u4")
        data = struct.pack("<I", len(part)) + offsets.tobytes() + config + part.tobytes()
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        shards.append({**columns, "format": "mds", "version": 2, "samples": len(part), "raw_data": raw})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def open_stream(path: Path, *, sequence_length: int, batch: int, documents: bool) -> TokenBatchStream:
    """A stream of one rank that reads in the calling thread."""
    source = open_source(path, "train")
    reader = SampleReader([(source, 1.0)], sequence_length=sequence_length, seed=0, documents=documents)
    return TokenBatchStream(reader, global_batch=batch, prefetch=0)


def measure(stream: TokenBatchStream, seconds: float, repeats: int) -> list[float]:
    """Tokens/s of `repeats` stretches of about `seconds` each, one after the other in the order of training."""
    speeds = []
    stream.next()
    for _ in range(repeats):
        tokens, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            tokens += stream.next().tokens.numel()
        speeds.append(tokens / elapsed)
    return speeds


def measure_resume(path: Path, sequence_length: int, batch: int, repeats: int) -> dict[str, list[float]]:
    """Seconds from nothing to the first batch: at the start of a run and `FAR` samples on."""
    seconds: dict[str, list[float]] = {}
    for name, samples in (("at sample 0", 0), (f"at sample {FAR:,}", FAR)):
        seconds[name] = []
        for _ in range(repeats):
            start = time.perf_counter()
            stream = open_stream(path, sequence_length=sequence_length, batch=batch, documents=True)
            stream.seek(samples // batch)
            stream.next()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": names[0] if names else platform.machine(),
        "cpu_count": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
    }


def table(speeds: list[Speed], resume: dict[str, list[float]]) -> str:
    """Medians, with the range over the repeats."""
    lines = [f"{'source':10} {'batch':>6} {'document numbers':>17} {'million tokens/s a core (min - max)':>40}"]
    for speed in speeds:
        values = [value / 1e6 for value in speed.tokens_per_second]
        spread = f"{statistics.median(values):.0f} ({min(values):.0f} - {max(values):.0f})"
        lines.append(f"{speed.source:10} {speed.batch:6} {'yes' if speed.documents else 'no':>17} {spread:>40}")
    for name, seconds in resume.items():
        lines.append(f"open and read the first batch, {name}: {1e3 * statistics.median(seconds):.1f} ms")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="result files, without their suffix")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="tokens of each source")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a repeat")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about_machine = machine()
    length, speeds = arguments.sequence_length, []
    with tempfile.TemporaryDirectory() as name:
        root, documents = Path(name), make_documents(arguments.tokens)
        paths = {
            "prepared": write_prepared(root / "prepared", documents),
            "Megatron": write_megatron(root / "megatron", documents),
            "MDS": write_mds(root / "mds", documents),
        }
        for source, path in paths.items():
            open_source(path, "train").verify()
            for batch, with_documents in ((16, False), (1, False), (16, True)):
                stream = open_stream(path, sequence_length=length, batch=batch, documents=with_documents)
                values = measure(stream, arguments.seconds, arguments.repeats)
                speeds.append(Speed(source, with_documents, batch, values))
        resume = measure_resume(paths["prepared"], length, 16, arguments.repeats)
    command = (
        f"python benchmarks/data_loading.py --tokens {arguments.tokens} --sequence-length {length} "
        f"--repeats {arguments.repeats} --seconds {arguments.seconds}"
    )
    results = {"command": command, **about_machine, "speeds": [asdict(speed) for speed in speeds]}
    results["resume_seconds"] = resume
    report = f"{results['device']}, one thread, samples of {length} tokens, commit {results['commit']}\n"
    report += table(speeds, resume) + "\n"
    print(json.dumps(results, indent=1) if arguments.json else report)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        arguments.out.with_suffix(".log").write_text(f"$ {command}\n{report}")


if __name__ == "__main__":
    main()
