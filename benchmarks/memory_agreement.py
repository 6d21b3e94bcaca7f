"""The memory that plans give a rank beside that of a dry run of the real code, over layouts drawn at random.

    python benchmarks/memory_agreement.py --out agreement.json [--each 12] [--seed 0]

Of all legal layouts of a small language model on eight ranks as many are drawn of each kind: backward passes that are split
over shards or not, streamed blocks in a pipeline, interleaved pipelines that free parameters after each forward pass and go
several rounds, and everything else. Each is planned; the real step of the pipeline rank
that needs most by the plan, and of the first one, then runs under fake tensors as on accelerators. The model is so small
that what the allocator rounds up counts, 512 bytes a tensor, which plans leave out.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.files import write_atomically
from phalanx.layout.spec import LayoutTable
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.memory.model import Kernels, rank_memory
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_full_step

WORLD = 8
RUN: dict[str, Any] = {
    "model": {
        "n_layers": 8, "d_model": 128, "n_heads": 8, "n_kv_heads": 4, "d_ff": 352, "vocab_size": 1000, "max_positions": 128,
    },
    "data": {"sources": ["nowhere"], "sequence_length": 128},
    "layout": {"global_batch": 32, "precision": "bf16"},
    "optimizer": {"lr": 0.01},
    "training": {"steps": 1, "loss_chunk_tokens": 64},
}  # fmt: skip
FIELDS = (
    "tp", "pp", "cp", "dp_shard", "dp_replicate", "zero", "schedule", "microbatch", "context", "gather",
    "reshard_after_forward", "global_batch", "stages_per_rank",
)  # fmt: skip


def main() -> None:
    """Compare, print as it goes, and write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=12, help="layouts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    legal = enumerate_layouts(bind(LanguageRun.model_validate(RUN)), WORLD, limits=Limits(4, 4, 32))
    random = np.random.default_rng(options.seed)
    rows: list[dict[str, Any]] = []
    for kind, mask in kinds(legal).items():
        some = legal.take(np.flatnonzero(mask))
        for place in random.permutation(len(some))[: options.each].tolist():
            rows.append({"kind": kind, **compared(some, place)})
            print(f"{rows[-1]['error']:+7.2%} {kind:24} {rows[-1]['layout']}", flush=True)
    about = {"date": datetime.now(UTC).isoformat(), "torch": torch.__version__, "python": platform.python_version()}
    content = {**about, "seed": options.seed, "legal": len(legal), "summary": summary(rows), "rows": rows}
    write_atomically(options.out, json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["summary"], indent=1))


def kinds(legal: LayoutTable) -> dict[str, Any]:
    """Which layouts are of which kind."""
    split = legal.splits_backward > 0
    streamed = (legal.streamed > 1) & (legal.pp > 1)
    interleaved = (legal.stages_per_rank > 1) & (legal.accumulation >= 2 * legal.pp) & ~split & ~streamed
    freed = interleaved & legal.reshard_after_forward
    return {
        "split backward passes": split,
        "streamed in a pipeline": streamed,
        "freed between rounds": freed,
        "other": ~split & ~streamed & ~freed,
    }


def compared(some: LayoutTable, place: int) -> dict[str, Any]:
    """One layout: bytes planned and of the dry run for the rank with most by the plan and the first one."""
    layout = some.row(place)
    fields: dict[str, Any] = {name: getattr(layout, name) for name in FIELDS}
    if layout.pp > 1:
        fields["stages_per_rank"] = layout.stages_per_rank
    words = {**RUN["layout"], **fields, "recompute": layout.recompute}
    run = LanguageRun.model_validate({**RUN, "layout": words})
    planned = rank_memory(bind(run, TracedModel), layout, layout.recompute, Kernels("flash", compiled=False))
    worst = max(planned, key=lambda rank: rank.allocated)
    ranks = []
    for rank in sorted({0, worst.rank}):
        found = dry_run(
            bind(run, TracedModel),
            layout,
            rank * WORLD // layout.pp,
            build_full_step,
            accelerator=True,
            devices_per_node=None,
        )
        ranks.append({"pipeline_rank": rank, "planned": planned[rank].allocated, "dry_run": found.peak})
    error = worst.allocated / max(rank["dry_run"] for rank in ranks) - 1
    return {"layout": {**fields, "recompute": layout.recompute}, "error": error, "ranks": ranks}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each kind: layouts, the median of the absolute error of the worst rank, and the largest."""
    found = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        errors = np.abs([row["error"] for row in rows if row["kind"] == kind])
        found[kind] = {"layouts": len(errors), "median": float(np.median(errors)), "worst": float(errors.max())}
    return found


if __name__ == "__main__":
    main()
