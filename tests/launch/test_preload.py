"""Ranks forked of a process that has loaded everything: the same processes as interpreters of their own, sooner.

What is loaded and what ranks run are two small modules; processes, signals and descriptors are real.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from phalanx.launch import preload
from phalanx.launch.local_launch import launch_ranks
from phalanx.launch.parent import STORE_SOCKET
from phalanx.launch.preload import RankCommand, RankTemplate
from phalanx.launch.restart import RestartPolicy

LIBRARY = """
import os, threading
with open("loaded", "a") as file:
    print(os.getpid(), file=file)
if os.path.exists("threads"):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if os.path.exists("thread until a fork"):
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    os.register_at_fork(before=lambda: (over.set(), thread.join()))
"""
RANK = """
import json, os, signal, socket, sys, time
import big_library

assert __name__ == "__main__"
rank, what = os.environ["RANK"], sys.argv[1]
listener = os.environ.get("PHALANX_STORE_SOCKET")
port = socket.socket(fileno=int(listener)).getsockname()[1] if listener else None
place = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "port": port, "argv": sys.argv[1:]}
with open(f"rank-{rank}", "a") as file:
    print(json.dumps(place), file=file)
print("said by", rank, file=sys.stderr)
if what == "waits":
    time.sleep(60)
if what == "fails with much loaded":
    # Taken apart only where an interpreter ends in good order.
    class Loaded:
        def __del__(self):
            time.sleep(60)
    sys.modules["much"] = Loaded()
    print("last words", file=sys.stderr)
    if len(sys.argv) > 2:
        raise ValueError(sys.argv[2])
    sys.exit(5)
if what == "dies once" and rank == "1" and len(open("rank-1").readlines()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(what) if what.isdecimal() else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "big_library.py").write_text(LIBRARY)
    (tmp_path / "rank_program.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(folder: Path, rank: int, *words: str, **environment: str) -> RankCommand:
    return RankCommand(
        "rank_program", words, {**os.environ, "RANK": str(rank), **environment}, str(folder / f"log-{rank}")
    )


def places(folder: Path, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()]


def loaded(folder: Path) -> int:
    return len((folder / "loaded").read_text().split())


@pytest.mark.parametrize("threads", [False, True], ids=["forked", "with threads, an interpreter of its own"])
def test_a_forked_rank_is_what_an_interpreter_would_have_been(folder: Path, threads: bool) -> None:
    if threads:
        (folder / "threads").touch()
    template = RankTemplate(["big_library"], os.environ, 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = template.start(command(folder, 0, "7", "more", **{STORE_SOCKET: str(listener.fileno())}))
        second = template.start(command(folder, 1, "waits"))
        assert first is not None and second is not None
        assert first.wait() == 7 == first.poll()
        (place,) = places(folder, 0)
        expected = {"pid": first.pid, "parent": os.getpid(), "group": first.pid, "argv": ["7", "more"]}
        assert place == {**expected, "port": listener.getsockname()[1]}
    deadline = time.monotonic() + 30
    while not (folder / "log-1").exists() or "said by 1" not in (folder / "log-1").read_text():
        assert time.monotonic() < deadline and second.poll() is None
        time.sleep(0.01)
    # Ranks go on without the process that they were forked of.
    template.close()
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    assert second.wait() == -signal.SIGTERM
    second.kill()
    assert places(folder, 1)[0]["port"] is None
    assert loaded(folder) == (3 if threads else 1)


def test_threads_that_end_at_a_fork_are_no_reason_to_load_anew(folder: Path) -> None:
    """As those of OpenBLAS do, of which numpy starts one a core."""
    (folder / "thread until a fork").touch()
    template = RankTemplate(["big_library"], os.environ, 1)
    rank = template.start(command(folder, 0, "7"))
    assert rank is not None and rank.wait() == 7
    template.close()
    assert loaded(folder) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [([], 5, "last words"), (["it is bad"], 1, "ValueError: it is bad")],
    ids=["exit", "raise"],
)
def test_a_rank_that_failed_ends_at_once(words: list[str], code: int, said: str, folder: Path) -> None:
    template = RankTemplate(["big_library"], os.environ, 2)
    rank = template.start(command(folder, 1, "fails with much loaded", *words))
    assert rank is not None
    began = time.monotonic()
    assert rank.wait() == code and time.monotonic() - began < 30
    template.close()
    assert (folder / "log-1").read_text().endswith(f"{said}\n")


def test_a_device_that_is_open_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_DEVICES", (str(tmp_path / "nvidia"),))
    assert not preload._opened_device()
    with (tmp_path / "nvidia0").open("w"):
        assert preload._opened_device()


def test_ranks_that_begin_again_load_nothing(folder: Path) -> None:
    policy = RestartPolicy(most=1, run_dir=folder, preload=("big_library", "no_such_module"))
    assert launch_ranks(["dies once"], 2, "rank_program", policy=policy) == 0
    assert [len(places(folder, rank)) for rank in (0, 1)] == [2, 2] and loaded(folder) == 1
    report = json.loads((folder / "fault.json").read_text())
    assert (report["rank"], report["cause"], report["attempt"]) == (1, "signal", 0)


def test_ranks_that_are_started_once_share_what_is_loaded(folder: Path) -> None:
    assert launch_ranks(["0"], 2, "rank_program", preload=("big_library",)) == 0
    assert [len(places(folder, rank)) for rank in (0, 1)] == [1, 1] and loaded(folder) == 1


def test_who_is_told_to_stop_waits_for_no_library(folder: Path) -> None:
    (folder / "big_library.py").write_text("import time\ntime.sleep(60)")
    template = RankTemplate(["big_library"], os.environ, 2)
    began = time.monotonic()
    assert template.start(command(folder, 0, "0"), lambda: True) is None
    assert time.monotonic() - began < 10


def test_without_the_process_that_has_loaded_ranks_load_themselves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = RankTemplate(["big_library"], os.environ, 2)
    template._process.kill()
    assert template.start(command(folder, 0, "0")) is None
    monkeypatch.setattr(RankTemplate, "start", lambda template, command, given_up: template.close())
    assert launch_ranks(["dies once"], 2, "rank_program", policy=RestartPolicy(1, preload=("big_library",))) == 0
    # The ranks of two attempts, and perhaps the process that was ended.
    assert [len(places(folder, rank)) for rank in (0, 1)] == [2, 2] and 4 <= loaded(folder) <= 6
