"""Faults in a run on two nodes of a real Slurm, started by the script that `phalanx launch` writes.

    bash benchmarks/one_host_slurm.sh FOLDER python benchmarks/faults_under_slurm.py --out FILE

Each case is a job of two nodes with a supervisor and a rank on each: what strikes it, how Slurm and the script saw it end,
when the fault was found and named and when training went on, and whether the run ended with the bits of an undisturbed one.
The Slurm is there already, has two nodes and may be disturbed; `one_host_slurm.sh` starts one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fault_injection import fault_words, offer_callback
from phalanx.chaos.run import compare_ends
from token_data import write_run_file, write_token_folder

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
STEPS, HEARTBEAT_S = 60, 10
STRUCK = 23
"""Step before which a fault happens."""
MACHINE = """
name: here
about: two nodes of a Slurm on one machine
documents: {}
node: {source: sinfo, devices: 1, device: H100 SXM, cores_per_task: 1}
stop: {seconds_before_end: SECONDS}
"""


@dataclass(frozen=True)
class Case:
    """One job, and what befalls it."""

    name: str
    words: Sequence[str] = ()
    strike: Callable[[Bench, Path, str], None] | None = None
    """Called with the run directory and the job's number once `STRUCK` steps are done."""
    minutes: int = 20
    stop_s: int = 60
    """Seconds before the end of the job at which Slurm signals its ranks."""
    steps: int = STEPS


class Bench:
    """Where the jobs are made, and the Slurm that they run on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        offer_callback(folder)
        self.run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))
        self.nodes = subprocess.check_output(["sinfo", "--noheader", "--Node", "--format=%N"], text=True).split()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(self, case: Case) -> Row:
        """Run one case to its end and return what became of it."""
        name = re.sub(r"\W+", "-", case.name)
        run_dir, marker = self.folder / name, self.folder / f"{name}.marker"
        machine = self.folder / f"{name}.machine.yaml"
        machine.write_text(MACHINE.replace("SECONDS", str(case.stop_s)))
        words = [word.replace("MARKER", str(marker)) for word in case.words]
        words += [f"training.run_dir={run_dir}", f"training.steps={case.steps}", f"restart.heartbeat_s={HEARTBEAT_S}"]
        command = ["phalanx", "launch", str(self.run_file), "--cluster", str(machine), "--nodes", "2", "--no-preflight"]
        command += [
            "--time",
            f"{case.minutes}",
            "--out",
            f"{name}.sbatch",
            "--submit",
            "--json",
            "layout.dp_shard=2",
            *words,
        ]
        said = json.loads(subprocess.check_output(command, cwd=self.folder, text=True))
        job, struck = said["job_id"], None
        if case.strike is not None:
            wait_until(lambda: count_steps(run_dir) >= STRUCK)
            struck = time.time()
            case.strike(self, run_dir, job)
        state = self.wait_for_end(job)
        log = self.folder / f"phalanx-{self.run_file.stem}-{job}.log"
        if struck is None and marker.exists():
            struck = float(marker.read_text())
        lines = [line for line in log.read_text().splitlines() if not re.match(r"step \d", line)]
        return {
            "case": case.name,
            "launch": shlex.join(command),
            **state,
            **read_run(run_dir, struck, case.steps),
            "log": [shorten(line, self.folder) for line in lines],
        }

    def wait_for_end(self, job: str) -> Row:
        """Wait until a job has ended for good; return how, by Slurm."""

        def show() -> dict[str, str]:
            text = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
            return dict(word.split("=", 1) for word in text.split() if "=" in word)

        wait_until(lambda: show().get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), 1200)
        found = show()
        return {"state": found["JobState"], "exit": found["ExitCode"], "requeued": int(found["Restarts"])}

    def pids_on(self, node: str, program: str = "") -> list[int]:
        """Return the processes that Slurm has started on a node, those alone whose command holds `program`."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                # Another Slurm of this host may have nodes of the same names.
                wanted = {f"SLURMD_NODENAME={node}", f"SLURM_CONF={os.environ['SLURM_CONF']}"}
                if wanted <= set(variables) and program in command:
                    found.append(int(path.name))
        return found


