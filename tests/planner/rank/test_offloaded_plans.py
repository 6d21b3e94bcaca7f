"""Plans of optimizer state in host memory: time and memory, what a node's host holds, and when it is planned at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_runs import refusal, run_with
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine, load_machine
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.plan.make_plan import NothingFits, Wishes, make_plan
from phalanx.planner.plan.remedies import find_remedies
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.planner.rank.ranking import Planner, Task, bound_memory
from phalanx.planner.time.host_copies import LINK_SHARE
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.traced_model import TracedModel

LARGE = {
    "model.n_layers": 8, "model.d_model": 2048, "model.n_heads": 16, "model.d_ff": 8192, "model.vocab_size": 32768,
    "model.max_positions": 1024, "data.sequence_length": 1024,
}  # fmt: skip
LAYOUT = ResolvedLayout(global_batch=8, dp_shard=8)
OFFLOADED = replace(LAYOUT, offload_optimizer=True)


def models_of(machine: Machine) -> CostModels:
    return CostModels(machine, default_profile(machine.node.device))


def with_host(gb: float) -> Machine:
    """Nodes of eight H100 with so little host memory."""
    machine = load_machine("dgx-h100")
    host = machine.node.host
    assert host is not None
    node = machine.node.model_copy(update={"host": host.model_copy(update={"memory_gb": gb})})
    return machine.model_copy(update={"node": node})


def test_state_in_host_memory_leaves_the_device_and_makes_the_update_longer() -> None:
    model, models = bind(run_with(LARGE, global_batch=8), TracedModel), models_of(load_machine("dgx-h100"))
    here, there = (models.memory(model, layout.table) for layout in (LAYOUT, OFFLOADED))
    state = 8 * model.parameter_count() / 8
    assert there.host[0] == pytest.approx(state, rel=0.01) and here.host[0] == 0
    # Two buckets of parameters may still have theirs on the device.
    assert here.peak[0] - there.peak[0] == pytest.approx(state, rel=0.05)
    plain, longer = (models.times(model, layout.table) for layout in (LAYOUT, OFFLOADED))
    more = {name: float(longer.causes[name][0] - plain.causes[name][0]) for name in plain.causes}
    bucket = 2 * 2**27
    assert more.pop("optimizer") == pytest.approx((state + bucket) / (64e9 * LINK_SHARE), rel=0.01)
    assert not any(more.values())
    bounds = [float(bound_memory(model, layout.table)[0]) for layout in (LAYOUT, OFFLOADED)]
    assert bounds[0] - bounds[1] == pytest.approx(state, rel=0.01) and bounds[1] <= there.peak[0]


def test_a_host_that_is_too_small_fits_nothing_and_says_so() -> None:
    run = run_with(LARGE, global_batch=8, offload_optimizer=True)
    model = bind(run, TracedModel)
    assert models_of(with_host(2000)).memory(model, OFFLOADED.table).p_fits[0] > 0.9
    small = models_of(with_host(5))
    assert small.memory(model, OFFLOADED.table).p_fits[0] == 0
    assert small.memory(model, LAYOUT.table).p_fits[0] > 0.9
    planner = Planner(small.machine, small)
    reason = r"keeps \d+ GB in the host memory of a node, and 80% of 5 GB .*offload_optimizer=false"
    with pytest.raises(NothingFits, match=reason):
        make_plan(planner, Task(model, 8, {"dp_shard": 8, "dp_replicate": 1}), Wishes())


def test_a_machine_of_whose_host_nobody_says_anything_cannot_be_planned_for() -> None:
    model, models = bind(run_with(LARGE, global_batch=8), TracedModel), models_of(load_machine("aac-mi250"))
    for ask in (models.memory, models.times):
        assert ask(model, LAYOUT.table) is not None
        with pytest.raises(ConfigError, match=r"description of aac-mi250 says nothing; add node.host"):
            ask(model, OFFLOADED.table)


@pytest.mark.parametrize("offloaded", [False, True])
def test_layouts_are_listed_as_the_run_file_says_unless_both_are_asked_for(offloaded: bool) -> None:
    model = bind(run_with(global_batch=8, offload_optimizer=offloaded))
    assert set(enumerate_layouts(model, 4).offload_optimizer) == {offloaded}
    assert set(enumerate_layouts(model, 4, fixed={"offload_optimizer": True}).offload_optimizer) == {True}
    assert set(enumerate_layouts(model, 4, limits=Limits(offload_optimizer=True)).offload_optimizer) == {False, True}


def test_offloading_is_among_the_remedies_where_memory_ran_out() -> None:
    model = bind(run_with(LARGE, global_batch=8, recompute="full"), TracedModel)
    found = find_remedies(model, replace(LAYOUT, recompute="full"), "H100 SXM")
    (offloading,) = [remedy for remedy in found if remedy.words == "offload_optimizer=true"]
    assert offloading.memory < 0.9 and offloading.seconds > 1.0


def test_muon_works_on_many_parameters_together() -> None:
    lines = refusal(run_with({"optimizer.name": "muon"}, offload_optimizer=True), 1)
    assert "layout.offload_optimizer=true" in lines[0] and "optimizer.name=muon" in lines[0]
    assert lines[1] == "nearest legal: offload_optimizer=false, or optimizer.name=adamw"
