"""Planted mistakes under `phalanx verify` in a low precision: which are found, and in which module.

    python benchmarks/low_precision_mutations.py --precision fp8-tensor --out mutations.json

The mistakes are those of the tests: 14 kinds that were reported of Megatron-LM (TTrace, arXiv:2506.09280) and eleven of our
own, which the tests find in bf16 and fp64. Small decoders on two and four CPU ranks, products in 8 bits emulated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from layout_speed import ROOT

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/verification"))

from test_mutations import MISTAKES as OWN
from test_reported_mutations import FOUR, TWO

from phalanx.files import write_atomically
from phalanx.nn.float8_linear import Float8Product, Operand
from planted_mistakes import Mistake, Verdicts, verify_mistakes


def quantise_inputs_too_coarsely() -> Any:
    """The inputs of products lose a digit on the way, on all ranks but one."""
    right = Float8Product.quantise_input

    def wrong(self: Float8Product, x_NI: Tensor, *, columns: bool) -> tuple[Operand, Operand]:
        narrow = x_NI.to(torch.float8_e5m2).to(x_NI.dtype) if self.input_group else x_NI
        return right(self, narrow, columns=columns)

    return patch.object(Float8Product, "quantise_input", wrong)


def mistakes_in(precision: str) -> dict[int, dict[str, Mistake]]:
    """Return the mistakes by the number of ranks they take, in `precision`."""
    two = {name: one for name, one in {**TWO, **OWN}.items() if one.precision == "bf16"}
    if precision.startswith("fp8"):
        # The product of the row matrix is one with that of the matrix before it, and its input is in 8 bits anyway.
        two["cast too narrow"] = replace(two["cast too narrow"], plant=quantise_inputs_too_coarsely)
    return {
        ranks: {name.removesuffix(", bf16"): replace(one, precision=precision) for name, one in some.items()}
        for ranks, some in ((2, two), (4, FOUR))
    }


def summarise(name: str, mistake: Mistake, verdicts: Verdicts) -> dict[str, Any]:
    """Return what was found of a mistake."""
    right, wrong = verdicts
    first = wrong.first
    ratios = [check.error / check.bound for check in wrong.checks]
    return {
        "mistake": name,
        "kind": "own" if f"{name}, bf16" in OWN else "reported",
        "layout": mistake.layout,
        "model": mistake.model,
        "right code passes": right.passed,
        "found": not wrong.passed,
        "expected in": mistake.where or "head",
        "named": None if first is None else first.name or wrong.module,
        "first check": None if first is None else str(first),
        # Of a mistake that was not found, how near it came; what a layout does not record at all is infinitely far off.
        "largest error over bound": max((ratio for ratio in ratios if math.isfinite(ratio)), default=None),
    }


def main() -> None:
    """Plant every mistake and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-tensor", choices=["bf16", "fp8-tensor", "fp8-row"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for ranks, mistakes in mistakes_in(options.precision).items():
        # A few at a time: a call has a limit of time.
        names = list(mistakes)
        for start in range(0, len(names), 4):
            some = {name: mistakes[name] for name in names[start : start + 4]}
            for name, verdicts in verify_mistakes(some, ranks).items():
                row = summarise(name, some[name], verdicts)
                rows.append(row)
                named = str(row["named"]).startswith(row["expected in"])
                print(f"{name:32s} found {row['found']}, in its module {named}: {row['first check']}", flush=True)
    document = {
        "command": f"python benchmarks/low_precision_mutations.py --precision {options.precision}",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "precision": options.precision,
        "mistakes": len(rows),
        "right code passes": sum(row["right code passes"] for row in rows),
        "found": sum(row["found"] for row in rows),
        "named where expected": sum(str(row["named"]).startswith(row["expected in"]) for row in rows),
        "rows": rows,
    }
    write_atomically(options.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