def end_all(pids: Sequence[int]) -> None:
    """Kill processes, those that have ended meanwhile left out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_supervisor(bench: Bench, _run_dir: Path, _job: str) -> None:
    """Kill the supervisor of the second node; its rank ends with it."""
    end_all(bench.pids_on(bench.nodes[1], "-m phalanx.launch"))


def fail_node(bench: Bench, _run_dir: Path, _job: str) -> None:
    """Have the second node fail, all its processes and its daemon at once, and come back when Slurm has noticed."""
    node, folder = bench.nodes[1], Path(os.environ["SLURM_CONF"]).parent
    tasks = bench.pids_on(node)
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in tasks}
    steps = [pid for pid in parents if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")]
    end_all([int((folder / f"slurmd-{node}.pid").read_text()), *steps, *tasks])
    wait_until(lambda: "down" in subprocess.check_output(["sinfo", "-hNo", "%N %T", "-n", node], text=True))
    subprocess.run([folder / f"mend-{node}"], check=True)


def cancel(_bench: Bench, _run_dir: Path, job: str) -> None:
    """Cancel the job, as its user does."""
    subprocess.run(["scancel", job], check=True)


def preempt(_bench: Bench, _run_dir: Path, job: str) -> None:
    """Send SIGTERM to all ranks, as Slurm does before a job's time is over."""
    subprocess.run(["scancel", "--signal=TERM", job], check=True)


def fault(kind: str, **options: Any) -> str:
    """Return the override that has something happen to rank 1, once."""
    return fault_words(kind=kind, rank=1, step=STRUCK, marker="MARKER", **options)


SLOW = fault_words(kind="slow", rank=1, step=1, seconds=0.2)
"""Has a job last until it is struck from outside."""
CASES = (
    Case("undisturbed"),
    Case("rank killed", [fault("kill")]),
    Case("rank hangs", [fault("spin")]),
    Case("supervisor killed", strike=kill_supervisor, words=[SLOW]),
    Case("supervisor killed, replan", strike=kill_supervisor, words=[SLOW, "restart.layout=replan"]),
    Case("node failed", strike=fail_node, words=[SLOW]),
    Case("node failed, replan", strike=fail_node, words=[SLOW, "restart.layout=replan"]),
    Case("signalled", strike=preempt, words=[SLOW]),
    Case("cancelled", strike=cancel, words=[SLOW]),
    Case("time limit", words=[fault_words(kind="slow", rank=1, step=1, seconds=1.0)], minutes=4, stop_s=50, steps=180),
    Case("the same fault again and again", [fault_words(kind="kill", rank=1, step=STRUCK), "restart.max=1"]),
)


def count_steps(run_dir: Path) -> int:
    """Return how many steps a run has logged."""
    log = run_dir / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def read_rows(file: Path) -> list[Row]:
    """Return the lines of a log."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def seconds_of(row: Row) -> float:
    """Return when something was logged, in seconds since 1970."""
    return datetime.fromisoformat(row["time"]).timestamp()


def read_run(run_dir: Path, struck: float | None, steps: int) -> Row:
    """Return what a run says of its faults, and how long after `struck` it found the first and went on."""
    faults, events = read_rows(run_dir / "faults.jsonl"), read_rows(run_dir / "events.jsonl")
    starts = [row for row in events if row["kind"] in ("start", "resume")]
    again = [seconds_of(row) - struck for row in starts if struck is not None and seconds_of(row) > struck]
    found = [seconds_of(row) - struck for row in faults if struck is not None]
    undisturbed = run_dir.parent / "undisturbed"
    whole = count_steps(run_dir) == steps == STEPS and run_dir != undisturbed
    same, apart = compare_ends(run_dir, undisturbed) if whole else (None, None)
    names = ("rank", "host", "cause", "detail", "step", "phase", "silent_s", "action")
    return {
        "steps": count_steps(run_dir),
        "faults": [{name: row[name] for name in names} for row in faults],
        "found_s": [round(one, 2) for one in found],
        "began_again_s": [round(one, 2) for one in again],
        "begun_from": [row.get("step") for row in starts],
        "same_bits": same,
        "difference": apart,
    }


def shorten(line: str, folder: Path) -> str:
    """Return a line of a log without the folder of this run."""
    return line.replace(str(folder), "WORK")[:300]


def wait_until(what: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until `what` holds; raise where it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def main() -> None:
    """Run the cases and write what became of them, after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of cases; undisturbed always runs")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    asked = parser.parse_args()
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-slurm-") as name:
        bench = Bench(Path(name))
        for case in CASES:
            if asked.only and case.name not in ("undisturbed", *asked.only):
                continue
            found.append({**bench.run(case), "load": os.getloadavg()[0]})
            print(
                json.dumps({key: value for key, value in found[-1].items() if key not in ("log", "launch")}), flush=True
            )
            result = {
                "command": shlex.join(["python", "benchmarks/faults_under_slurm.py", *sys.argv[1:]]),
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
                "versions": {
                    "torch": metadata.version("torch"),
                    "slurm": subprocess.check_output(["sinfo", "--version"], text=True).strip(),
                },
                "machine": {"system": platform.platform(), "nodes": bench.nodes, "note": asked.note},
                "cases": found,
            }
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
