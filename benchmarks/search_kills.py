"""A real search, killed at random moments and started again until it ends: is anything lost, does anything stay behind?

    phalanx data prepare python-stdlib --out data/python-stdlib --vocab-size 2048
    python benchmarks/search_kills.py data/python-stdlib --kills 15 --out benchmarks/results/search/kills-cpu.json

Eighteen layouts and knobs of a small language model are measured on two gloo ranks each. The search is sent SIGKILL after a
random time, whatever it and its trials do at that moment. After each kill: how long until no process of a trial runs, and
whether every trial that had ended is in the study as it was. A trial that was caught running may be repeated; one that had
ended must not be. The search goes on until it has measured all, or has given a choice up after three interruptions.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.study.layouts.layout_search import STUDY
from phalanx.study.store import StudyStore

RUN = """\
model: {{n_layers: 2, d_model: 64, n_heads: 4, d_ff: 256, vocab_size: 2048, max_positions: 128}}
data: {{sources: [{data}], sequence_length: 128}}
layout: {{global_batch: 8, tp: 2, dp_shard: 1, precision: fp32}}
optimizer: {{lr: 1e-3}}
training: {{steps: 10, tensorboard: false}}
search:
  layout: {{tp: [2], microbatch: [1, 2, 4], recompute: [none], cp: [1]}}
  knobs: {{data.prefetch: {{values: [0, 1, 2, 3, 4, 5]}}}}
  steps: 6
  skip: 2
  stop_gain: 0.0
  time_limit_s: 120
"""
WORDS = ["--cluster", "h200-x4", "--devices", "2", "--engine", "exhaustive", "--measure", "18", "--json"]
_GONE_S = 30.0
"""Seconds in which processes of trials must have ended."""


def start(file: Path, storage: Path) -> subprocess.Popen[str]:
    """The search, from where it is."""
    command = [sys.executable, "-m", "phalanx", "search", str(file), *WORDS, "--storage", str(storage)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended_trials(storage: Path) -> dict[int, dict[str, Any]]:
    """What came of the trials that have ended and were not interrupted, by number."""
    if not storage.exists():
        return {}
    trials = StudyStore(storage, STUDY, None).trials()
    return {one.number: one.outcome.as_dict() for one in trials if one.outcome and (one.good or one.failed)}


def running(folder: Path) -> list[str]:
    """Processes whose command names the folder of the trials."""
    found = subprocess.run(["pgrep", "--full", str(folder)], stdout=subprocess.PIPE, text=True, check=False)
    return found.stdout.split()


def kill_once(file: Path, storage: Path, after: float) -> dict[str, Any] | None:
    """Start the search, kill it and look; None where it ended before."""
    before, folder = ended_trials(storage), storage.with_name(f"{storage.name}.trials")
    process = start(file, storage)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        caught = running(folder)
        process.kill()
        process.communicate()
    else:
        if process.returncode:
            raise SystemExit(f"the search failed: {process.communicate()[1]}") from None
        return None
    killed = time.monotonic()
    while running(folder):
        if time.monotonic() - killed > _GONE_S:
            raise SystemExit(f"left behind after {_GONE_S:g} s: {running(folder)}")
        time.sleep(0.02)
    gone = time.monotonic() - killed
    after_all = ended_trials(storage)
    lost = [number for number, outcome in before.items() if after_all.get(number) != outcome]
    return {
        "killed_after_s": round(after, 2),
        "processes_of_trials": len(caught),
        "gone_after_s": round(gone, 2),
        "ended_trials_before": len(before),
        "ended_trials_after": len(after_all),
        "lost_or_changed": lost,
    }


def main() -> None:
    """Kill, look, and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, help="prepared tokens, 2,048 of them in the vocabulary")
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--longest", type=float, default=30.0, help="seconds a search may go on before it is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        file, storage = Path(name, "run.yaml"), Path(name, "study.log")
        file.write_text(RUN.format(data=options.data.resolve()))
        kills = []
        for _ in range(options.kills):
            found = kill_once(file, storage, moments.uniform(1.0, options.longest))
            if found is None:
                break
            kills.append(found)
            print(json.dumps(found), flush=True)
        last = start(file, storage)
        out, errors = last.communicate()
        if last.returncode:
            raise SystemExit(errors)
        facts = json.loads(out)
    rows = [(row["state"], row["values"]) for row in facts["trials"]]
    measured = [json.dumps(values, sort_keys=True) for state, values in rows if state != "interrupted"]
    result = {
        "command": f"search_kills.py DATA --kills {options.kills} --longest {options.longest:g} --seed {options.seed}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kills": kills,
        "states": {state: sum(state == one for one, _ in rows) for state in sorted({one for one, _ in rows})},
        "choices_measured": len(set(measured)),
        "measured_twice": len(measured) - len(set(measured)),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "kills"}))


if __name__ == "__main__":
    main()
