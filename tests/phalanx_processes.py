"""The `phalanx` command in processes of its own that need not load torch first: they come from a fork server that has.

Each is a real process, to be killed and interrupted; with several ranks each of them is told its place as torchrun tells it.
What only the start of a command can show is tested with the command itself (`tests/cli`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from distributed_ranks import fork_server
from phalanx.cli.main import main


@dataclass(frozen=True)
class Command:
    """A running `phalanx ...`, on one rank or several."""

    ranks: tuple[ForkServerProcess, ...]
    folder: tempfile.TemporaryDirectory[str]
    """Holds what each rank wrote."""

    def poll(self) -> int | None:
        """Exit code of the first rank; None while it runs."""
        return self.ranks[0].exitcode

    def send_signal(self, number: int) -> None:
        """To all ranks."""
        for rank in self.ranks:
            if rank.exitcode is None:
                assert rank.pid is not None
                os.kill(rank.pid, number)

    def finish(self, timeout_s: float = 300.0) -> tuple[int, str]:
        """Wait for all ranks: the first exit code that is not 0, or 0, and what was written on stderr."""
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank in self.ranks if rank.exitcode is None]
        for rank in late:
            rank.kill()
            rank.join()
        errors = "".join(
            Path(self.folder.name, f"err-{number}").read_text(errors="replace") for number in range(len(self.ranks))
        )
        assert not late, f"{len(late)} ranks were still running after {timeout_s} s:\n{errors}"
        return next((rank.exitcode for rank in self.ranks if rank.exitcode), 0), errors


def start(words: Sequence[str], ranks: int = 1, command: Callable[[Sequence[str]], None] = main) -> Command:
    """Start `phalanx WORDS`, or another function of these words."""
    folder = tempfile.TemporaryDirectory()
    port = free_port()
    started = []
    for rank in range(ranks):
        place = {} if ranks == 1 else _place(rank, ranks, port)
        outputs = (Path(folder.name, f"out-{rank}"), Path(folder.name, f"err-{rank}"))
        process = fork_server().Process(target=_run, args=(command, tuple(words), place, outputs))
        process.start()
        started.append(process)
    return Command(tuple(started), folder)


def finish(
    words: Sequence[str],
    ranks: int = 1,
    timeout_s: float = 300.0,
    command: Callable[[Sequence[str]], None] = main,
) -> str:
    """Run `phalanx WORDS` to its end, which must be a good one; returns what it wrote on stderr. command: see `start`."""
    code, errors = start(words, ranks, command).finish(timeout_s)
    assert code == 0, errors[-3000:]
    return errors


@dataclass(frozen=True)
class Trained:
    """What a run directory tells of a run."""

    steps: list[tuple[float, float]]
    """Loss and gradient norm of each."""
    evaluations: list[dict[str, Any]]
    """Events, in their order."""


def train(run_file: Path, run_dir: Path, steps: int, ranks: int, *words: str) -> Trained:
    """Train up to `steps` in a run directory, which may hold the beginning."""
    finish(["train", str(run_file), "--run-dir", str(run_dir), f"training.steps={steps}", *words], ranks)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return Trained([(row["loss"], row["grad_norm"]) for row in rows], [e for e in events if e["kind"] == "evaluation"])


def _run(
    command: Callable[[Sequence[str]], None], words: tuple[str, ...], place: dict[str, str], outputs: tuple[Path, Path]
) -> None:
    for number, path in enumerate(outputs, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # What the command starts itself finds the same sources.
    os.environ.update({**place, "PYTHONPATH": os.pathsep.join(sys.path)})
    torch.set_num_threads(1)
    # As a shell starts it, whatever the fork server inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What starts itself again as several ranks reads its own words there.
    sys.argv = ["phalanx", *words]
    command(words)


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
