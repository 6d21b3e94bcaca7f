"""Layouts of mixtures of experts: which degrees of `ep` are listed, what bounds them, and how uneven loads change plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.planner.memory.probability import BESIDE, fits
from phalanx.planner.plan.compare_layouts import explain_choice
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.planner.rank.ranking import Planner, Task, bound_memory, count_expert_bytes
from phalanx.planner.time.profile import default_profile
from phalanx.planner.time.step_time import StepBreakdown
from phalanx.planner.time.timing import step_times
from phalanx.planner.trace.expert_loads import BALANCED, read_loads
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import TracedModel

EXPERTS = {"model.experts": {"count": 8, "active": 2}}
WIDE = {
    "model.experts": {"count": 16, "active": 8},
    "model.d_model": 4096,
    "model.d_ff": 4096,
    "model.max_positions": 2048,
    "data.sequence_length": 2048,
    "training.compile": False,
}
"""Rows between nodes weigh more than what the host does."""


def table(**fields: Any) -> LayoutTable:
    """Layouts of 16 ranks in two nodes, without recompute."""
    plain = ResolvedLayout(64, **{"dp_shard": 16, **fields})
    return LayoutTable.from_rows([replace(plain, ep=ep) for ep in (1, 4, 8)])


def test_experts_are_spread_over_whole_multiples_of_tensor_parallel_ranks() -> None:
    found = enumerate_layouts(bind(run_with(EXPERTS)), 8, limits=Limits(1, 1, 32, 1))
    spread = {(tp, ep) for tp, ep in zip(found.tp.tolist(), found.ep.tolist(), strict=True)}
    assert spread == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 4), (4, 8)}
    assert np.all(found.expert_ranks % found.ep == 0)
    assert set(enumerate_layouts(bind(run_with()), 8).ep.tolist()) == {1}


def test_a_fixed_degree_is_the_only_one() -> None:
    found = enumerate_layouts(bind(run_with(EXPERTS)), 8, fixed={"ep": 4}, limits=Limits(1, 1, 32, 1))
    assert len(found) and set(found.ep.tolist()) == {4}


def test_an_expert_is_sharded_where_ranks_have_one_each() -> None:
    model = bind(run_with({"model.experts": {"count": 2, "active": 1, "d_ff": 32}}))
    found = enumerate_layouts(model, 8, limits=Limits(1, 1, 32, 1))
    spread = set(zip(found.tp.tolist(), found.ep.tolist(), found.expert_tp.tolist(), strict=True))
    whole = {(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1)}
    assert spread == whole | {(1, 2, 2), (1, 2, 4), (2, 2, 2), (2, 2, 4), (4, 2, 2), (4, 2, 4)}
    assert np.all(found.expert_ranks % found.experts_over == 0)
    fixed = enumerate_layouts(model, 8, fixed={"expert_tp": 2}, limits=Limits(1, 1, 32, 1))
    assert set(zip(fixed.ep.tolist(), fixed.expert_tp.tolist(), strict=True)) == {(2, 2)}
    assert set(enumerate_layouts(bind(run_with()), 8).expert_tp.tolist()) == {1}


def test_plans_share_out_large_experts_alone() -> None:
    """An expert of Mixtral 8x7B takes 1.76 GB of a block, gathered, and one of Qwen3-30B-A3B 0.05 GB, of 64 GiB."""
    machine = load_machine("frontier")
    planner = Planner(machine, CostModels(machine, default_profile(machine.node.device)), limits=Limits(1, 1, 32, 1))
    for width, hidden, count, shared in ((4096, 14336, 8, True), (2048, 768, 128, False)):
        sizes = {"model.experts": {"count": count, "active": 2, "d_ff": hidden}, "model.d_model": width}
        model = bind(run_with(sizes, global_batch=512), TracedModel)
        assert count_expert_bytes(model) == 3 * width * hidden * 10
        devices = 2 * count
        degrees = {"pp": 1, "cp": 1, "tp": 1, "ep": count}
        found = planner.every_legal(Task(model, devices, degrees))
        assert set(found.expert_tp.tolist()) == ({1, 2} if shared else {1})
        asked = planner.every_legal(Task(model, devices, degrees | {"expert_tp": 2}))
        assert set(asked.expert_tp.tolist()) == {2}


def test_plans_try_chunks_of_tokens_in_layouts_that_fit_with_one() -> None:
    run = run_with(WIDE, global_batch=64)
    machine, model = load_machine("frontier"), bind(run, TracedModel)
    planner = Planner(machine, CostModels(machine, default_profile(machine.node.device)), limits=Limits(1, 1, 32, 1))
    alone = {"pp": 1, "cp": 1, "dp_replicate": 1, "recompute": "full", "zero": 3, "gather": "layer"}
    task = Task(model, 16, alone)
    ranking = planner.rank_layouts(task)
    fitting, ranked = ranking.legal.take(ranking.fitting), ranking.ranked.layouts
    chunked = fitting.take(fitting.ep_chunks > 1)
    assert set(chunked.ep_chunks.tolist()) == {2} and np.all(chunked.ep > 1)
    whole = replace(chunked, ep_chunks=np.ones_like(chunked.ep_chunks))
    assert {whole.row(row) for row in range(len(whole))} <= {fitting.row(row) for row in range(len(fitting))}
    # Between nodes rows that travel beside others are waited for less.
    between = [row for row in range(len(ranked)) if ranked.ep[row] == 16 and ranked.tp[row] == 1]
    seconds = {int(ranked.ep_chunks[row]): ranking.ranked.times.total[row] for row in reversed(between)}
    answers = {chunks: explain_choice(planner, ranking, f"ep_chunks={chunks},ep=16,tp=1") for chunks in (1, 2)}
    assert seconds[2] < seconds[1]
    assert 0 <= answers[2].slower_by < answers[1].slower_by
    fixed = planner.find_fitting(replace(task, fixed=alone | {"ep_chunks": 4}))[0]
    assert set(fixed.ep_chunks.tolist()) == {4}


def test_a_layout_takes_as_long_behind_any_other() -> None:
    model, machine = bind(run_with(EXPERTS | {"training.compile": False}), TracedModel), load_machine("dgx-h100")
    profile = default_profile(machine.node.device).profile
    plain, spread = ResolvedLayout(64, dp_shard=16), ResolvedLayout(64, dp_shard=16, ep=8, ep_chunks=2)
    split = ResolvedLayout(64, dp_shard=8, pp=2, stages_per_rank=2, schedule="interleaved_zero_bubble")
    alone = step_times(model, plain.table, machine, profile).total[0]
    for other in (spread, split):
        assert step_times(model, LayoutTable.from_rows([other, plain]), machine, profile).total[1] == alone


@pytest.mark.parametrize("compiled", [True, False])
def test_ranks_that_share_an_expert_get_all_of_its_rows_and_compute_a_part_of_its_features(compiled: bool) -> None:
    model = bind(
        run_with({"model.experts": {"count": 2, "active": 1, "d_ff": 64}, "data.sequence_length": 64}), TracedModel
    )
    model.loads = BALANCED
    plain = ResolvedLayout(64, dp_shard=16, ep=2)
    blocks = []
    for slices in (1, 2, 4):
        setting = model.setting_of(replace(plain, expert_tp=slices), attention="flash", compiled=compiled)
        blocks.append(part_costs("block", setting, 2))
    rows = 2 * 64 * model.config.d_model * 2
    # To the experts and back, and their gradients the other way; counts of rows are a few bytes.
    sent = [sum(x.bytes for x in block.costs.collectives() if x.axis == "ep") for block in blocks]
    assert sent == pytest.approx([4 * rows, 8 * rows, 16 * rows], rel=0.01)
    held = [sum(p.count for p in block.parameters if p.expert) for block in blocks]
    assert held == [3 * 64 * model.config.d_model // slices for slices in (1, 2, 4)]
    products = [sum(op.flops for op in block.costs.operations if op.matmul and op.matmul.groups) for block in blocks]
    # As many rows more as features less.
    assert products[0] == products[1] == products[2] > 0


def test_no_rank_holds_less_than_its_experts_without_zero() -> None:
    model = bind(run_with(EXPERTS), TracedModel)
    layouts = table(zero=0, dp_shard=1, dp_replicate=2, tp=8)
    bounds = bound_memory(model, layouts)
    # Whole experts on every rank of `tp`; then an eighth of them each.
    shared = model.parameter_count() - model.expert_parameters()
    assert bounds[2] == pytest.approx(16 * (shared + model.expert_parameters()) / 8, rel=0.2)
    assert bounds[0] > 3 * bounds[2]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_between_nodes_cost_more_and_uneven_loads_cost_time(recompute: Any) -> None:
    run = run_with(EXPERTS | {"model.d_model": 256, "model.d_ff": 1024, "data.sequence_length": 64})
    machine = load_machine("dgx-h100")
    profile = default_profile(machine.node.device).profile
    seconds = {}
    for name, loads in (("even", BALANCED), ("uneven", read_loads([[0.4, *[0.6 / 7] * 7]]))):
        model = bind(run, TracedModel)
        model.loads = loads  # type: ignore[attr-defined]
        seconds[name] = step_times(model, table(recompute=recompute), machine, profile)
    exchange = seconds["even"].of(StepBreakdown.EP)
    assert exchange[0] == 0 < exchange[1]
    more = seconds["uneven"].of(StepBreakdown.EP)
    assert more[0] == 0 and np.all(more[1:] > exchange[1:])
    assert seconds["uneven"].total[0] == seconds["even"].total[0]


def test_loads_that_vary_make_it_less_sure_that_a_layout_fits() -> None:
    model = bind(run_with(EXPERTS), TracedModel)
    spread = model.load_spread_bytes(table(dp_shard=16, microbatch=4))
    assert spread[0] == 0 and np.all(spread[1:] > 0)
    sure, less = (fits(np.array([60e9]), 3, 80e9, BESIDE["cuda"], 0.0, bytes_) for bytes_ in (0.0, 10e9))
    assert less[0] < sure[0]
