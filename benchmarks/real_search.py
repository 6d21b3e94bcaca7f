"""A real search beside a sweep of all it may choose: how far is what it chose from the best of the sensible layouts?

    python benchmarks/real_search.py llama3-8b --devices 4 --profile h200-x4.profile.yaml --data data/text --work W --out O

First `phalanx search` by the planner's engine, until it stops by itself or has made --measure trials; then the exhaustive
engine over the same study, which measures what is left. The study lies in --work, and what it holds is not measured again:
the work may be spread over several calls (--minutes), on one kind of machine. "Sensible" is what the run files below allow:
choices that somebody who knows the model would try, those that the planner thinks will not fit among them. --list measures
nothing and says what they are. --tiny runs the same choices of a tiny model on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from layout_speed import run_environment
from phalanx.config.load import parse_run
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.hardware.machine import load_machine
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import load_profile
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.study.layouts.layout_search import STUDY
from phalanx.study.layouts.prior import planned_space
from phalanx.study.store import StudyStore
from phalanx.study.trial import INTERRUPTED, Trial, best_trial

Facts = dict[str, Any]

_LONG = """
model: {preset: llama3-8b, n_layers: 28, d_model: 3072, n_heads: 24, n_kv_heads: 8, d_ff: 8192, max_positions: LENGTH}
data: {sources: [DATA], sequence_length: LENGTH, document_mask: false}
layout: {global_batch: BATCH}
optimizer: {lr: 3.0e-4, warmup_steps: 200}
training: {steps: 1000}
search:
  layout: {gather: [layer], dp_replicate: [1], pp: [1], microbatch: [1], recompute: [none, selective], zero: [3]}
  constraints:
    - (tp > 1) + (cp > 1) + (dp_shard > 1) < 3
    - tp < 4
    - reshard_after_forward == (dp_shard == 1 and tp == 1)
MORE    - context == 'all_to_all' or recompute == 'none' or cp == 1
  least_p_fits: 0.0
  steps: 4
  skip: 2
  time_limit_s: 180
"""


def _long(*, length: int, batch: int, more: str = "") -> str:
    """A 3B model whose samples have `length` tokens. more: lines of further constraints."""
    return _LONG.replace("LENGTH", str(length)).replace("BATCH", str(batch)).replace("MORE", more)


RUNS = {
    "llama3-8b": """
model: {preset: llama3-8b}
data: {sources: [DATA], sequence_length: 8192, document_mask: false}
layout: {global_batch: 8}
optimizer: {lr: 3.0e-4, warmup_steps: 200}
training: {steps: 1000}
search:
  layout: {recompute: [none, selective], gather: [layer], dp_replicate: [1]}
  constraints:
    - zero > 1 or dp_shard == 1
    - (tp > 1) + (pp > 1) + (cp > 1) < 2
    - tp == 1 or (microbatch in [tp, 2 * tp] and zero == 3)
    - cp == 1 or (context == 'all_to_all' and microbatch == 2 * cp and reshard_after_forward)
    - pp == 1 or (schedule == 'interleaved_1f1b' and stages_per_rank in [2, 4] and microbatch == 1 and dp_shard == 1)
    - recompute == 'none' or (tp * cp * pp == 1 and microbatch > 1 and zero == 3)
  steps: 4
  skip: 2
  time_limit_s: 120
