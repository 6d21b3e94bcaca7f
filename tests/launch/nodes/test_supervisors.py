"""Supervisors of several nodes, all on this machine: what one finds all learn, and all ranks begin again together.

The ranks are probes with real heartbeats that do what their scenario says; supervisors, connections and reports are real.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.errors import ConfigError
from phalanx.launch.collectives import Collective
from phalanx.launch.faults import FAILED_NODES, FAULT_FILE, FAULT_LOG, NodeEnd, RankView
from phalanx.launch.heartbeat import Beat
from phalanx.launch.local_launch import LOST
from phalanx.launch.nodes.links import TOKEN, TOKEN_FILE
from phalanx.launch.nodes.supervisors import NodePlace, find_place, read_end, write_end
from phalanx.launch.restart import BAD_USAGE, END_FILE, GIVEN_UP
from phalanx_processes import free_port

PROBE = """#!{python} -SE
import json, os, signal, sys, time
sys.path.insert(0, {source!r})
from pathlib import Path
from phalanx.launch.heartbeat import heartbeat_of
from phalanx.launch.parent import die_with_parent

die_with_parent()
scenario, folder = [word for word in sys.argv if "layout." not in word][-2:]
rank, folder = int(os.environ["RANK"]), Path(folder)
heart = heartbeat_of(rank)
ahead_s = 3600.0 if "slow" in scenario and rank == 1 else 0.0

def collectives():
    # Five in a step of 0.16 s; rank 1 comes to the first of them 60 ms late.
    if "slow" not in scenario:
        return None
    newest, entries = int((time.time() - {began}) / 0.16), []
    for step in range(newest - 40, newest):
        for number in range(5):
            at = {began} + 0.16 * step + 0.02 * number + 0.06 * (rank == 1 or number > 0)
            entries.append(dict(collective_seq_id=5 * step + number, process_group=["0", ""], retired=True,
                profiling_name="gloo:all_reduce", time_created_ns=round((at + ahead_s) * 1e9)))
    return json.dumps([dict(entries=entries)])

heart.answer(collectives)
names = "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"
with (folder / f"attempts-{{rank}}").open("a") as file:
    print(*(os.environ[name] for name in names), {token!r} in os.environ, file=file)
attempt = len((folder / f"attempts-{{rank}}").read_text().splitlines())
heart.begin(10)
(folder / f"coming-{{rank}}").write_text(str(os.getpid()))
(folder / f"coming-{{rank}}").rename(folder / f"pid-{{rank}}")
stops = []
for name in "INT", "TERM":
    signal.signal(getattr(signal, "SIG" + name), lambda number, frame: stops.append(number))
lost = folder / f"lost-{{attempt}}"
for step in range(11, 1011 if "trains" in scenario else 31):
    heart.enter("data", step)
    time.sleep(0.16 if "slow" in scenario else 0.01)
    if stops:
        # Ranks agree on the largest number.
        (folder / "stop").write_text(str(max(stops)))
    if (folder / "stop").exists():
        (folder / f"saved-{{rank}}").touch()
        sys.exit(128 + int((folder / "stop").read_text() or 15))
    if rank == 1 and step == 20 and (attempt == 1 or "always" in scenario):
        if "killed" in scenario:
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "hangs" in scenario:
            (folder / "hangs").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
    heart.enter("collective")
    while rank == 0 and step == 25 and "hangs" in scenario and attempt == 1:
        time.sleep(0.01)
    if rank == 0 and lost.exists():
        # As over gloo, and before anybody else can have said what happened.
        heart.fail("lost link", RuntimeError("Connection closed by peer"))
        sys.exit(1)
    heart.finish_step(step)
    found = heart.folder / "stragglers.json"
    if "slow" in scenario and rank == 0 and found.exists() and json.loads(found.read_text())["straggler"]:
        (folder / "named").write_text(found.read_text())
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)
heart.enter("end")
"""
LAUNCH = """
import os, sys, time
from pathlib import Path
from phalanx.launch.nodes import links
from phalanx.launch.faults import Limits
from phalanx.launch.nodes.supervisors import NodePlace, launch_nodes
from phalanx.launch.restart import RestartPolicy
links._REFUSED_S = 1.0
sys.executable, node, nodes, port, most, scenario, folder = sys.argv[1:]
layouts = {1: ["layout.tp=1"]} if "replans" in scenario else {}
policy = RestartPolicy(int(most), 0.0, Limits(1.0, 20.0), Path(folder) / "run", layouts=layouts)
place = NodePlace(int(nodes), int(node), "127.0.0.1", int(port))
if "slow" in scenario and node == "1":
    here = time.time
    time.time = lambda: here() + 3600.0
