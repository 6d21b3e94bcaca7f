"""The micro-batch that fits a device, as the models say and as is asked of them; and how far predicted times may be off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.memory.probability import GIB
from phalanx.planner.rank.cost_models import SPREAD, estimate_spread, memory_fits
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.traced_model import TracedModel

MODEL = {
    "model.n_layers": 4, "model.d_model": 1024, "model.n_heads": 8, "model.d_ff": 4096, "model.vocab_size": 8192,
    "model.max_positions": 2048, "data.sequence_length": 2048,
}  # fmt: skip


def test_less_memory_gives_a_smaller_micro_batch_that_the_model_says_fits() -> None:
    run = run_with(MODEL, global_batch=64, microbatch="auto")
    chosen = []
    for capacity in (100 * GIB, 24 * GIB, 8 * GIB, 4 * GIB):
        layout = resolve_layout(bind(run), 1, fits=memory_fits(bind(run, TracedModel), capacity, rocm=False))
        chosen.append(layout.microbatch)
        candidate = layout.table
        held = memory(
            bind(run, TracedModel), candidate, Kernels.on_accelerators(bind(run, TracedModel)), peer_copies=True
        ).held[0]
        assert held < capacity
        if layout.microbatch < 64:
            twice = replace(layout, microbatch=2 * layout.microbatch).table
            # What lies beside tensors, and doubt, take the rest.
            larger = memory(
                bind(run, TracedModel), twice, Kernels.on_accelerators(bind(run, TracedModel)), peer_copies=True
            ).held[0]
            assert larger > 0.5 * capacity
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == 64 and chosen[-1] < 8


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recompute_leaves_room_for_more(recompute: str) -> None:
    run = run_with(MODEL, global_batch=64, microbatch="auto", recompute=recompute)
    layout = resolve_layout(bind(run), 1, fits=memory_fits(bind(run, TracedModel), 6 * GIB, rocm=False))
    assert (layout.microbatch > 8) is (recompute == "full")


def _spread(median: float | None, count: int) -> float:
    fitted = {"held_out": count, "held_out_median_error": median}
    return estimate_spread(replace(default_profile("H200"), fitted=fitted))


def test_where_nothing_judges_a_profile_its_times_may_be_off_by_what_is_assumed() -> None:
    assert estimate_spread(default_profile("H200")) == _spread(None, 0) == SPREAD


def test_a_few_runs_hardly_narrow_what_is_assumed_and_many_do() -> None:
    one, some, many = (_spread(0.01, count) for count in (1, 10, 1000))
    assert 0.9 * SPREAD < one < SPREAD
    assert one > some > many
    assert many == pytest.approx(1.4826 * 0.01, rel=0.15)


def test_one_run_that_is_far_off_is_believed() -> None:
    assert _spread(0.25, 1) == pytest.approx(1.4826 * 0.25)
    assert _spread(0.25, 1) > _spread(0.0, 1)