""",
    "llama3-3b-long": _long(length=65536, batch=4, more="    - tp == 1 or cp > 1 or recompute == 'selective'\n"),
    "llama3-3b-long-two-devices": _long(length=49152, batch=2),
}
"""Run files, with the choices that are sensible."""
TINY = [
    *("model.preset=null", "model.n_layers=16", "model.d_model=64", "model.n_heads=4", "model.n_kv_heads=4"),
    *("model.d_ff=128", "model.vocab_size=512", "model.max_positions=64", "model.mlp=swiglu", "model.norm=rmsnorm"),
    *("model.positions=rope", "model.bias=false", "data.sequence_length=64", "training.compile=false"),
    "cluster.device=cpu",
]


def choices(file: Path, options: argparse.Namespace) -> list[Facts]:
    """What may be chosen, what the planner thinks is fastest first."""
    words = TINY if options.tiny else []
    run = parse_run(file.read_text(), str(file), words)
    assert isinstance(run, LanguageRun)
    machine = load_machine(options.cluster)
    planner = Planner(machine, CostModels(machine, load_profile(options.profile)), least_p=run.search.least_p_fits)
    space, prior = planned_space(planner, Task(bind(run, TracedModel), options.devices), run.search)
    rows = [
        {
            "key": space.key(point),
            "words": space.describe(point),
            "planned_s": float(prior.seconds[point]),
            "gib": float(prior.peak[point]) / 2**30,
        }
        for point in range(len(space))
    ]
    return sorted(rows, key=lambda row: float(row["planned_s"]))


def search(file: Path, engine: str, measure: int, options: argparse.Namespace, until: float) -> None:
    """Go on with the study, at most until then."""
    command = [sys.executable, "-m", "phalanx", "search", str(file), *(TINY if options.tiny else [])]
    command += ["--cluster", options.cluster, "--devices", str(options.devices), "--profile", options.profile]
    command += ["--storage", str(study_file(options)), "--json", "--engine", engine, "--measure", str(measure)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=run_environment())
    try:
        process.wait(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
    else:
        if process.returncode:
            raise SystemExit(f"failed with {process.returncode}: {' '.join(command)}")


def study_file(options: argparse.Namespace) -> Path:
    """Where the study lies."""
    return Path(options.work / f"{options.run}.search.log")


def trials_so_far(options: argparse.Namespace) -> list[Trial]:
    """What the study holds."""
    return StudyStore(study_file(options), STUDY, None).trials()


def summary(trials: list[Trial], points: int) -> Facts:
    """How the search's choice does beside everything that was measured."""
    chosen, best = best_trial([trial for trial in trials if trial.sampler == "planner"]), best_trial(trials)
    failed = [trial.outcome.cause if trial.outcome else "running" for trial in trials if not trial.good]
    found: Facts = {
        "choices": points,
        "trials": len(trials),
        "of_the_search": sum(trial.sampler == "planner" for trial in trials),
        "failed": {cause: failed.count(cause) for cause in sorted(set(failed))},
    }
    if chosen is None or best is None:
        return found
    return found | {
        "chosen": chosen.key,
        "chosen_s": chosen.value,
        "best": best.key,
        "best_s": best.value,
        "regret": chosen.value / best.value - 1,
        "all_measured": len(trials) - failed.count(INTERRUPTED) >= points,
    }


def main() -> None:
    """Search, sweep, compare, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=list(RUNS))
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--profile", required=True, help="measured profile, from phalanx calibrate")
    parser.add_argument("--cluster", default="h200-x4", help="description of this machine")
    parser.add_argument("--data", default="data/text", help="prepared data, see `phalanx data prepare`")
    parser.add_argument("--work", type=Path, required=True, help="folder of the study")
    parser.add_argument("--measure", type=int, default=8, help="most trials of the search")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--list", action="store_true", help="print what may be chosen")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / f"{options.run}.yaml"
    file.write_text(RUNS[options.run].strip().replace("DATA", str(Path(options.data).resolve())) + "\n")
    planned = choices(file, options)
    for row in planned if options.list else []:
        print(f"{row['planned_s']:8.3f} s  {row['gib']:6.1f} GiB  {row['words']}")
    print(f"{len(planned)} choices", flush=True)
    if options.list:
        return
    # What the sweep has found is not for the search to know.
    if all(trial.sampler == "planner" for trial in trials_so_far(options)):
        search(file, "planner", options.measure, options, until)
        print(json.dumps(summary(trials_so_far(options), len(planned)), indent=1), flush=True)
    if time.monotonic() < until:
        search(file, "exhaustive", len(planned), options, until)
    trials = trials_so_far(options)
    document = {
        "run": RUNS[options.run].strip(),
        "command": {name: str(value) for name, value in vars(options).items() if name not in ("work", "out", "data")},
        "date": datetime.now(UTC).isoformat(),
        "torch": torch.__version__,
        "planned": planned,
        "summary": summary(trials, len(planned)),
        "trials": [asdict(trial) for trial in trials],
    }
    print(json.dumps(document["summary"], indent=1))
    if options.out is not None:
        write_atomically(options.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
