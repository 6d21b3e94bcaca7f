"""Preparing that is stopped, by a person, the system or a full disk: nothing is lost, and nothing is left running."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.prepared_folder import MANIFEST
from phalanx.errors import DataError
from phalanx.families.language.data import prepare_text as preparing
from phalanx.families.language.data.prepare_text import Options, Settings, prepare_text
from phalanx.files import TEMPORARY

PIECE_BYTES = 4000
PROGRAM = f"""
import sys
from phalanx.cli.main import main
from phalanx.families.language.data import prepare_text as prepare

prepare.PIECE_BYTES = {PIECE_BYTES}
main(["data", "prepare", "--vocab-size", "300", "--validation-fraction", "0.1", "--workers", "1", *sys.argv[1:]])
"""
"""The command line with pieces so small that there are many."""
OPTIONS = Options(vocab_size=300, validation_fraction=0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of 150 pieces, later ones larger."""
    path = tmp_path_factory.mktemp("corpus") / "t.jsonl"
    documents = (" ".join(f"w{(i * j) % 997}" for j in range(1000 + 10 * i)) for i in range(150))
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is made of the corpus when nothing stops it."""
    out = tmp_path_factory.mktemp("straight") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "PIECE_BYTES", PIECE_BYTES)
        prepare_text([str(corpus)], out, OPTIONS, workers=1)
    return contents(out)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(corpus: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a preparation into tmp_path/out in a session of its own; nothing of it outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def _start(*words: str, **settings: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, *(words or [str(corpus)]), "--out", str(tmp_path / "out")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        started.append(
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True, **settings
            )
        )
        return started[-1]

    yield _start
    for process in started:
        for left in processes_of(process):
            os.kill(left, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def pieces(out: Path) -> set[str]:
    return {path.name for path in (out / ".work").glob("piece-*.npz")}


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_pieces(process: subprocess.Popen[str], out: Path) -> None:
    def there() -> bool:
        assert process.poll() is None
        return len(pieces(out)) >= 3

    wait_for(there)


def processes_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """The living processes of the session of `process`, each with its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(session) == process.pid and state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def assert_the_same_command_goes_on(
    corpus: Path, out: Path, straight: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, made = pieces(out), set[str]()
    tokenize = preparing.tokenize_pieces

    def listening(jobs: Iterator[tuple[list[str], Path]], settings: Settings, workers: int) -> None:
        def noted() -> Iterator[tuple[list[str], Path]]:
            for texts, path in jobs:
                made.add(path.name)
                yield texts, path

        tokenize(noted(), settings, workers)

    monkeypatch.setattr(preparing, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(preparing, "tokenize_pieces", listening)
    prepare_text([str(corpus)], out, OPTIONS, workers=2)
    assert done and made and not done & made
    assert contents(out) == straight


@pytest.mark.parametrize(
    ("signal_number", "reaches", "code"),
    [
        (signal.SIGINT, "all", 130),
        (signal.SIGINT, "one", 130),
        (signal.SIGTERM, "one", -signal.SIGTERM),
        (signal.SIGKILL, "one", -signal.SIGKILL),
    ],
    ids=["Ctrl-C", "interrupt", "terminate", "kill"],
)
def test_stopped_in_the_middle_it_leaves_nothing_running_and_goes_on(
    signal_number: int,
    reaches: str,
    code: int,
    start: Start,
    corpus: Path,
    straight: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    process = start()
    wait_for_pieces(process, out)
    assert len(processes_of(process)) >= 3, "the command, its fork server and a worker"
    (os.killpg if reaches == "all" else os.kill)(process.pid, signal_number)
    wait_for(lambda: not processes_of(process))
    _, error = process.communicate()
    assert process.returncode == code
    assert not (out / MANIFEST).exists()
    assert "Traceback" not in error
    if code == 130:
        assert error.endswith("error: stopped; what is done is kept: the same command goes on from there\n")
        assert [path.name for path in out.iterdir()] == [".work"]
    assert_the_same_command_goes_on(corpus, out, straight, monkeypatch)


def test_ctrl_c_ends_the_training_of_a_tokenizer_at_once(start: Start, tmp_path: Path) -> None:
    """Words at random have few merges in common: to find those of 30,000 entries takes many seconds."""
    drawn = random.Random(0)
    words = ("".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(100_000))
    text, out = tmp_path / "random.txt", tmp_path / "out"
    text.write_text(" ".join(words))
    process = start(str(text), "--vocab-size", "30000")

    def trains() -> bool:
        # The process that trains is a child of the fork server; before there is one, Ctrl-C is ignored for a moment.
        parents = processes_of(process)
        return any(parents.get(parent) == process.pid for parent in parents.values())

    wait_for(trains)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    wait_for(lambda: not processes_of(process))
    # Far less than what training takes, and more than a busy machine needs to end three processes.
    assert time.monotonic() - began < 5.0
    _, error = process.communicate()
    assert process.returncode == 130 and "Traceback" not in error
    assert not (out / ".work" / "tokenizer.json").exists()


def test_a_worker_that_dies_ends_the_work_with_a_reason(
    start: Start, corpus: Path, straight: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    wait_for_pieces(process, tmp_path / "out")
    all_of_them = processes_of(process)
    workers = [pid for pid, parent in all_of_them.items() if all_of_them.get(parent) == process.pid]
    os.kill(workers[0], signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 1
    assert error.splitlines()[-2] == (
        "error: a worker process was killed, mostly for lack of memory; what is done is kept: "
        "run the same command with fewer --workers"
    )
    wait_for(lambda: not processes_of(process))
    assert_the_same_command_goes_on(corpus, tmp_path / "out", straight, monkeypatch)


def test_two_at_once_are_kept_apart(start: Start, corpus: Path, straight: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start()
    wait_for_pieces(process, out)
    os.kill(process.pid, signal.SIGSTOP)
    before = pieces(out)
    second = start()
    _, error = second.communicate()
    assert second.returncode == 1
    assert error.startswith(f"error: {out} is in use by process {process.pid} on host {socket.gethostname()} (since ")
    assert error.splitlines()[0].endswith("; end it first, or choose another --out")
    with pytest.raises(DataError, match=f"is in use by process {process.pid} on host"):
        prepare_text([str(corpus)], out, Options(vocab_size=400), workers=1)
    assert before <= pieces(out)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0
    assert contents(out) == straight


def test_what_workers_were_writing_goes(
    corpus: Path, straight: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece written in part stands in for a worker that was ended in the midst of it because another one failed."""
    out = tmp_path / "out"
    monkeypatch.setattr(preparing, "PIECE_BYTES", PIECE_BYTES)

    def fail(what: str, done: int, total: int) -> None:
        if what == "tokenizing":
            (out / ".work" / f"{TEMPORARY}piece-000007.npz.1").write_bytes(b"PK")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text([str(corpus)], out, OPTIONS, workers=1, progress=fail)
    assert not list((out / ".work").glob(".*"))
    prepare_text([str(corpus)], out, OPTIONS, workers=1)
    assert contents(out) == straight


def test_no_room_for_a_piece(
    start: Start, corpus: Path, straight: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands in for a disk that fills up: the tokenizer fits, a larger piece does not."""
    out = tmp_path / "out"
    process = start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)))
    _, error = process.communicate()
    assert process.returncode == 1
    assert error.splitlines()[-2] == (
        f"error: {out}: File too large; make room and run the same command again, which goes on with what is done, "
        "or choose another --out"
    )
    assert [path.name for path in out.iterdir()] == [".work"]
    assert not list((out / ".work").glob(".*"))
    wait_for(lambda: not processes_of(process))
    assert_the_same_command_goes_on(corpus, out, straight, monkeypatch)
