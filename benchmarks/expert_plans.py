"""Plans of large mixtures of experts on NVIDIA and AMD machines, each written as `phalanx plan` prints it.

    python benchmarks/expert_plans.py [--out benchmarks/results/planner] [--only qwen3-235b-a22b_dgx-h100_1024]

Nothing of the layout is given: degrees of every axis, ZeRO, schedule, micro-batch and recompute are chosen. A plan that
finds no layout is written with its refusal. Above each stand the command, the versions, the date, and what the plan took.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from phalanx.files import write_atomically


@dataclass(frozen=True)
class PlannedCase:
    """A model on a machine."""

    model: str
    """Its preset."""
    cluster: str
    devices: int
    """Accelerators as ranks have them: of an MI250X each of its two halves."""
    words: tuple[str, ...] = ()
    """The run file and what is changed in it."""

    @property
    def name(self) -> str:
        """Name of the file of its plan."""
        return f"{self.model}_{self.cluster}_{self.devices}"

    def command(self) -> list[str]:
        """Return what is run."""
        return ["phalanx", "plan", *self.words, "--cluster", self.cluster, "--devices", str(self.devices)]


QWEN = ("examples/qwen3-30b-a3b.yaml", "model.preset=qwen3-235b-a22b", "global_batch=2048")
"""The larger Qwen3, at 8.4 million tokens a step: two samples for each of 1,024 devices."""
DEEPSEEK = ("examples/deepseek-v3.yaml",)
"""As its report trains it, at 63 million tokens a step."""
CASES = [
    PlannedCase(model, cluster, devices, words)
    for model, words, counts in (("qwen3-235b-a22b", QWEN, (1024,)), ("deepseek-v3", DEEPSEEK, (2048, 12288)))
    for devices in counts
    for cluster in ("dgx-h100", "frontier")
]


def main() -> None:
    """Make the plans, and print how long each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planner"))
    parser.add_argument("--only", choices=[case.name for case in CASES], help="make this one alone")
    options = parser.parse_args()
    for case in CASES:
        if options.only in (None, case.name):
            text = plan_case(case)
            write_atomically(options.out / f"plan_{case.name}.txt", text)
            print(case.name, *text.splitlines()[3:4], flush=True)


def plan_case(case: PlannedCase) -> str:
    """Return what the plan of one case prints, below a heading of how it was made."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # A process of its own: no trace is left from the plan before.
    done = subprocess.run(
        [sys.executable, "-m", *case.command()],
        env=os.environ | {"COLUMNS": "140"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    heading = [
        f"# {' '.join(case.command())}",
        f"# {datetime.now(UTC).date()}, commit {commit.stdout.strip()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} shared cores",
        "# Step times come from published facts and fitted shares of the devices; nothing was run on them.",
        f"# exit {done.returncode}, {wall:.0f} s of wall time, {cpu:.0f} s of CPU time",
    ]
    return "\n".join([*heading, "", done.stdout])


if __name__ == "__main__":
    main()