sys.exit(launch_nodes([scenario, folder], 1, place, grace_s=20.0, policy=policy))
"""


class Node:
    """The supervisor of one node, with one probe."""

    def __init__(
        self, folder: Path, node: int, scenario: str, port: int, nodes: int = 2, most: int = 2, **variables: str
    ) -> None:
        probe = folder / "probe"
        if not probe.exists():
            source = str(Path(phalanx.__file__).parents[1])
            probe.write_text(PROBE.format(python=sys.executable, source=source, token=TOKEN, began=time.time() - 10.0))
            probe.chmod(0o755)
        words = [str(probe), *map(str, (node, nodes, port, most)), scenario, str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *words],
            env={**os.environ, "SLURMD_NODENAME": f"node{node:03d}", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        try:
            _, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, errors


def start(folder: Path, scenario: str, nodes: int = 2, **options: Any) -> list[Node]:
    (folder / "run").mkdir(exist_ok=True)
    port = free_port()
    return [Node(folder, node, scenario, port, nodes, **options) for node in range(nodes)]


def finish(nodes: list[Node]) -> tuple[list[int], list[str]]:
    ends = [node.finish() for node in nodes]
    return [code for code, _ in ends], [errors for _, errors in ends]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / FAULT_FILE).read_text())
    return found


def attempts(folder: Path, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"attempts-{rank}").read_text().splitlines()]


def test_a_rank_killed_on_another_node_is_named_and_all_nodes_begin_again(tmp_path: Path) -> None:
    codes, errors = finish(start(tmp_path, "killed"))
    assert codes == [0, 0], errors
    found = report(tmp_path)
    assert (found["rank"], found["host"], found["cause"], found["attempt"]) == (1, "node001", "signal", 0)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert (tmp_path / "run" / FAILED_NODES).read_text() == "node001\n"
    assert "fault: rank 1 on node001 failed" in errors[0] and "restart 1: all ranks begin again" in errors[0]
    assert "fault:" not in errors[1]
    first, second = attempts(tmp_path, 0), attempts(tmp_path, 1)
    assert [row[:3] for row in first + second] == [["2", "0", "1"]] * 4
    # All meet at one place, which is another one for each attempt.
    assert first == second and first[0][3:5] != first[1][3:5]
    assert not (tmp_path / "run" / TOKEN_FILE).exists()


def test_a_rank_that_hangs_on_another_node_is_named_by_what_all_nodes_know(tmp_path: Path) -> None:
    codes, errors = finish(start(tmp_path, "hangs"))
    assert codes == [0, 0], errors
    found = report(tmp_path)
    assert (found["rank"], found["host"], found["cause"]) == (1, "node001", "stopped")
    assert len(attempts(tmp_path, 0)) == len(attempts(tmp_path, 1)) == 2


def test_a_slow_rank_on_another_node_is_named_whatever_the_clock_there(tmp_path: Path) -> None:
    codes, errors = finish(start(tmp_path, "trains slow"))
    assert codes == [128 + signal.SIGTERM] * 2, errors
    found = json.loads((tmp_path / "named").read_text())
    slow = found["straggler"]
    assert (slow["rank"], slow["host"], slow["cause"]) == (1, "node001", "host")
    # 60 ms of 160.
    assert slow["share"] == pytest.approx(0.06 / 0.16, abs=0.1)
    assert [row["rank"] for row in found["times"]] == [0, 1]


def test_restarts_in_vain_end_on_all_nodes_with_the_code_of_one_node(tmp_path: Path) -> None:
    codes, errors = finish(start(tmp_path, "killed always", most=1))
    assert codes == [GIVEN_UP, GIVEN_UP], errors
    assert len((tmp_path / "run" / FAULT_LOG).read_text().splitlines()) == 2
    assert (tmp_path / "run" / END_FILE).read_text() == f"{GIVEN_UP}\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_supervisor_that_is_lost_ends_the_run_and_names_its_node(tmp_path: Path, number: int) -> None:
    nodes = start(tmp_path, "trains")
    wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
    nodes[1].process.send_signal(number)
    code, errors = nodes[0].finish()
    assert code == LOST, errors
    found = report(tmp_path)
    assert (found["rank"], found["host"], found["cause"]) == (1, "node001", "lost node")
    assert (tmp_path / "run" / FAILED_NODES).read_text() == "node001\n"
    nodes[1].process.send_signal(signal.SIGCONT)
    # One that comes to itself again finds that the run went on without it.
    assert nodes[1].finish()[0] == (LOST if number == signal.SIGSTOP else -signal.SIGKILL)
    wait_until(lambda: all(is_gone(tmp_path, rank) for rank in (0, 1)))


def is_gone(folder: Path, rank: int) -> bool:
    return not Path("/proc", (folder / f"pid-{rank}").read_text()).exists()


def test_a_run_goes_on_without_a_lost_node_where_a_layout_is_legal(tmp_path: Path) -> None:
    nodes = start(tmp_path, "trains replans")
    wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
    nodes[1].process.kill()
    wait_until(lambda: len(attempts(tmp_path, 0)) == 2)
    nodes[0].process.terminate()
    code, errors = nodes[0].finish()
    assert code == 128 + signal.SIGTERM, errors
    assert "node 1 (node001) is lost and is left out, 1 ranks begin" in errors
    assert attempts(tmp_path, 0)[1][0] == "1"
    nodes[1].finish()


def test_ranks_of_the_other_nodes_end_with_the_first_supervisor(tmp_path: Path) -> None:
    nodes = start(tmp_path, "trains")
    wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
    nodes[0].process.kill()
    code, errors = nodes[1].finish()
    assert code == LOST and "the supervisor of the first node (node000) is gone" in errors
    wait_until(lambda: all(is_gone(tmp_path, rank) for rank in (0, 1)))
    nodes[0].finish()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_to_stop_on_one_node_ends_all_in_order(tmp_path: Path, asked: int) -> None:
    nodes = start(tmp_path, "trains")
    wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
    nodes[asked].process.send_signal(signal.SIGINT)
    codes, errors = finish(nodes)
    assert codes == [128 + signal.SIGINT] * 2, errors
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))
    assert not (tmp_path / "run" / FAULT_FILE).exists()


def test_only_who_knows_the_secret_is_heard(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "run").mkdir()
    first = Node(tmp_path, 0, "ends", port, **{TOKEN: "the right one"})
    wait_until(lambda: is_listening(port))
    said = [b"\x80\x04garbage\n", b'{"kind": "fault"}\n', b"[" * 1500 + b"\n", b"x" * 100_000]
    for words in said:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
    # One that says nothing keeps nobody out.
    with socket.create_connection(("127.0.0.1", port)):
        wrong = Node(tmp_path, 1, "ends", port, **{TOKEN: "a wrong one"})
        other = Node(tmp_path, 1, "ends", port, nodes=3, **{TOKEN: "the right one"})
        assert other.finish()[0] == wrong.process.wait(60) == BAD_USAGE
        right = Node(tmp_path, 1, "ends", port, **{TOKEN: "the right one"})
        codes, errors = finish([first, right])
    assert codes == [0, 0], errors
    assert "does not know the secret of this run" in wrong.finish()[1]
    assert errors[0].count("refused a connection from 127.0.0.1: it does not know the secret of this run") > len(said)
    assert "it says --nodes 3 --node-rank 1 --nproc 1, the first node --nodes 2 --nproc 1" in errors[0]
    # Ranks do not see it.
    assert attempts(tmp_path, 0)[0][-1] == attempts(tmp_path, 1)[0][-1] == "False"


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_what_a_node_saw_arrives_by_the_clock_of_the_first() -> None:
    beat = Beat(10.0, 0.5, 0.2, 0.1, 9.0, 7, 6, 5, 1, 42)
    error = {"kind": "exception", "time": 11.0, "message": "no"}
    view = RankView(3, 42, -9, "", beat, error, 1.0)
    record = Collective("0 dp", 4, "all_reduce", 5.0, None, finished=False)
    end = NodeEnd((view,), (view,), 12.0, "now", (3,), False, {3: "stack"}, {3: [record]}, "node007")
    message = json.loads(json.dumps(write_end(end)))
    message["now"] -= 100.0
    found = read_end(message)
    assert found is not None and found.host == "node007" and found.collectives == {3: [record]}
    assert found.stacks == {3: "stack"} and found.silent == (3,)
    there = found.views[0]
    assert there.beat is not None and there.error is not None
    times = there.beat.since, there.beat.progressed, there.error["time"], there.started, found.seen_at
    assert times == pytest.approx([110.0, 109.0, 111.0, 101.0, 112.0], abs=5.0)


def test_the_place_of_a_node_comes_from_options_or_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert find_place(None, None, None) is find_place(1, None, None) is None
    assert find_place(2, 1, "[fe80::1]:29500") == NodePlace(2, 1, "fe80::1", 29500)
    for wrong in ((2, None, None), (2, 2, "a:1"), (2, 0, "a"), (2, 0, "a:0"), (None, 0, None)):
        with pytest.raises(ConfigError, match="--"):
            find_place(*wrong)
    step = {"TASKS": "4", "NODES": "4"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_STEP_NUM_{name}", value)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "20007")
    for nodes, first in (("gpu[007-009,12]-ib,login1", "gpu007-ib"), ("a,b[1-3]", "a"), ("n[3,5-6]", "n3")):
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert find_place(None, None, None) == NodePlace(4, 3, first, 10_007)
    monkeypatch.setenv("MASTER_ADDR", "n9")
    monkeypatch.setenv("MASTER_PORT", "77")
    assert find_place(None, None, None) == NodePlace(4, 3, "n9", 77)
    # A task for each rank: plain srun, as ever.
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert find_place(None, None, None) is None
