"""The memory model holds what a dry run of the real code holds, and what the closed forms of the literature say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dry_layouts import PLANNED_SIZES
from layout_runs import run_with
from phalanx.families.language.sizes import parameter_count
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.memory.model import Kernels, RankMemory, memory, rank_memory
from phalanx.planner.memory.probability import BESIDE, GIB, communicators, device_bytes, fits
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_full_step

SIZES = PLANNED_SIZES
GPT = {
    "model.positions": "learned",
    "model.norm": "layernorm",
    "model.mlp": "gelu_tanh",
    "model.bias": True,
    "model.tied_head": True,
}
UNCOMPILED = Kernels("cpu", compiled=False)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {"global_batch": 8, "microbatch": 4}),
    "zero 3 that gathers twice": (4, {}, {"dp_shard": 4, "reshard_after_forward": True, "global_batch": 8}),
    "zero 1 with a shared table": (4, GPT, {"dp_shard": 4, "zero": 1, "global_batch": 16}),
    "tensor parallelism in a pipeline": (4, {}, {"tp": 2, "pp": 2, "global_batch": 16, "microbatch": 4}),
    "gpipe, full recompute": (
        4,
        {},
        {"pp": 2, "dp_shard": 2, "schedule": "gpipe", "global_batch": 12, "recompute": "full"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_peak_is_that_of_a_dry_run(name: str) -> None:
    world, changes, layout_fields = LAYOUTS[name]
    run = run_with(SIZES | changes, **layout_fields)
    layout = resolve_layout(bind(run), world)
    modelled = rank_memory(bind(run, TracedModel), layout, run.layout.recompute, UNCOMPILED)
    for stage in {0, layout.pp - 1}:
        rank = stage * world // layout.pp
        found = dry_run(bind(run, TracedModel), layout, rank, build_full_step, accelerator=False, devices_per_node=None)
        assert modelled[stage].allocated == pytest.approx(found.peak, rel=0.02), (modelled[stage], found.categories)


def test_a_split_backward_pass_frees_nothing_on_its_way() -> None:
    """Two blocks a stage; without what waits for the gradients of their weights the model is 5% low."""
    run = run_with(SIZES | {"model.n_layers": 8}, pp=2, schedule="zbv", global_batch=16)
    layout = resolve_layout(bind(run), 2)
    modelled = rank_memory(bind(run, TracedModel), layout, run.layout.recompute, UNCOMPILED)[1]
    found = dry_run(bind(run, TracedModel), layout, 1, build_full_step, accelerator=False, devices_per_node=None)
    assert modelled.moment == "backward of the first block"
    assert 0.97 < modelled.allocated / found.peak < 1.02, (modelled, found.categories)


def peak(run_fields: dict[str, Any], world: int, **layout: Any) -> RankMemory:
    """The worst rank of a small run."""
    run = run_with(SIZES | run_fields, **layout)
    ranks = rank_memory(bind(run, TracedModel), resolve_layout(bind(run), world), run.layout.recompute, UNCOMPILED)
    return max(ranks, key=lambda rank: rank.allocated)


@pytest.mark.parametrize("peer_copies", [False, True])
def test_causes_add_up_to_the_peak_and_arrays_agree_with_single_layouts(peer_copies: bool) -> None:
    """The worst rank is the one that holds most with its own buffers."""
    run = run_with(SIZES, global_batch=16)
    candidates = enumerate_layouts(bind(run), 8, limits=Limits(4, 2, 32))
    which = np.arange(0, len(candidates), 41)
    chosen = candidates.take(which)
    estimates = memory(bind(run, TracedModel), chosen, UNCOMPILED, peer_copies=peer_copies)
    assert peer_copies == bool(estimates.peer_buffers.any())
    for index in range(len(chosen)):
        layout, recompute = chosen.row(index), chosen.row(index).recompute
        ranks = rank_memory(bind(run, TracedModel), layout, recompute, UNCOMPILED, peer_copies=peer_copies)
        worst = max(ranks, key=lambda rank: rank.allocated + rank.peer_buffers)
        assert estimates.allocated[index] == pytest.approx(worst.allocated, rel=1e-9), layout
        assert estimates.peer_buffers[index] == worst.peer_buffers
        assert estimates.moment[index] == worst.moment
        assert sum(worst.causes.values()) == pytest.approx(worst.allocated, rel=1e-9)
        assert all(value >= -1e-6 for value in worst.causes.values()), worst


def state(found: RankMemory) -> float:
    """Bytes that depend on the number of parameters alone, at the peak."""
    return sum(found.causes[name] for name in ("master parameters", "optimizer moments", "gradients", "working copy"))


def test_state_is_the_closed_form_of_each_zero_level() -> None:
    """Rajbhandari et al. 2020 with float32 gradients: 16 / d for ZeRO 3; see docs/guides/planning.md for the others."""
    run = run_with(SIZES, dp_shard=4, global_batch=32)
    count = parameter_count(run.model)
    assert state(peak({}, 4, dp_shard=4, zero=3, global_batch=32)) == pytest.approx(16 * count / 4)
    ours = peak({}, 4, dp_shard=4, zero=2, global_batch=32)
    assert state(ours) + ours.causes["gathered parameters"] == pytest.approx((2 + 16 / 4) * count)
    ours = peak({}, 4, dp_shard=4, zero=1, global_batch=32)
    assert state(ours) + ours.causes["gathered parameters"] == pytest.approx((6 + 12 / 4) * count)
    assert state(peak({}, 1, dp_shard=1, global_batch=8)) == pytest.approx(18 * count)


def test_shards_beyond_the_rows_of_a_parameter_are_padded() -> None:
    wide = peak({}, 256, dp_shard=256, global_batch=256)
    assert wide.causes["padding"] > 0.3 * wide.causes["master parameters"]
    assert peak({}, 4, dp_shard=4, global_batch=4).causes["padding"] == 0
    # With a row a rank, a matrix of 128 rows gathered by 256 ranks takes twice its size.
    block = peak({}, 128, dp_shard=128, reshard_after_forward=True, global_batch=128)
    assert wide.allocated > block.allocated - 16 * parameter_count(run_with(SIZES).model) / 256


def test_more_shards_hold_no_more_and_more_work_no_less() -> None:
    by_shards = [peak({}, d, dp_shard=d, global_batch=16 * d).allocated for d in (2, 4, 8, 16)]
    assert by_shards == sorted(by_shards, reverse=True)
    by_microbatch = [peak({}, 4, dp_shard=4, global_batch=16, microbatch=size).allocated for size in (1, 2, 4)]
    assert by_microbatch == sorted(by_microbatch)
    by_count = [peak({}, 2, pp=2, schedule="gpipe", global_batch=count).allocated for count in (2, 4, 8)]
    assert by_count == sorted(by_count)
    kept = [
        peak({}, 4, dp_shard=4, global_batch=16, microbatch=4, recompute=kind).allocated for kind in ("full", "none")
    ]
    assert kept[0] < kept[1]


def test_peer_copies_take_what_is_sent_out_of_the_allocator() -> None:
    run = run_with(SIZES, dp_shard=4, reshard_after_forward=True, global_batch=8)
    one = resolve_layout(bind(run), 4).table
    collectives = memory(bind(run, TracedModel), one, UNCOMPILED)
    copies = memory(bind(run, TracedModel), one, UNCOMPILED, peer_copies=True)
    assert collectives.peer_buffers[0] == 0 < copies.peer_buffers[0]
    assert copies.allocated[0] < collectives.allocated[0]


def test_a_layout_fits_surely_far_below_the_device_and_never_far_above() -> None:
    allocated = np.asarray([40.0, 75.0, 95.0]) * GIB
    chance = fits(allocated, 2, 80 * GIB, BESIDE["cuda"])
    assert chance[0] > 0.9999 and 0.05 < chance[1] < 0.95 and chance[2] < 1e-4
    needed = device_bytes(allocated, 2, BESIDE["cuda"])
    assert (needed > allocated).all()
    assert fits(allocated[1:2], 5, 80 * GIB, BESIDE["cuda"])[0] < chance[1]


def test_groups_are_counted_once() -> None:
    plain = ResolvedLayout(global_batch=8, dp_shard=4)
    several = replace(plain, tp=2, pp=2, dp_replicate=2)
    groups = communicators(LayoutTable.from_rows([ResolvedLayout(global_batch=8), plain, several]))
    assert groups.tolist() == [0, 1, 5]
