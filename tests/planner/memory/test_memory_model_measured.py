"""Modelled peaks beside those that runs on H200s logged (benchmarks/results): bars of the planner's accuracy table."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from phalanx.config.load import load_run
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.memory.model import Kernels, rank_memory
from phalanx.planner.memory.probability import GIB
from phalanx.planner.trace.traced_model import TracedModel
from published.in_flight import blocks_in_flight

EXAMPLES = Path(__file__).parents[3] / "examples"


class Measured(NamedTuple):
    """A run, and the most that the allocator of rank 0 gave out (GiB)."""

    example: str
    ranks: int
    words: str
    peak: float
    fused: bool = False
    """Whether SwiGLU kept nothing of its own any more."""


LLAMA, MPT_1B, MPT_7B = "llama3-8b.yaml", "mpt-1b.yaml", "mpt-7b.yaml"
FOUNDRY = "model.positions=learned model.bias=true training.attention=cudnn"
PIPED = "pp=4 dp_shard=1 microbatch=1 global_batch=8 recompute=none"
INTERLEAVED = "pp=2 dp_shard=1 schedule=interleaved_1f1b stages_per_rank=2"
GPT_4096 = (
    "model.preset=null model.n_layers=8 model.d_model=4096 model.n_heads=32 model.n_kv_heads=null model.d_ff=16384 "
    "model.vocab_size=32768 model.max_positions=2048 data.sequence_length=2048 model.mlp=gelu model.norm=layernorm "
    "model.positions=learned model.bias=true"
)
MEASURED = (
    # benchmarks/results/layouts/h200_x4.json
    Measured(LLAMA, 4, "dp_shard=4 microbatch=2 reshard_after_forward=true global_batch=8 recompute=none", 102.794),
    Measured(LLAMA, 4, "tp=2 dp_shard=2 microbatch=2 global_batch=4 recompute=none", 68.252),
    Measured(LLAMA, 4, "tp=2 dp_shard=2 microbatch=4 global_batch=8 recompute=none", 109.132),
    Measured(LLAMA, 1, "microbatch=2 global_batch=2 recompute=none model.n_layers=16", 101.070),
    Measured(
        LLAMA,
        2,
        "dp_shard=2 microbatch=2 reshard_after_forward=true global_batch=4 recompute=none model.n_layers=16",
        69.198,
    ),
    Measured(
        LLAMA,
        4,
        "dp_shard=4 microbatch=2 reshard_after_forward=true global_batch=8 recompute=none model.n_layers=16",
        56.511,
    ),
    # benchmarks/results/layouts/h200_x4_earlier_calls.json
    Measured(LLAMA, 4, "dp_shard=4 microbatch=1 reshard_after_forward=false global_batch=4 recompute=none", 80.053),
    Measured(LLAMA, 4, "tp=2 dp_shard=2 microbatch=2 recompute=selective global_batch=4", 38.750),
    # benchmarks/results/layouts/h200_x4_pp_tp_cp.json and planner/h200_x4_validation.json
    Measured(LLAMA, 4, f"{PIPED} schedule=1f1b", 68.920, fused=True),
    Measured(LLAMA, 4, f"{PIPED} schedule=interleaved_1f1b stages_per_rank=2", 80.585, fused=True),
    Measured(LLAMA, 4, "tp=4 dp_shard=1 microbatch=2 global_batch=2 recompute=none", 49.278, fused=True),
    Measured(LLAMA, 2, f"{GPT_4096} {INTERLEAVED} microbatch=4 global_batch=32 recompute=full", 18.398, fused=True),
    # benchmarks/results/train_speed and memory
    Measured(LLAMA, 1, "microbatch=2 global_batch=2 recompute=none model.n_layers=8 training.attention=cudnn", 60.053),
    Measured(MPT_1B, 1, "microbatch=16 global_batch=64", 73.854),
    Measured(MPT_1B, 1, f"microbatch=16 global_batch=64 {FOUNDRY}", 73.934),
    Measured(MPT_1B, 1, "microbatch=4 global_batch=8", 35.693),
    Measured(MPT_7B, 1, "microbatch=16 global_batch=256 model.n_layers=16", 126.110),
    Measured(MPT_7B, 1, f"microbatch=16 global_batch=256 model.n_layers=16 {FOUNDRY}", 126.264),
)
"""`layout.` left out where a word has no section."""


def test_peaks_are_those_that_runs_logged() -> None:
    errors = [modelled(row) / row.peak - 1 for row in MEASURED]
    sizes = sorted(abs(error) for error in errors)
    report = "\n".join(f"{100 * error:+.2f}% {row}" for error, row in zip(errors, MEASURED, strict=True))
    assert statistics.median(sizes) <= 0.02, report
    assert sizes[-1] <= 0.06, report


def modelled(row: Measured) -> float:
    """GiB on rank 0, whose memory was logged."""
    words = [word if word.split("=")[0].count(".") else f"layout.{word}" for word in row.words.split()]
    run = load_run(EXAMPLES / row.example, words)
    layout = resolve_layout(bind(run), row.ranks)
    kernels = Kernels(bind(run, TracedModel).likely_kernel(rocm=False), compiled=True)
    ranks = rank_memory(bind(run, TracedModel), layout, run.layout.recompute, kernels)
    return (ranks[0].allocated + (0.0 if row.fused else kept_product(run, layout))) / GIB


def kept_product(run: LanguageRun, layout: ResolvedLayout) -> float:
    """The product of SwiGLU's gate and up halves, which blocks kept when these runs were made; the fused SwiGLU does not."""
    if run.model.mlp != "swiglu" or run.layout.recompute != "none":
        return 0.0
    costs = bind(run).block_costs()
    tokens = layout.microbatch * run.data.sequence_length // layout.cp
    return float(blocks_in_flight(layout, run.model.n_layers, costs)[0]) * tokens * run.model.ff_size / layout.tp * 2
