"""What the first commands take: help, `config check`, and the quickstart until its first step, on two cores.

    python benchmarks/front_door.py --data data/python-stdlib --out benchmarks/results/front_door/timings.json

Each command is run several times after one that fills the page cache. Noted are wall and CPU time of each run, the load
of the machine before it, and their medians beside the bars. On a machine with other work CPU time is what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CORES = 2


@dataclass(frozen=True)
class Timing:
    """One run of a command."""

    wall_s: float
    cpu_s: float
    """User and system time of the command and what it started."""
    load: float
    """Processes that wanted a core in the minute before."""


@dataclass(frozen=True)
class Timed:
    """A command, and what it may take."""

    name: str
    words: tuple[str, ...]
    most_s: float
    until: str | None = None
    """Begin of the line at which the time is taken, and the command stopped; None takes its end."""


def list_commands(data: str, run_dir: str) -> list[Timed]:
    """Return the commands and their bars. data: prepared text."""
    quickstart = "examples/quickstart.yaml"
    source = f"data.sources=[{data}]"
    return [
        Timed("help", ("--help",), 0.5),
        Timed("config check", ("config", "check", quickstart, source), 1.5),
        Timed(
            "first step",
            ("train", quickstart, source, "training.log_every=1", "--run-dir", run_dir),
            20.0,
            until="step 1/",
        ),
    ]


def measure(timed: Timed) -> Timing:
    """Run a command once, and stop it after the line that is waited for."""
    load, before, start = os.getloadavg()[0], _cpu_of_children(), time.perf_counter()
    command = [sys.executable, "-m", "phalanx", *timed.words]
    # A group of its own, so that a trainer is ended with all that it started; what it says goes to stderr.
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as child:
        assert child.stdout is not None
        if timed.until is None:
            child.stdout.read()
        else:
            if not any(line.startswith(timed.until) for line in child.stdout):
                raise SystemExit(f"{timed.name}: no line begins with {timed.until!r}")
        wall = time.perf_counter() - start
        if timed.until is not None:
            cpu = _cpu_of_group(child.pid)
            os.killpg(child.pid, signal.SIGKILL)
    if timed.until is None:
        if child.returncode != 0:
            raise SystemExit(f"{timed.name} failed")
        cpu = _cpu_of_children() - before
    return Timing(round(wall, 3), round(cpu, 3), round(load, 2))


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_of_group(group: int) -> float:
    """CPU time so far of all processes of a group that still run: fields 5, 14 and 15 of /proc/PID/stat."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def summarise(timed: Timed, timings: Sequence[Timing], data: str) -> dict[str, Any]:
    """Return the runs of a command with their medians beside the bar, without the places of this machine."""
    words = ["DATA" if data in word else word for word in timed.words]
    return {
        "command": " ".join(("phalanx", *("RUN_DIR" if Path(word).is_absolute() else word for word in words))),
        "bar_s": timed.most_s,
        "median_wall_s": statistics.median(timing.wall_s for timing in timings),
        "median_cpu_s": statistics.median(timing.cpu_s for timing in timings),
        "runs": [asdict(timing) for timing in timings],
    }


def main() -> None:
    """Measure and write."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--data", default="data/python-stdlib", help="prepared text of the quickstart")
    asked.add_argument("--repeats", type=int, default=5)
    asked.add_argument("--out", type=Path, required=True)
    given = asked.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "cores": CORES,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for timed in list_commands(given.data, scratch):
            measure(timed)
            runs = [measure(timed) for _ in range(given.repeats)]
            found[timed.name] = summarise(timed, runs, given.data)
            print(timed.name, found[timed.name]["median_wall_s"], "s wall,", found[timed.name]["median_cpu_s"], "s CPU")
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
