"""FSDP, tensor parallelism and Hybrid-STOP of one forecaster on one machine's devices, beside the planner's predictions.

    python benchmarks/weather_layouts.py --profile h200-x4.profile.yaml --out weather_layouts.json --predict-only
    python benchmarks/weather_layouts.py --out weather_layouts.json --seconds 560
    python benchmarks/weather_layouts.py --tiny --out tiny.json         # a tiny model on CPU ranks: does it all run?

ORBIT-1B (128 x 256 points, 48 variables) on random fields, for FSDP 4, TP 4 and Hybrid-STOP 2 x 2 (of eight devices 2 x 4,
or 4 x 2 by --tp 4) with gather=layer and gather=stream: with one sample a device in a micro-batch (2,048 tokens, below the
break-even of FSDP and Hybrid-STOP) and with eight (16,384, above it), several micro-batches a step. ORBIT-10B in FSDP and
Hybrid-STOP with one sample of 2,048 tokens or, in patches of 8, of 512. Each case gives samples and tokens per second, the
peak memory of the worst rank with the buffers that peers read, and how much of the communication nothing ran beside (rank 0,
one profiled step). Times lie between events on the device: nothing waits for the host between steps.

The promised peak of gather=stream is 2 P / (T F): two of the K = F chunks of a chain, the one that is computed with and
the one on its way. P are the parameters of the largest chain of a block on all ranks (MLP: 8 d^2 and a bias), in the format
of the arithmetic; chains run one after another, so a block's attention adds nothing. What is measured is memory of the
device: how much the allocator's peak grows while that chain runs forward on one token a rank, beside which weights are all
there is, and the buffers that peers read, which lie outside the allocator. On CPU ranks the same quantity is counted by a
dispatch mode, so that --tiny, with and without `--set layout.peer_copies=true`, checks it.

Then the largest width that fits in each layout: `recompute=full`, one sample a device, blocks uncompiled, parameters zero
(none of which moves the limit by a step of the grid); widths are whole heads on all ranks. First the width for which the
planner sees an even chance is tried, with two real steps, then the next ones until one fits and the next does not.

Every prediction is written to --out before anything runs. What --out holds is not run again, and it is rewritten after
each case, so that the work may be spread over several calls (--seconds). One process group runs case after case; where one
fails, new ranks go on with the next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from layout_speed import ROOT, run_environment
from phalanx.files import write_atomically
from phalanx.hardware.calibrate.measure_machine import plain_machine
from phalanx.hardware.machine import load_machine
from phalanx.planner.time.profile import load_profile, profile_for
from weather_layout_cases import RUN_FILE, Row, Words, break_evens, plan_rows, width_grid, width_words

START_SECONDS = 35.0
"""With less time left no ranks are started: they need as long to begin with."""


@dataclass(frozen=True)
class Task:
    """One case that ranks run, and where its result belongs."""

    row: Row
    words: Words
    steps: int
    skip: int
    width: int | None = None

    def order(self) -> Row:
        """What the ranks are told."""
        real = self.width is None
        name = self.row["case"] + ("" if real else f" {self.width}")
        return {
            "name": name,
            "words": self.words,
            "steps": self.steps,
            "skip": self.skip,
            "fill": real,
            "profile": real,
        }

    def take(self, found: Row) -> None:
        """Keep what the ranks found, and print it."""
        if self.width is None:
            self.row["measured"] = found
            print_row(self.row)
        elif "failed" in found and not found["out_of_memory"]:
            self.row["error"] = found["error"]
            print(f"{self.row['case']:38} {self.width} failed: {' | '.join(found['error'])[-300:]}", flush=True)
        else:
            self.row["tries"][str(self.width)] = "failed" not in found
            self.row.setdefault("memory_gib", {})[str(self.width)] = found.get("memory_gib")
            words = "does not fit" if "failed" in found else f"fits: {found['memory_gib'] or 0:.2f} GiB"
            print(f"{self.row['case']:38} {self.width} {words}, {found['wall_seconds']:.0f} s", flush=True)


def next_tasks(rows: list[Row], options: argparse.Namespace) -> list[Task]:
    """What one group of ranks runs next; it ends at the first case that fails."""

    def speeds(last: bool) -> list[Task]:
        return [
            Task(row, row["words"], options.steps, options.skip)
            for row in rows
            if "words" in row and row["last"] is last and "measured" not in row and options.only in row["case"]
        ]

    widths = [row for row in rows if "tries" in row and "error" not in row and options.only in row["case"]]
    # In ranks of their own: what the library keeps for communicating in all the groups before is room that they lack.
    first = [_try(row, row["predicted_width"], options) for row in widths if not row["tries"]]
    if sooner := speeds(last=False) or first:
        return sooner
    for row in widths:
        following = next_width(row, width_grid(options))
        if following is not None:
            # By itself: it ends the ranks if all goes as predicted, and nothing earlier may stand in its way.
            return [_try(row, following, options)]
    return speeds(last=True)


def _try(row: Row, width: int, options: argparse.Namespace) -> Task:
    return Task(row, width_words(row["layout"], width, options), steps=2, skip=1, width=width)


def next_width(row: Row, grid: int) -> int | None:
    """The width to try next; None once one fits and the next one does not, which is then said in `row`."""
    fit = max((int(width) for width, found in row["tries"].items() if found), default=0)
    full = min((int(width) for width, found in row["tries"].items() if not found), default=None)
    if full is None:
        return fit + grid
    if full - fit <= grid:
        row["largest_width"] = fit
        return None
    return full - grid if not fit else (fit + full) // 2 // grid * grid


def measure_rows(rows: list[Row], options: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Run what has no result yet, group of ranks after group, while there is time."""
    end = time.time() + options.seconds
    while (tasks := next_tasks(rows, options)) and time.time() + START_SECONDS < end:
        run_tasks(tasks, options, keep, end)
    for row in rows:
        if row.get("tries"):
            next_width(row, width_grid(options))
    keep()


