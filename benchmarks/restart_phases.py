"""Where the time from a fault to the next step goes: detection, the end of the other ranks, and each part of a new start.

    python benchmarks/restart_phases.py --out benchmarks/results/faults/restart --kinds kill,hang --count 6

Trains a small run on two ranks, or --ranks, under the supervisor, strikes it with faults drawn from a seed, prints the
seconds of each restart as soon as it has trained two steps, and writes those of all phases to OUT.json, beside the
processor's seconds of the slowest rank. Ends after --seconds with what it has by then. --small runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from faults_on_devices import Bench
from phalanx.chaos.faults import PlannedFault, draw_faults
from phalanx.chaos.inject import START, STEP_LOG
from phalanx.files import read_json_lines, write_atomically
from phalanx.launch.faults import FAULT_LOG
from phalanx.report.run_log import RunLog, split_wall_time, summarise_run
from phalanx.training import start
from phalanx.training.callbacks import Callback, TrainingContext
from phalanx.training.metrics import StepMetrics

PHASES = ("process", "callbacks", "joined", "laid out", "built", "restored", "begun", "first step", "second step")
"""Moments of a start, in their order: the process began, had loaded its modules, was in the process group and so on."""


class PhaseClock(Callback):
    """Notes when this process came to each of PHASES, in a file of `folder` named by its rank and number."""

    def __init__(self, folder: str) -> None:
        self.moments = {"process": _process_began(), "callbacks": time.time()}
        self.processor = {"callbacks": time.process_time()}
        self.loaded = set(sys.modules)
        self.folder = Path(folder)
        self.steps = 0
        for name, phase in (
            ("join_process_group", "joined"),
            ("apply_layout", "laid out"),
            ("build_step", "built"),
            ("restore_run", "restored"),
        ):
            setattr(start, name, self._timed(getattr(start, name), phase))

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self._note(phase)
            return result

        return timed

    def _note(self, phase: str) -> None:
        self.moments[phase], self.processor[phase] = time.time(), time.process_time()

    def on_start(self, context: TrainingContext) -> None:
        """Note that steps begin."""
        self.rank = context.rank
        self._note("begun")

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Note the ends of the first two steps and what was loaded since the callback was made."""
        self.steps += 1
        if self.steps > 2:
            return
        self._note("first step" if self.steps == 1 else "second step")
        later = set(sys.modules) - self.loaded
        said = {"forked": "phalanx.launch.preload" in sys.modules, "moments": self.moments, "processor": self.processor}
        said |= {"modules_later": len(later), "loaded_later": sorted({".".join(name.split(".")[:2]) for name in later})}
        write_atomically(self.folder / f"start-{self.rank}-{os.getpid()}.json", json.dumps(said))


