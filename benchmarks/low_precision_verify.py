"""Clean layouts verified in 16 and 8 bits: how near rounding comes to the bounds that `phalanx verify` measures.

    python benchmarks/low_precision_verify.py --out benchmarks/results/verify/low_precision.json
    python benchmarks/low_precision_verify.py --precision fp8-tensor --each 3 --out fp8_tensor.json
    python benchmarks/low_precision_verify.py --precision fp8-row --ranks 8 --models moe-quickstart --seed 1 --out row.json

Every example of `RUN_FILES` stands for its kind of model, as in `phalanx verify`: a small model of the same kind, in
`--each` layouts of 2 ranks and as many of 4, spread evenly over all legal ones. With `--seed` they are drawn, so that few
layouts bring many pairs of choices together. Written are the layouts that failed, quantiles of error over bound by kind of
check, and the checks that came nearest to their bounds. Ranks run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch

from layout_speed import ROOT
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.launch.fork_server import run_ranks
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier, reduced_run

RUN_FILES = (
    "quickstart",
    "gpt-175b",
    "mpt-1b",
    "llama3-8b",
    "moe-quickstart",
    "deepseek-v3",
    "climax-small",
    "materials-quickstart",
)
NO_FLOAT8 = ("materials-quickstart",)
"""Models without a layer that 8-bit recipes multiply."""
STEPS = 2
NEAREST = 12
"""Checks that are written down for each number of ranks and model."""
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Found:
    """What the first rank hands back of a layout: a record of it would not fit in a file."""

    layout: str
    first: str
    """The first check that failed; empty where all passed."""
    ratios: dict[str, list[float]]
    """Error over bound by kind of check."""
    nearest: list[tuple[float, str]]
    """The largest of them, with the check in words."""


def spread_layouts(run: Run, ranks: int, count: int) -> list[ResolvedLayout]:
    """Return `count` of all legal layouts, evenly spread over their list."""
    layouts = list(every_layout(bind(run), ranks))
    count = min(count, len(layouts))
    return [layouts[number * len(layouts) // count] for number in range(count)]


def draw_layouts(run: Run, ranks: int, count: int, seed: int) -> list[ResolvedLayout]:
    """Return `count` of all legal layouts in an order that `seed` shuffles: each next one has the most new pairs of choices.

    A choice is a field and its value where this is not the plain one, such as `tp=2` or `schedule=gpipe`.
    """
    layouts = list(every_layout(bind(run), ranks))
    random.Random(seed).shuffle(layouts)
    pairs = {layout: set(combinations_with_replacement(str(layout).split(), 2)) for layout in layouts}
    drawn: list[ResolvedLayout] = []
    seen: set[tuple[str, str]] = set()
    while pairs and len(drawn) < count:
        drawn.append(max(pairs, key=lambda layout: len(pairs[layout] - seen)))
        seen |= pairs.pop(drawn[-1])
    return drawn


def verify_on_rank(run: Run, layouts: list[ResolvedLayout]) -> list[Found]:
    """Verify on one of the ranks."""
    groups: Groups = {}
    verifier = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=STEPS, activations=True, groups=groups)
    return [summarise_verdict(verifier.verify(layout)) for layout in layouts]


def summarise_verdict(verdict: Verdict) -> Found:
    """Return the ratios of a verdict."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for check in verdict.checks:
        ratios[check.what].append(check.error / check.bound)
    nearest = sorted(verdict.checks, key=lambda check: check.error / check.bound, reverse=True)[:NEAREST]
    first = "" if verdict.first is None else str(verdict.first)
    return Found(verdict.layout, first, dict(ratios), [(c.error / c.bound, str(c)) for c in nearest])


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the quantiles of `QUANTILES` and how many values there are."""
    found = torch.tensor(values, dtype=torch.float64).sort().values
    at = {f"{q:g}": float(found[min(len(values) - 1, int(q * len(values)))]) for q in QUANTILES}
    return {"checks": len(values), **at}


def sweep_model(name: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the layouts of one model on `ranks` ranks came to."""
    model = bind(load_run(ROOT / f"examples/{name}.yaml", []), VerifiableModel)
    run = reduced_run(model, options.precision, STEPS, ranks)
    if options.seed is None:
        layouts = spread_layouts(run, ranks, options.each)
    else:
        layouts = draw_layouts(run, ranks, options.each, options.seed)
    start = time.monotonic()
    found: list[Found] = run_ranks(verify_on_rank, ranks, run, layouts, timeout_s=6 * 3600.0)[0]
    ratios: dict[str, list[float]] = defaultdict(list)
    for one in found:
        for what, values in one.ratios.items():
            ratios[what] += values
    nearest = sorted((ratio, one.layout, words) for one in found for ratio, words in one.nearest)[-NEAREST:]
    return {
        "run_file": name,
        "ranks": ranks,
        "model": model.rebind(run).in_words(),
        "layouts": [one.layout for one in found],
        "failed": [f"{one.layout}: {one.first}" for one in found if one.first],
        "seconds": round(time.monotonic() - start, 1),
        "ratios": dict(ratios),
        "nearest": [f"{ratio:.2f} {layout}: {words}" for ratio, layout, words in reversed(nearest)],
    }


def main() -> None:
    """Sweep all models, and keep what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--precision", default="bf16", choices=["bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-row-experts", "fp8-block"]
    )
    parser.add_argument("--each", type=int, default=14, help="layouts of each model on each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=RUN_FILES, choices=RUN_FILES)
    parser.add_argument(
        "--seed", type=int, help="draw layouts by this seed; spread evenly over all legal ones without it"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = defaultdict(list)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    names = [name for name in options.models if not (options.precision.startswith("fp8") and name in NO_FLOAT8)]
    for ranks in options.ranks:
        for name in names:
            row = sweep_model(name, ranks, options)
            for what, values in row.pop("ratios").items():
                ratios[what] += values
            rows.append(row)
            document = {
                "command": shlex.join(["python", *sys.argv]),
                "commit": commit,
                "date": datetime.now(UTC).date().isoformat(),
                "torch": torch.__version__,
                "precision": options.precision,
                "layouts": sum(len(row["layouts"]) for row in rows),
                "failed": sum(len(row["failed"]) for row in rows),
                "error_over_bound": {what: quantiles(values) for what, values in ratios.items()},
                "models": rows,
            }
            write_atomically(options.out, json.dumps(document, indent=1) + "\n")
            print(name, ranks, len(row["layouts"]), row["failed"], row["nearest"][0], f"{row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