def run_tasks(tasks: list[Task], options: argparse.Namespace, keep: Callable[[], None], end: float) -> None:
    """Run cases in one process group until one fails, memory is left over, or the time is up."""
    with tempfile.TemporaryDirectory() as scratch, options.out.with_suffix(".log").open("a") as log:
        folder = Path(scratch)
        (folder / "cases.json").write_text(json.dumps([task.order() for task in tasks]))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.devices)),
            *(str(Path(__file__).with_name("weather_steps.py")), str(RUN_FILE), str(folder), "--end", str(end)),
            *("--case-seconds", str(options.case_seconds), "--room-gib", str(options.room_gib)),
            *("--device", "cpu" if options.tiny else "auto"),
        ]
        environment = run_environment()
        if options.tiny:
            environment["OMP_NUM_THREADS"] = "1"
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        began, done = time.time(), 0
        ranks = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        try:
            code = None
            while code is None:
                code = ranks.poll()
                while done < len(tasks) and (folder / f"{done}.json").exists():
                    tasks[done].take(json.loads((folder / f"{done}.json").read_text()))
                    keep()
                    done, began = done + 1, time.time()
                # Ranks end themselves in time; the launcher may not notice.
                if code is None and time.time() > end + 10:
                    ranks.kill()
                time.sleep(0.2)
        finally:
            ranks.kill()
        if code and done < len(tasks) and time.time() < end - 1:
            tasks[done].take(_failure(folder, code) | {"wall_seconds": time.time() - began})
            keep()


def _failure(folder: Path, code: int) -> Row:
    """Why a group of ranks has ended: what the first of them said, memory before all else."""
    said = [json.loads(file.read_text()) for file in sorted(folder.glob("failed-*.json"))]
    said.sort(key=lambda one: not one["out_of_memory"])
    return {
        "failed": code,
        **(said[0] if said else {"out_of_memory": False, "error": ["no rank said why; see the log"]}),
    }


def print_row(row: Row) -> None:
    """One line of the table."""
    measured, predicted = row["measured"], row["predicted"]
    if "failed" in measured:
        print(f"{row['case']:38} failed ({measured['failed']}): {' | '.join(measured['error'])[-300:]}", flush=True)
        return
    error = 100 * (predicted["step_seconds"] / measured["step_seconds"] - 1)
    words = [
        f"{measured['tokens_per_second']:9,.0f} tokens/s",
        f"{measured['step_seconds']:7.4f} s (planned {predicted['step_seconds']:.4f}, {error:+.1f}%)",
    ]
    if measured["memory_gib"] is not None:
        words.append(f"{measured['memory_gib']:6.2f} GiB (planned {predicted['memory_gib']:.2f})")
    if measured["communication"] is not None:
        words.append(f"exposed {measured['communication']['exposed_ms']:.1f} ms")
    if (gathered := measured["gathered_weights"]) is not None:
        share = gathered["measured_most"] / predicted["gathered_weights"]["promised"]
        words.append(f"gathered {gathered['measured_most'] / 1e6:.2f} MB, {share:.3f} of 2P/(TF)")
    print(f"{row['case']:38} {'  '.join(words)}  [{measured['wall_seconds']:.0f} s]", flush=True)


def main() -> None:
    """Predict, write, run, compare."""
    options = _options()
    before = json.loads(options.out.read_text()) if options.out.exists() else {"cases": []}
    rows: list[Row] = before.pop("cases")

    def keep() -> None:
        document = {**before, "date": datetime.now(UTC).isoformat(), "cases": rows}
        write_atomically(options.out, json.dumps(document, indent=1) + "\n")

    if options.again:
        for row in rows:
            row.pop("error", None)
            if "failed" in row.get("measured", {}):
                del row["measured"]
    if "break_even" not in before:
        machine = plain_machine("CPU", options.devices) if options.tiny else load_machine(options.cluster)
        named = load_profile(options.profile) if options.profile else profile_for(load_machine(options.cluster))
        before |= {"profile": named.name, "break_even": break_evens(options, machine)}
        plan_rows(rows, options, machine, named)
        keep()
    print(f"{len(rows)} cases predicted, in {options.out}", flush=True)
    if not options.predict_only:
        measure_rows(rows, options, keep)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", help="measured profile, from phalanx calibrate; else the shipped one")
    parser.add_argument("--cluster", default="h200-x4", help="description of this machine")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2, help="of the hybrid layouts")
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--case-seconds", type=float, default=100.0, help="no case takes longer")
    parser.add_argument("--seconds", type=float, default=3600.0, help="by then all ends, with what there is")
    parser.add_argument("--room-gib", type=float, default=132.0, help="memory that CPU ranks are said to have")
    parser.add_argument("--no-width", action="store_true", help="leave out the search for the largest width")
    parser.add_argument("--only", default="", help="run the cases with this in their names")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--again", action="store_true", help="run cases that failed once more")
    parser.add_argument("--set", action="append", default=[], help="overrides after those of the case")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU ranks")
    options = parser.parse_args()
    if options.tiny:
        options.room_gib = min(options.room_gib, 0.016)
    return options


if __name__ == "__main__":
    main()