def _process_began() -> float:
    """When this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.monotonic() - ticks / os.sysconf("SC_CLK_TCK"))


def measure_restarts(
    bench: Bench,
    kinds: tuple[str, ...],
    count: int,
    seed: int,
    threads: int,
    seconds: float,
    words: list[str],
    *,
    ranks: int,
) -> dict[str, Any]:
    """Train once with `count` faults for at most `seconds`; return the seconds of each phase of each restart."""
    described = bench.folder / "restart_phases-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: restart-phases\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[phalanx.callbacks]\nphase_clock = restart_phases:PhaseClock\n")
    steps = 20 * (count + 1)
    beside = bench.folder / "beside"
    beside.mkdir()
    planned = draw_faults(kinds, ranks=ranks, steps=steps, every=10, count=count, first=1, seed=seed)
    schedule = beside / "schedule.json"
    schedule.write_text(json.dumps([asdict(fault) for fault in planned]))
    callbacks = [
        {"name": "chaos", "options": {"schedule": str(schedule)}},
        {"name": "phase_clock", "options": {"folder": str(beside)}},
    ]
    follower = RestartFollower(planned, beside, bench.folder / "restarts" / FAULT_LOG, ranks)
    with follower:
        code, took, said = bench.train(
            "restarts", ranks, f"layout.dp_shard={ranks}", f"training.steps={steps}", "restart.max=100", *words,
            f"training.callbacks={json.dumps(callbacks)}", limit_s=seconds, more={"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
    # A run that is cut off at once has no log.
    folder = bench.folder / "restarts"
    parts = split_wall_time(summarise_run(RunLog.read(folder))) if (folder / "metrics.jsonl").exists() else {}
    return {"code": code, "seconds": took, "restarts": follower.rows, "wall_s": parts, "said": said.splitlines()[-60:]}


class RestartFollower:
    """Prints a line for each restart of a run while the run goes on: a run that is cut off has shown what it did by then."""

    def __init__(self, planned: Sequence[PlannedFault], beside: Path, fault_log: Path, ranks: int) -> None:
        self.rows: list[dict[str, Any]] = []
        """Of each fault that happened, in order; whole where training went on after it."""
        self._left = list(planned)
        self._beside, self._fault_log, self._ranks = beside, fault_log, ranks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(0.5):
            self._take_rows(only_whole=True)
        self._take_rows(only_whole=False)

    def _take_rows(self, *, only_whole: bool) -> None:
        """Print and keep what can be told of the faults that happened; with `only_whole` until the first that lasts."""
        while self._left and self._left[0].marker_file(self._beside).exists():
            row = self._describe(self._left[0])
            if only_whole and (row.get("training_s") is None or row["ranks"] < self._ranks):
                return
            self._left.pop(0)
            self.rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "loaded_later"}), flush=True)

    def _describe(self, fault: PlannedFault) -> dict[str, Any]:
        lines = (line.split() for line in (self._beside / STEP_LOG).read_text().splitlines())
        ended = [float(words[0]) for words in lines if len(words) == 2 and words[1] != START]
        starts = [json.loads(path.read_text()) for path in self._beside.glob("start-*.json")]
        found = list(read_json_lines(self._fault_log).records) if self._fault_log.exists() else []
        marker = json.loads(fault.marker_file(self._beside).read_text() or '{"time": NaN}')
        return {"step": fault.step, "struck": fault.rank} | _describe_restart(
            fault.kind, float(marker["time"]), found, starts, ended
        )


def _describe_restart(
    kind: str, at: float, faults: list[dict[str, Any]], starts: list[dict[str, Any]], ended: list[float]
) -> dict[str, Any]:
    """Return the phases of the restart after the fault at the moment `at`, in seconds; the slowest rank counts."""
    times = [(datetime.fromisoformat(fault["time"]).timestamp(), fault) for fault in faults]
    when, fault = min((pair for pair in times if pair[0] >= at - 0.1), key=lambda pair: pair[0], default=(at, {}))
    first = min((one["moments"]["process"] for one in starts if one["moments"]["process"] > when - 0.1), default=None)
    row: dict[str, Any] = {"kind": kind, "named": f"{fault.get('rank')}: {fault.get('cause')}"}
    row |= {"collectives": fault.get("collectives"), "detected_s": when - at if fault else None}
    if first is None or not fault:
        return row
    new = [one for one in starts if first - 0.1 <= one["moments"]["process"] < first + 5.0]
    moments = {phase: max(one["moments"].get(phase, first) for one in new) for phase in PHASES}
    phases, before = {}, first
    for phase in PHASES:
        phases[phase], before = round(moments[phase] - before, 3), moments[phase]
    again = min((moment for moment in ended if moment > first), default=None)
    return row | {
        "ranks": len(new),
        "others_ended_s": first - when,
        "training_s": None if again is None else again - at,
        "forked": all(one["forked"] for one in new),
        "modules_later": max(one["modules_later"] for one in new),
        "loaded_later": new[0]["loaded_later"],
        "phases": phases,
        "processor_s": {phase: max(one["processor"].get(phase, 0.0) for one in new) for phase in PHASES[1:]},
    }


def main() -> None:
    """Measure, print a line a restart and the medians, and write all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="result file, without its suffix")
    parser.add_argument("--kinds", default="kill,hang,stop,abort", help="kinds of faults to draw from")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0, help="most for all of it")
    parser.add_argument("--threads", type=int, default=4, help="OMP_NUM_THREADS of each rank")
    parser.add_argument("--small", action="store_true", help="on a CPU")
    parser.add_argument("words", nargs="*", help="changes of the run file")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    logs = arguments.out.with_name(f"{arguments.out.name}-logs")
    logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), logs, small=arguments.small)
        found = measure_restarts(
            bench,
            tuple(arguments.kinds.split(",")),
            arguments.count,
            arguments.seed,
            arguments.threads,
            arguments.seconds,
            arguments.words,
            ranks=arguments.ranks,
        )
    device = "CPU" if arguments.small else torch.cuda.get_device_name()
    result = {"command": " ".join(sys.argv), "torch": torch.__version__, "device": device, **found}
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    whole = [row for row in found["restarts"] if row.get("training_s") is not None]
    if not whole:
        print("\n".join(found["said"]))
        return
    print("wall time in seconds:", ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["wall_s"].items()))
    print(f"goodput {100 * found['wall_s']['training'] / sum(found['wall_s'].values()):.1f} %")
    for name in ("detected_s", "others_ended_s", "training_s"):
        values = [row[name] for row in whole]
        print(f"{name}: median {statistics.median(values):.2f}, longest {max(values):.2f}")
    for phase in PHASES:
        print(f"{phase}: median {statistics.median(row['phases'][phase] for row in whole):.2f}")
    for phase in PHASES[1:]:
        print(f"processor's seconds to {phase}: {statistics.median(row['processor_s'][phase] for row in whole):.2f}")
    print("loaded later:", " ".join(whole[-1]["loaded_later"]))


if __name__ == "__main__":
    main()
