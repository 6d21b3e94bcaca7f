"""Faults in real training on two ranks: named within their time, begun again, and the same bits at the end as undisturbed.

Rows of the fault table; `make test-faults` runs them, since each starts interpreters with PyTorch several times. What was
measured is printed as one line a fault, which benchmarks/results/faults holds.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from fault_injection import fault_words, offer_callback
from phalanx.checkpoint import open_checkpoints, read_tensors
from phalanx.launch.wall_time import END_TIME
from phalanx_processes import free_port
from token_data import write_run_file, write_token_folder

pytestmark = pytest.mark.faults

STEPS, HEARTBEAT_S = 40, 3.0
DETECTED_S, TRAINING_S = 2.0, 15.0
"""Most seconds from a rank's death to its report, and from a fault to the next step."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    offer_callback(folder)
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def environment(run_file: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join([str(run_file.parent), *sys.path])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(more or {})}


def start(
    run_file: Path, run_dir: Path, *words: str, ranks: int = 2, more: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(run_file),
        "--run-dir",
        str(run_dir),
        "--nproc",
        str(ranks),
    ]
    chosen = [f"layout.dp_shard={ranks}", f"restart.heartbeat_s={HEARTBEAT_S}", f"training.steps={STEPS}", *words]
    return subprocess.Popen(
        [*command, *chosen],
        env=environment(run_file, more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=1200)
    finally:
        process.kill()
    return process.returncode, errors


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step == STEPS
    return read_tensors(newest.path, "")


@pytest.fixture(scope="module")
def undisturbed(run_file: Path) -> dict[str, torch.Tensor]:
    run_dir = run_file.parent / "undisturbed"
    code, errors = finish(start(run_file, run_dir))
    assert code == 0 and "fault:" not in errors, errors
    return final_weights(run_dir)


def assert_same_bits(run_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    found = final_weights(run_dir)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def measure_times(run_dir: Path, marker: Path) -> tuple[float, float]:
    """Seconds from the only fault to its report, and to the start of training again."""
    assert len(rows(run_dir / "faults.jsonl")) == 1
    return measure_last_times(run_dir, marker)


def measure_last_times(run_dir: Path, marker: Path) -> tuple[float, float]:
    """The same of the last fault."""
    happened = float(marker.read_text())
    fault = rows(run_dir / "faults.jsonl")[-1]
    resumed = [event for event in rows(run_dir / "events.jsonl") if event["kind"] in ("start", "resume")][-1]
    reported = datetime.fromisoformat(fault["time"]).timestamp()
    return reported - happened, datetime.fromisoformat(resumed["time"]).timestamp() - happened


CASES = [
    ("F01 rank 0 killed", {"kind": "kill", "rank": 0, "step": 8}, "signal"),
    ("F01 rank 1 killed", {"kind": "kill", "rank": 1, "step": 23}, "signal"),
    ("F01 a random rank killed", {"kind": "kill", "rank": -1, "step": 31, "seed": 5}, "signal"),
    ("F02 segmentation fault", {"kind": "segfault", "step": 17}, "signal"),
    ("F02 abort", {"kind": "abort", "step": 17}, "signal"),
    ("F03 suspended", {"kind": "stop", "step": 17}, "stopped"),
    ("F03 endless loop", {"kind": "spin", "step": 17}, "hang"),
    ("F03 Python's lock held", {"kind": "lock", "step": 17}, "hang"),
    ("F04 killed in the first step", {"kind": "kill", "step": 1}, "signal"),
    ("F20 the rank with the store killed in the first step", {"kind": "kill", "rank": 0, "step": 1}, "signal"),
    ("F04 killed in the last step", {"kind": "kill", "step": STEPS}, "signal"),
    *(
        (f"F05 killed in a checkpoint, {seed}", {"kind": "save", "rank": -1, "seed": seed}, "signal")
        for seed in range(6)
    ),
]


@pytest.mark.parametrize(("name", "options", "cause"), CASES, ids=[name for name, *_ in CASES])
def test_a_fault_is_named_and_leaves_no_trace_in_the_result(
    name: str,
    options: dict[str, Any],
    cause: str,
    run_file: Path,
    undisturbed: dict[str, torch.Tensor],
    tmp_path: Path,
    record_property: Any,
) -> None:
    marker, run_dir = tmp_path / "happened", tmp_path / "run"
    code, errors = finish(start(run_file, run_dir, fault_words(marker=marker, **options)))
    assert code == 0, errors
    report = json.loads((run_dir / "fault.json").read_text())
    assert report["cause"] == cause
    if options.get("rank", 1) >= 0:
        assert report["rank"] == options.get("rank", 1)
    if "step" in options:
        assert report["step"] == options["step"]
    named_s, again_s = measure_times(run_dir, marker)
    limit = HEARTBEAT_S + 1.0 if cause in ("hang", "stopped") else DETECTED_S
    found_s = report["silent_s"] if report["silent_s"] is not None else named_s
    print(f"\n| {name} | {cause} | found in {found_s:.1f} s (limit {limit:g}) | training again in {again_s:.0f} s |")
    assert_same_bits(run_dir, undisturbed)
    assert found_s <= limit
    assert again_s <= limit + TRAINING_S


MEMORY_WORDS = ["checkpoint.every=15", "checkpoint.memory_every=4"]
"""By step 24 the newest checkpoint on storage is of step 15, and the newest copy in memory of 20, or of 16 where that is not
yet whole."""


def assert_from_memory(run_dir: Path, words: str) -> int:
    """Check that the run resumed once, from copies in memory; return from which step."""
    (resumed,) = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "resume"]
    assert resumed["step"] in (16, 20) and resumed["from_memory"] == words
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    return int(resumed["step"])


def test_a_lost_node_resumes_from_the_memory_of_its_peer(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Two ranks, each on a node of its own: a rank and all that its node has in memory are gone."""
    run_dir, fault = tmp_path / "run", fault_words(kind="kill", step=24, marker=tmp_path / "happened")

    def start_nodes(port: int) -> list[subprocess.Popen[str]]:
        started = []
        for rank in range(2):
            (tmp_path / f"node-{rank}").mkdir(exist_ok=True)
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            memory = {"PHALANX_NODE_MEMORY": str(tmp_path / f"node-{rank}")}
            command = [sys.executable, "-m", "phalanx", "train", str(run_file), "--run-dir", str(run_dir)]
            words = ["layout.dp_shard=2", f"training.steps={STEPS}", *MEMORY_WORDS, fault]
            process = subprocess.Popen(
                [*command, *words],
                env=environment(run_file, place | meeting | memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        return started

    codes = [finish(process)[0] for process in start_nodes(29531)]
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    shutil.rmtree(tmp_path / "node-1")
    for process in start_nodes(29532):
        code, errors = finish(process)
        assert code == 0, errors
    step = assert_from_memory(run_dir, "copies in memory, sent to rank 1 by its peer")
    assert_same_bits(run_dir, undisturbed)
    assert not any(any((tmp_path / f"node-{rank}").iterdir()) for rank in range(2))
    print(
        f"\n| a node of two lost in step 24, checkpoint of step 15 | resumed after step {step} from its peer | same bits |"
    )


def test_a_restart_resumes_from_the_memory_of_its_node(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir, fault = tmp_path / "run", fault_words(kind="kill", step=24, marker=tmp_path / "happened")
    (tmp_path / "memory").mkdir()
    more = {"PHALANX_NODE_MEMORY": str(tmp_path / "memory")}
    code, errors = finish(start(run_file, run_dir, *MEMORY_WORDS, fault, more=more))
    assert code == 0, errors
    step = assert_from_memory(run_dir, "copies in memory")
    assert_same_bits(run_dir, undisturbed)
    assert not any((tmp_path / "memory").iterdir())
    print(f"\n| a rank killed in step 24, checkpoint of step 15 | resumed after step {step} from memory | same bits |")


def test_an_exception_names_the_rank_that_raised_it(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [fault_words(kind="raise", step=9, marker=tmp_path / "happened"), "restart.max=0"]
    code, _ = finish(start(run_file, run_dir, *words))
    report = json.loads((run_dir / "fault.json").read_text())
    assert code == 1 and report["rank"] == 1 and "made to fail" in report["detail"]
    print("\n| F02 exception | refused | rank and error named |")


def both(one: str, other: str) -> str:
    """The words of two faults of one run."""
    return f"{one[:-1]}, {other.partition('=[')[2]}"


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir / "metrics.jsonl")]


def test_a_place_that_is_lost_is_left_out_and_the_run_goes_on_in_another_layout(run_file: Path, tmp_path: Path) -> None:
    # Batches of 12 are shared out among 4, 3 and 2 ranks. Place 3 is lost at step 7; place 0, and with it the store, at 21.
    common = ["layout.global_batch=12", "layout.microbatch=1", "training.steps=30"]
    code, errors = finish(start(run_file, tmp_path / "undisturbed", *common, ranks=4))
    assert code == 0, errors
    faults = [fault_words(kind="lost", place=3, step=7), fault_words(kind="lost", place=0, step=21)]
    words = [*common, both(*faults), "restart.layout=replan", "restart.backoff_s=0.0"]
    code, errors = finish(start(run_file, tmp_path / "run", *words, ranks=4))
    assert code == 0, errors
    assert "place 3 of this machine has failed twice in a row and is left out, 3 ranks (dp_shard=3) begin" in errors
    assert "place 0 of this machine has failed twice in a row and is left out, 2 ranks (dp_shard=2) begin" in errors
    assert [fault["rank"] for fault in rows(tmp_path / "run" / "faults.jsonl")] == [3, 3, 0, 0]
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "undisturbed")
    assert found == pytest.approx(expected, abs=1e-5) and len(found) == 30
    worst = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    print(f"\n| F13 4 ranks, then 3, then 2 | two places lost | losses of 30 steps differ by at most {worst:.1e} |")


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_killed_at_once_and_one_again_as_it_restores(
    rank: int, run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir, again = tmp_path / "run", tmp_path / "again"
    both_ranks = [fault_words(kind="kill", rank=n, step=17, marker=tmp_path / f"happened-{n}") for n in (0, 1)]
    words = both(both(*both_ranks), fault_words(kind="restore", rank=rank, marker=again))
    code, errors = finish(start(run_file, run_dir, words, "restart.backoff_s=0.5"))
    assert code == 0, errors
    faults = rows(run_dir / "faults.jsonl")
    assert [(fault["attempt"], fault["cause"]) for fault in faults] == [(0, "signal"), (1, "signal")]
    assert (faults[0]["step"], faults[1]["rank"], faults[1]["phase"]) == (17, rank, "start")
    # Two faults from the same checkpoint are two in vain: the restart after the second waits.
    assert "restart 1: all ranks begin again" in errors and "after 0.5 s" in faults[1]["action"]
    (resumed,) = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "resume"]
    # That of step 15 is written in the background.
    assert resumed["step"] in (10, 15)
    _, again_s = measure_last_times(run_dir, again)
    assert_same_bits(run_dir, undisturbed)
    print(
        f"\n| F04 both ranks killed in step 17, rank {rank} again as it restores | 2 restarts | same bits | training again "
        f"{again_s:.1f} s after the second |"
    )
    assert again_s <= TRAINING_S


def test_five_restarts_in_a_row_come_up(run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    # With and without a newer checkpoint in between, on either rank; the first keeps the store.
    places = [(0, 8), (1, 12), (0, 18), (1, 19), (0, 33)]
    kills = [fault_words(kind="kill", rank=rank, step=step, marker=tmp_path / f"{step}") for rank, step in places]
    run_dir = tmp_path / "run"
    code, errors = finish(start(run_file, run_dir, functools.reduce(both, kills)))
    assert code == 0, errors
    faults = rows(run_dir / "faults.jsonl")
    assert [(fault["rank"], fault["step"], fault["attempt"]) for fault in faults] == [
        (rank, step, attempt) for attempt, (rank, step) in enumerate(places)
    ]
    assert_same_bits(run_dir, undisturbed)
    times = [float((tmp_path / f"{step}").read_text()) for _, step in places]
    print(
        f"\n| F21 five kills under the supervisor | 5 of 5 restarts came up, in {times[-1] - times[0]:.0f} s | same bits |"
    )


def start_rank(
    run_file: Path, run_dir: Path, place: dict[str, str], *words: str, inside: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start one of two ranks, as a launcher would. inside: words before the command."""
    command = [*inside, sys.executable, "-m", "phalanx", "train", str(run_file), "--run-dir", str(run_dir)]
    return subprocess.Popen(
        [*command, "layout.dp_shard=2", *words],
        env=environment(run_file, place),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_five_restarts_in_a_row_on_one_port_come_up(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As a job script starts ranks again: the meeting point, and the name of what they tell each other there, stay."""
    run_dir, port = tmp_path / "run", free_port()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "one name"}
    seconds = []
    for step in (3, 9, 16, 24, 31, STEPS):
        began, ranks = time.monotonic(), []
        # So that a kill comes in the step it is meant for, or in the next.
        slow = fault_words(kind="slow", rank=1, step=1, seconds=0.2)
        for rank in (0, 1):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            words = (f"training.steps={STEPS}", *([] if step == STEPS else [slow]))
            ranks.append(start_rank(run_file, run_dir, place | meeting, *words))
        if step == STEPS:
            for process in ranks:
                code, errors = finish(process)
                assert code == 0, errors
            break
        wait_for_step(run_dir, step, *ranks)
        seconds.append(time.monotonic() - began)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()
    assert_same_bits(run_dir, undisturbed)
    print(
        f"\n| F21 ranks killed and started at once on one port | 5 of 5 came up, each within {max(seconds):.0f} s "
        "at the step in which it was killed | same bits |"
    )


def test_restarts_in_vain_end_with_93(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, errors = finish(
        start(run_file, run_dir, fault_words(kind="kill", step=9), "restart.max=1", "restart.backoff_s=0.0")
    )
    # The first attempt saved step 5; the two that began from there came no further.
    assert code == 93 and "given up (exit code 93)" in errors
    assert len(rows(run_dir / "faults.jsonl")) == 3
    print("\n| F04 the same fault again and again | given up | exit code 93 after 3 faults |")


def test_500_steps_without_a_fault_raise_no_alarm_and_name_no_straggler(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["training.steps=500", "checkpoint.every=100", "evaluation.every=100"]
    code, errors = finish(start(run_file, run_dir, *words))
    assert code == 0 and "fault:" not in errors and not (run_dir / "fault.json").exists()
    named = [event for event in rows(run_dir / "events.jsonl") if event["kind"] in ("straggler", "slow_link")]
    looks = [row for row in rows(run_dir / "metrics.jsonl") if row["node_wait_seconds"] is not None]
    print(f"\n| F18 500 even steps | {len(named)} stragglers named in {len(looks)} looks |")
    assert not named and looks


def test_a_rank_60_ms_slower_is_named(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = fault_words(kind="slow", rank=1, step=40, seconds=0.06)
    code, errors = finish(start(run_file, run_dir, slow, "training.steps=160", "checkpoint.every=null"))
    assert code == 0, errors
    named = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "straggler"]
    assert named and {event["rank"] for event in named} == {1}
    print(f"\n| F18 60 ms a step slower from step 40 | rank 1 named at step {named[0]['step']} |")
    assert "rank 1 on" in errors and "is a straggler" in errors
    assert named[0]["step"] >= 40
    assert any(row["straggler"] == 1 for row in rows(run_dir / "metrics.jsonl"))


def test_a_suspended_rank_under_torchrun_is_named(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    words = ["layout.dp_shard=2", f"restart.heartbeat_s={HEARTBEAT_S}", f"training.steps={STEPS}"]
    fault = fault_words(kind="stop", step=17, marker=tmp_path / "happened")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "phalanx", "train", str(run_file), "--run-dir", str(run_dir), *words, fault],
        env=environment(run_file),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((run_dir / "fault.json").read_text())
    assert (report["rank"], report["cause"]) == (1, "stopped")
    assert report["silent_s"] <= HEARTBEAT_S + 1.0
    print(f"\n| F03 suspended, under torchrun | stopped | found in {report['silent_s']:.1f} s, restarted by torchrun |")


STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("listens", flush=True)
before = store.num_keys()
while store.num_keys() <= before:
    time.sleep(0.01)
print("a rank is here", flush=True)
time.sleep(600)
"""


class StoreOfTheirOwn:
    """Two ranks that meet in a store of neither, as under torchrun, whose agent keeps it; all of them end with the block."""

    def __init__(self, run_file: Path, run_dir: Path) -> None:
        self.run_file, self.run_dir = run_file, run_dir
        self.processes: list[subprocess.Popen[Any]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.store = subprocess.Popen([sys.executable, "-c", STORE, self.port], stdout=subprocess.PIPE, text=True)
        self.processes.append(self.store)
        assert self.store_says() == "listens"

    def __enter__(self) -> StoreOfTheirOwn:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def store_says(self) -> str:
        assert self.store.stdout is not None
        return self.store.stdout.readline().strip()

    def log(self, rank: int) -> Path:
        return self.run_file.parent / f"{self.run_dir.parent.name}-{self.port}-rank-{rank}.log"

    def start_rank(self, rank: int, *words: str) -> subprocess.Popen[Any]:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": self.port}
        more = {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
        more |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": self.port}
        command = [sys.executable, "-m", "phalanx", "train", str(self.run_file), "--run-dir", str(self.run_dir)]
        with self.log(rank).open("wb") as log:
            process = subprocess.Popen(
                [*command, "layout.dp_shard=2", f"training.steps={STEPS}", *words],
                env=environment(self.run_file, more),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.processes.append(process)
        return process


def test_ranks_that_have_met_need_their_store_no_more(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with StoreOfTheirOwn(run_file, run_dir) as met:
        ranks = [met.start_rank(rank, fault_words(kind="slow", step=8, seconds=0.2)) for rank in (0, 1)]
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        met.store.kill()
        seen = len(metrics.read_text().splitlines())
        assert seen < STEPS
        assert [rank.wait(300) for rank in ranks] == [0, 0], met.log(0).read_text()
    assert_same_bits(run_dir, undisturbed)
    print(f"\n| F20 store killed in step {seen} | nothing noticed it | same bits |")


def test_a_store_that_dies_before_all_have_met_ends_the_run_in_time(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with StoreOfTheirOwn(run_file, run_dir) as met:
        waiting = met.start_rank(0)
        assert met.store_says() == "a rank is here"
        met.store.kill()
        met.store.wait()
        happened = time.monotonic()
        assert waiting.wait(60) == 1
        ended_s = time.monotonic() - happened
        said = met.log(0).read_text()
        assert ended_s <= TRAINING_S, said
        assert f"rank 0 of 2 does not meet the others at MASTER_ADDR=127.0.0.1 MASTER_PORT={met.port}" in said
        # The one that comes later finds nobody.
        late = met.start_rank(1, "training.timeout_s=3")
        assert late.wait(120) == 1
        assert "rank 1 of 2 does not meet the others" in met.log(1).read_text()
    assert not run_dir.exists()
    with StoreOfTheirOwn(run_file, run_dir) as met:
        assert [rank.wait(300) for rank in [met.start_rank(0), met.start_rank(1)]] == [0, 0], met.log(0).read_text()
    assert_same_bits(run_dir, undisturbed)
    print(
        f"\n| F20 store killed as a rank waits for the other | ended in {ended_s:.1f} s | same bits with another store |"
    )


def test_a_suspended_rank_does_not_outlive_a_request_to_stop(run_file: Path, tmp_path: Path) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "happened"
    words = [fault_words(kind="stop", step=17, marker=marker), "restart.heartbeat_s=600", "training.steps=100000"]
    process = start(run_file, run_dir, *words)
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    took = time.monotonic() - asked
    assert code == 128 + signal.SIGTERM, errors
    print(f"\n| F11 SIGTERM to a run with a suspended rank | ended in {took:.1f} s, saved |")
    assert took < 15.0


def test_memory_that_runs_out_halves_the_micro_batch_in_place(
    run_file: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    run_dir = run_file.parent / "full"
    # In every step, the first one too: only less memory helps.
    code, errors = finish(start(run_file, run_dir, fault_words(kind="full", rank=1, step=1, samples=2)))
    assert code == 0, errors
    assert (
        "memory ran out" in errors
        and "layout.microbatch" in errors
        and "restart 1" in errors
        and "restart 2" not in errors
    )
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["microbatch"] for event in events if event["kind"] == "less_memory"] == [2]
    found = final_weights(run_dir)
    worst = max(float((found[name].double() - value.double()).abs().max()) for name, value in undisturbed.items())
    print(f"out of memory in step 1: restarted once with micro-batches of 2; weights differ by at most {worst:.1e}")
    assert worst < 1e-4


FLIPS, BETWEEN, COMPARED = 30, 7, 3
"""Flips of bits in a run, steps between them, and steps between comparisons of replicas."""


def test_flipped_bits_are_found_where_replicas_differ_and_called_right(run_file: Path, tmp_path: Path) -> None:
    run_dir, log, first = tmp_path / "run", tmp_path / "flips.jsonl", 20
    fault = fault_words("flips", log=log, trials=FLIPS, first=first, every=BETWEEN, seed=1)
    words = ["dp_replicate=3", "dp_shard=1", "zero=0", "global_batch=12", "microbatch=4", "training.on_nonfinite=skip"]
    words += ["safeguards.replay=true", "safeguards.on_spike=skip", f"safeguards.compare_replicas={COMPARED}"]
    words += [f"checkpoint.every={2 * COMPARED}", f"training.steps={first + FLIPS * BETWEEN}", fault]
    # No rank is to count as hung however busy the machine is.
    code, errors = finish(start(run_file, run_dir, *words, "restart.heartbeat_s=60", ranks=3))
    assert code == 0, errors[-3000:]
    flips, events = rows(log), rows(run_dir / "events.jsonl")
    assert len(flips) == FLIPS
    # Those that say which parameters differ are cut with the steps that are done again.
    undone = {event["wrong_step"]: event["reason"] for event in events if event["kind"] == "rewind"}
    called = [(event["step"], event["cause"]) for event in events if event["kind"] == "fault_class"]
    weights = [flip for flip in flips if flip["place"] == "weight"]
    for flip in weights:
        found = [step for step in undone if flip["step"] <= step <= flip["step"] + COMPARED]
        assert found and f": rank {flip['rank']} (" in undone[found[0]], (flip, undone)
    # Nothing but a flip of a weight makes replicas differ: gradients are summed over them.
    assert len(undone) == len(weights) == FLIPS // 3
    right = sum(cause == "transient" for _, cause in called)
    others = {flip["step"] for flip in flips if flip["place"] != "weight"}
    seen = {step for step, _ in called} & others
    print(
        f"\n| F17 {FLIPS} flips of 1 to 4 bits | {len(weights)} of {len(weights)} in weights found within {COMPARED} steps, "
        f"rank named; {len(seen)} of {len(others)} in gradients and activations stood out | {right} of {len(called)} called "
        "transient |"
    )
    assert right >= 0.95 * len(called) and len(called) >= len(weights)


WALL_S, SAVE_S = 120, 3.0


def test_a_run_has_saved_before_its_wall_time_ends(run_file: Path, tmp_path: Path) -> None:
    run_dir, end = tmp_path / "run", time.time() + WALL_S
    slow = fault_words(kind="slow save", rank=0, seconds=SAVE_S)
    words = [slow, "training.steps=1000000", "checkpoint.every=20", "restart.heartbeat_s=60"]
    code, errors = finish(start(run_file, run_dir, *words, more={END_TIME: f"{end:.0f}"}))
    left_s = end - time.time()
    assert code == 128 + signal.SIGTERM and "before the end of the wall time after step" in errors, errors[-3000:]
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step == len(rows(run_dir / "metrics.jsonl"))
    saves = [event["seconds"] for event in rows(run_dir / "events.jsonl") if event["kind"] == "checkpoint_written"]
    print(
        f"\n| F12 wall time of {WALL_S} s, saves of up to {max(saves):.1f} s | saved after step {newest.step:,}, ended "
        f"{left_s:.1f} s before |"
    )
    assert min(saves) >= SAVE_S and 0.0 < left_s < WALL_S / 2


def wait_for_step(run_dir: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    log = run_dir / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < step:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_whose_processes_were_all_killed_starts_at_once(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    slow = fault_words(kind="slow", rank=1, step=1, seconds=0.1)
    shared = set(os.listdir("/dev/shm"))
    process = start(run_file, run_dir, slow)
    wait_for_step(run_dir, 12, process)
    everything = [process.pid, *children(process.pid)]
    assert len(everything) == 4
    for pid in everything:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    again = start(run_file, run_dir)
    process.communicate()
    wait_for_step(run_dir, 13, again)
    took = time.monotonic() - killed
    code, errors = finish(again)
    assert code == 0, errors
    assert_same_bits(run_dir, undisturbed)
    assert set(os.listdir("/dev/shm")) <= shared
    print(f"\n| F25 all processes killed, started at once | same bits | training again in {took:.1f} s |")


CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static void skew(struct timespec *at) {
    static struct timespec first;
    const char *rank = getenv("RANK"), *how = getenv("SKEW"), *from = getenv("SKEW_FROM");
    if (!rank || strcmp(rank, "1") || (*from && access(from, F_OK)))
        return;
    if (strcmp(how, "frozen")) {
        at->tv_sec += atol(how);
        return;
    }
    if (!first.tv_sec)
        first = *at;
    *at = first;
}
int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        skew(at);
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that shows rank 1 another time of day than it is."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.c"], check=True)
    return folder / "clock.so"


@pytest.mark.parametrize("skew", ["3600", "-3600", "frozen", "3600 from a fault on"])
def test_the_time_of_day_decides_nothing(
    skew: str, clock: Path, run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    marker, read, run_dir = tmp_path / "happened", tmp_path / "read", tmp_path / "run"
    more = {"LD_PRELOAD": str(clock), "SKEW": skew.split()[0], "SKEW_FROM": str(marker) if "from" in skew else ""}
    words = both(
        fault_words(kind="kill", rank=0, step=23, marker=marker), fault_words(kind="mark", rank=1, step=30, marker=read)
    )
    code, errors = finish(start(run_file, run_dir, words, more=more))
    assert code == 0, errors
    (fault,) = rows(run_dir / "faults.jsonl")
    assert (fault["rank"], fault["cause"], fault["step"]) == (0, "signal", 23)
    named_s, again_s = measure_times(run_dir, marker)
    # What rank 1 took for the time in step 30, beside the time at which it was started again.
    ahead_s = float(read.read_text()) - (float(marker.read_text()) + again_s)
    assert ahead_s < 0 if skew == "frozen" else abs(ahead_s - int(skew.split()[0])) < 100
    assert_same_bits(run_dir, undisturbed)
    print(
        f"\n| F22 clock of rank 1: {skew} | found in {named_s:.1f} s | training again in {again_s:.1f} s | same bits |"
    )
    assert named_s <= DETECTED_S and again_s <= DETECTED_S + TRAINING_S


LINK_TIMEOUT_S, FLAP_S = 8.0, 3.0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, as two hosts have it; needs root."""
    names = [f"phalanx-{os.getpid()}-{number}" for number in (0, 1)]
    devices = [f"ph{os.getpid() % 10**6}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", "name", devices[1], "netns", names[1])
        for number, (name, device) in enumerate(zip(names, devices, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", device)
            for one in ("lo", device):
                ip("-n", name, "link", "set", one, "up")
        yield [f"{name} {device}" for name, device in zip(names, devices, strict=True)]
    finally:
        for name in names:
            ip("netns", "del", name)


def start_on_hosts(hosts: list[str], run_file: Path, run_dir: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start a rank on each host, as a launcher on it would."""
    started = []
    for rank, host in enumerate(hosts):
        name, device = host.split()
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": device}
        inside = ["ip", "netns", "exec", name]
        started.append(start_rank(run_file, run_dir, place | meeting, *words, inside=inside))
    return started


def set_link(hosts: list[str], state: str) -> None:
    name, device = hosts[0].split()
    subprocess.run(["ip", "-n", name, "link", "set", device, state], check=True)


def test_a_link_that_stays_down_ends_both_ranks_in_time(hosts: list[str], run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks = start_on_hosts(
        hosts,
        run_file,
        run_dir,
        "training.steps=100000",
        f"training.timeout_s={LINK_TIMEOUT_S}",
        "checkpoint.every=null",
    )
    wait_for_step(run_dir, 8, *ranks)
    set_link(hosts, "down")
    down = time.time()
    for rank, process in enumerate(ranks):
        code, errors = finish(process)
        assert code == 1 and f"rank {rank} lost another rank in step" in errors, errors
    found_s = [(run_dir / f"failure-rank-{rank}.log").stat().st_mtime - down for rank in (0, 1)]
    print(f"\n| F19 link down for good, timeout {LINK_TIMEOUT_S:g} s | lost link | found in {max(found_s):.1f} s |")
    assert max(found_s) <= LINK_TIMEOUT_S + 1.0


def test_a_link_that_comes_back_is_not_noticed(
    hosts: list[str], run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    slow = fault_words(kind="slow", rank=1, step=1, seconds=0.1)
    ranks = start_on_hosts(hosts, run_file, run_dir, f"training.steps={STEPS}", "training.timeout_s=20", slow)
    wait_for_step(run_dir, 8, *ranks)
    set_link(hosts, "down")
    time.sleep(FLAP_S)
    set_link(hosts, "up")
    for process in ranks:
        code, errors = finish(process)
        assert code == 0 and "lost" not in errors, errors
    assert_same_bits(run_dir, undisturbed)
    seconds = max(row["step_seconds"] for row in rows(run_dir / "metrics.jsonl"))
    assert seconds > FLAP_S
    print(f"\n| F19 link down for {FLAP_S:g} s | survived | a step of {seconds:.1f} s, same bits |")


def run_chaos(run_file: Path, out: Path, *words: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run `phalanx chaos` on so many ranks a node, which has to end well; returns what became of each fault."""
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "chaos",
        str(run_file),
        "--nproc",
        str(ranks),
        "--out",
        str(out),
        "--json",
    ]
    heartbeat = f"restart.heartbeat_s={HEARTBEAT_S}"
    done = subprocess.run(
        [*command, *words, heartbeat, f"training.steps={STEPS}"],
        env=environment(run_file),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((out / "chaos.json").read_text()) and found["failures"] == []
    for row in found["outcomes"]:
        times = f"found in {row['detected_s']:.1f} s | training again in {row['training_s']:.1f} s"
        print(f"\n| F26 chaos: {row['fault']['kind']} | {row['found_as']} | {times} |")
    outcomes: list[dict[str, Any]] = found["outcomes"]
    return outcomes


def test_chaos_finds_names_and_survives_what_it_injects(run_file: Path, tmp_path: Path) -> None:
    words = ["--count", "3", "--faults-per-run", "3", "--seed", "3", "layout.dp_shard=2"]
    outcomes = run_chaos(run_file, tmp_path / "chaos", *words)
    assert len(outcomes) == 3 and all(row["survived"] and row["same_bits"] for row in outcomes)


def test_chaos_kills_in_checkpoints_flips_bits_and_takes_memory(run_file: Path, tmp_path: Path) -> None:
    words = ["--faults", "save,bitflip,oom", "--count", "5", "--faults-per-run", "4", "--seed", "0", "dp_replicate=2"]
    outcomes = run_chaos(run_file, tmp_path / "chaos", *words)
    kinds = [row["fault"]["kind"] for row in outcomes]
    assert [kinds.count(kind) for kind in ("save", "bitflip", "oom")] == [2, 2, 1] and kinds[-1] == "oom"
    assert all(row["survived"] for row in outcomes) and all(row["same_bits"] for row in outcomes[:-1])
    # Found at the next comparison, and the steps done again without a restart; unless a rank that is killed in a save in the
    # background, whose moment nobody sets, ends the ranks before.
    flips = [row["found_as"] for row in outcomes if row["fault"]["kind"] == "bitflip"]
    assert "replicas differ" in flips and set(flips) <= {"replicas differ", "gone with another fault"}


def test_chaos_strikes_ranks_of_two_supervisors(run_file: Path, tmp_path: Path) -> None:
    words = ["--faults", "kill,error,hang", "--count", "3", "--faults-per-run", "3", "--seed", "4", "layout.dp_shard=2"]
    outcomes = run_chaos(run_file, tmp_path / "chaos", *words, "--nodes", "2", ranks=1)
    assert len(outcomes) == 3 and all(row["survived"] and row["same_bits"] for row in outcomes)
    assert {row["fault"]["rank"] for row in outcomes} == {0, 1}


def start_nodes(run_file: Path, run_dir: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start the supervisors of two nodes, each with one rank."""
    where = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    return [
        start(
            run_file,
            run_dir,
            *where,
            *("--node-rank", str(node)),
            "layout.dp_shard=2",
            *words,
            ranks=1,
            more={"SLURMD_NODENAME": f"node00{node}"},
        )
        for node in range(2)
    ]


@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [
        ("killed", "kill", "signal"),
        ("suspended", "stop", "stopped"),
        ("endless loop", "spin", "hang"),
    ],
)
def test_a_fault_on_another_node_is_named_and_leaves_no_trace(
    name: str, kind: str, cause: str, run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    marker, run_dir = tmp_path / "happened", tmp_path / "run"
    nodes = start_nodes(run_file, run_dir, fault_words(kind=kind, rank=1, step=23, marker=marker))
    ends = [finish(process) for process in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    report = json.loads((run_dir / "fault.json").read_text())
    assert (report["rank"], report["host"], report["cause"], report["step"]) == (1, "node001", cause, 23)
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    named_s, again_s = measure_times(run_dir, marker)
    limit = DETECTED_S if cause == "signal" else HEARTBEAT_S + 1.0
    found_s = report["silent_s"] if report["silent_s"] is not None else named_s
    print(
        f"\n| two nodes, rank 1 on the second: {name} | {cause} | found in {found_s:.1f} s | again in {again_s:.0f} s |"
    )
    assert_same_bits(run_dir, undisturbed)
    assert found_s <= limit
    assert again_s <= limit + TRAINING_S


def test_a_slow_rank_on_another_node_is_named_with_its_host(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = fault_words(kind="slow", rank=1, step=40, seconds=0.06)
    nodes = start_nodes(
        run_file, run_dir, slow, "training.steps=160", "checkpoint.every=null", "restart.heartbeat_s=30"
    )
    ends = [finish(process) for process in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    named = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "straggler"]
    assert named and {(event["rank"], event["host"]) for event in named} == {(1, "node001")}
    assert named[0]["step"] >= 40 and "rank 1 on node001 is a straggler" in ends[0][1]
    print(
        f"\n| F18 two nodes, 60 ms a step slower on the second | rank 1 on node001 named at step {named[0]['step']} |"
    )


def test_a_request_to_stop_on_one_node_saves_and_ends_all(
    run_file: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    nodes = start_nodes(run_file, run_dir)
    wait_for_step(run_dir, 12, *nodes)
    nodes[1].send_signal(signal.SIGINT)
    ends = [finish(process) for process in nodes]
    assert [code for code, _ in ends] == [128 + signal.SIGINT] * 2, ends
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and newest.step >= 12 and not (run_dir / "fault.json").exists()
    nodes = start_nodes(run_file, run_dir)
    assert [finish(process)[0] for process in nodes] == [0, 0]
    assert_same_bits(run_dir, undisturbed)
