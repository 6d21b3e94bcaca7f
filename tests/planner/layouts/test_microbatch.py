"""The micro-batch that fits a device: as plans say, and asked of the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_runs import run_with
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.layouts.microbatch import memory_fits
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.memory.probability import GIB

MODEL = {
    "model.n_layers": 4, "model.d_model": 1024, "model.n_heads": 8, "model.d_ff": 4096, "model.vocab_size": 8192,
    "model.max_positions": 2048, "data.sequence_length": 2048,
}  # fmt: skip


def test_less_memory_gives_a_smaller_micro_batch_that_the_model_says_fits() -> None:
    run = run_with(MODEL, global_batch=64, microbatch="auto")
    chosen = []
    for capacity in (100 * GIB, 24 * GIB, 8 * GIB, 4 * GIB):
        layout = resolve_layout(run, 1, fits=memory_fits(run, capacity, rocm=False))
        chosen.append(layout.microbatch)
        candidate = layout.table
        held = memory(run, candidate, Kernels.on_accelerators(run), peer_copies=True).held[0]
        assert held < capacity
        if layout.microbatch < 64:
            twice = replace(layout, microbatch=2 * layout.microbatch).table
            # What lies beside tensors, and doubt, take the rest.
            larger = memory(run, twice, Kernels.on_accelerators(run), peer_copies=True).held[0]
            assert larger > 0.5 * capacity
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == 64 and chosen[-1] < 8


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recompute_leaves_room_for_more(recompute: str) -> None:
    run = run_with(MODEL, global_batch=64, microbatch="auto", recompute=recompute)
    layout = resolve_layout(run, 1, fits=memory_fits(run, 6 * GIB, rocm=False))
    assert (layout.microbatch > 8) is (recompute == "full")
